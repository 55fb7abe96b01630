"""torch.compile: results, one graph, one compile, order, overlap, and what a compiled graph does with errors.

The FFN ranks serve from threads of this process. All payloads are small integers, so every backend must give exactly
what the unsplit model gives; a layer's own arithmetic is chosen so that it stays among small integers.
"""

from __future__ import annotations

import copy
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import harness
import pytest
import torch
import torch._dynamo.testing
import torch._inductor.config as inductor_config
from expecttest import assert_expected_inline
from harness import SIZES, expected
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config as functorch_config
from torch.profiler import ProfilerActivity, profile

import afd_ops
from afd_ops import _C

on_every_device = pytest.mark.usefixtures("device")

TOPOLOGY = afd_ops.Topology(1, 2, 5)
HIDDEN, TOKENS = SIZES["hidden"], SIZES["tokens"]
BACKENDS = ["eager", "aot_eager", "inductor"]
# An idle server must not take the core away from the compiler.
QUIET: dict[str, Any] = dict(stages=2, depth=2, poll_interval=0.1)
# Everything by which inductor may move or merge work, as far as this torch has it.
REORDERING = {
    name: True
    for name in (
        "reorder_for_locality",
        "reorder_for_peak_memory",
        "reorder_for_compute_comm_overlap",
        "aggressive_fusion",
        "epilogue_fusion",
        "prologue_fusion",
        "loop_ordering_after_fusion",
        "combo_kernels",
    )
    if hasattr(inductor_config, name)
}


@pytest.fixture(scope="module", autouse=True)
def fresh_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cached graph can outlive the schema it was made with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
            yield


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def window() -> Iterator[afd_ops.Window]:
    """An attention rank's, served."""
    with harness.serving(TOPOLOGY, **QUIET) as (attention,):
        yield attention


def integers(*shape: int, low: int = -1, high: int = 2) -> Tensor:
    return torch.randint(low, high, shape).to(harness.DEVICE, torch.float32)


class Layer(nn.Module):
    """A decoder layer in small: norm, gate, routed experts, shared expert, residual; in integers."""

    def __init__(self, layer: int, stage: int = 0) -> None:
        super().__init__()
        self.gate = nn.Parameter(integers(HIDDEN, 2))
        self.shared = nn.Parameter(integers(HIDDEN, HIDDEN))
        self.experts: Any = afd_ops.RemoteExperts(layer, stage)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.remainder(x, 7) - 3
        score = hidden @ self.gate
        return hidden, torch.remainder(score.long(), TOPOLOGY.num_experts + 1) - 1, torch.remainder(score, 3)

    def base(self, hidden: Tensor) -> Tensor:
        return torch.relu(hidden @ self.shared) + hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden, ids, weights = self.route(x)
        ticket = self.experts.dispatch(hidden, ids, weights)
        return self.experts.combine(ticket, self.base(hidden))  # type: ignore[no-any-return]


class DropInLayer(Layer):
    """The same through RemoteExperts.forward."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, ids, weights = self.route(x)
        return self.experts(hidden, ids, weights, self.base(hidden))  # type: ignore[no-any-return]


class LocalExperts(nn.Module):
    """The unsplit model's experts: the oracle in the place of RemoteExperts."""

    def dispatch(self, *step: Tensor) -> tuple[Tensor, ...]:
        return step

    def combine(self, step: tuple[Tensor, ...], base: Tensor) -> Tensor:
        x, ids, weights = step
        return expected(TOPOLOGY, x, ids, weights, base)

    def forward(self, *step: Tensor) -> Tensor:
        return self.combine(step[:3], step[3])


def unsplit(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, Layer):
            layer.experts = LocalExperts()
    return model


def model_of(window: afd_ops.Window | None, layers: int, kind: type[Layer] = Layer) -> nn.Sequential:
    model = nn.Sequential(*(kind(layer) for layer in range(layers))).to(harness.DEVICE)
    afd_ops.attach(model, window)
    return model


def tokens(count: int) -> Tensor:
    """Inputs whose token count the compiler must not depend on (0 and 1 aside)."""
    x = integers(count, HIDDEN, low=-5, high=6)
    if count > 1:
        torch._dynamo.mark_dynamic(x, 0)
    return x


@contextmanager
def what_runs(weights: dict[tuple[int, ...], str] | None = None) -> Iterator[list[str]]:
    """Our ops as they really ran, whoever called them, and among them matrix products, by the shape of their weight."""
    ran: list[str] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        yield ran
    for event in sorted(profiler.events(), key=lambda event: event.time_range.start):
        if event.name.startswith("afd::"):
            ran.append(event.name.removeprefix("afd::"))
        elif weights and event.name in ("aten::mm", "aten::addmm"):
            ran += [weights[tuple(shape)] for shape in event.input_shapes if tuple(shape) in weights]


# Results and compiles.


@on_every_device
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_model_is_one_graph_for_every_batch_size_and_exact(
    window: afd_ops.Window, backend: str, mode: Any, seed: int
) -> None:
    """faults: wrong results, a graph break, a recompile per batch size. T = 0 and T = 1 may add one compile each."""
    layers = 2 if backend == "inductor" else 3  # inductor's compiles are slow
    model = model_of(window, layers)
    oracle, counter = unsplit(model), CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    ran = 0

    def check(*counts: int) -> None:
        nonlocal ran
        for count in counts:
            x = tokens(count)
            assert torch.equal(compiled(x), oracle(x)), count
            ran += layers

    with mode():
        check(TOKENS, 5, 2, 7)
        assert counter.frame_count == len(counter.graphs) == 1
        called = [str(node.target) for node in counter.graphs[0].graph.nodes if "afd" in str(node.target)]
        assert [name.split(".")[1] for name in called] == ["dispatch", "combine"] * layers
        if mode is torch.no_grad or backend != "inductor":
            check(1)
            assert counter.frame_count <= 2
            check(0)
            assert counter.frame_count <= 3
            settled = counter.frame_count
            check(1, 0, *range(2, TOKENS + 1))
            assert counter.frame_count == settled
    harness.synchronize()
    assert window.stats()["dispatches"] == window.stats()["combines"] == ran


def test_without_marks_two_compiles_settle_every_batch_size(window: afd_ops.Window, seed: int) -> None:
    """torch guesses from the second size it sees that sizes vary."""
    model = model_of(window, 2)
    oracle, counter = unsplit(model), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for count in (5, 3, TOKENS, 2, 7, 5):
            x = integers(count, HIDDEN)
            assert torch.equal(compiled(x), oracle(x))
    assert counter.frame_count <= 2


@on_every_device
@pytest.mark.parametrize("kind", [Layer, DropInLayer])
@pytest.mark.parametrize("how", ["module.compile", "torch.compile"])
def test_one_compile_serves_all_layers_and_stages(
    window: afd_ops.Window, how: str, kind: type[Layer], seed: int
) -> None:
    """fault: a recompile per layer or stage; eight of them and torch gives up compiling."""
    layers = [kind(layer, stage).to(harness.DEVICE).eval() for layer in range(6) for stage in range(2)]
    oracle = [unsplit(layer) for layer in layers]
    afd_ops.attach(nn.ModuleList(layers), window)
    counter = CompileCounterWithBackend("aot_eager")
    options: dict[str, Any] = dict(backend=counter, fullgraph=True)
    compiled: list[Any] = layers
    if how == "module.compile":
        for layer in layers:
            layer.compile(**options)
    else:
        compiled = [torch.compile(layer, **options) for layer in layers]
    with torch.no_grad():
        for count in (5, 2, TOKENS):
            for layer, reference in zip(compiled, oracle, strict=True):
                x = tokens(count)
                assert torch.equal(layer(x), reference(x))
    assert counter.frame_count == 1


@on_every_device
def test_ops_are_opaque_nodes_without_a_graph_break(window: afd_ops.Window, seed: int) -> None:
    model = model_of(window, 2, DropInLayer)
    with torch.no_grad():
        explanation = torch._dynamo.explain(model)(tokens(5))
    assert (explanation.graph_count, explanation.graph_break_count) == (1, 0), explanation
    targets = [node.target for node in explanation.graphs[0].graph.nodes if node.op == "call_function"]
    ours = [str(target) for target in targets if str(target).startswith("afd.")]
    assert ours == ["afd.dispatch", "afd.combine"] * 2


def test_the_ops_of_one_layer_in_its_graph(window: afd_ops.Window, seed: int) -> None:
    """Pinned, so that a change of what the compiler sees of a layer is a decision. Names and shapes only: the printed
    graph differs from torch to torch."""
    lines: list[str] = []

    def capture(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            # A mutating op is wrapped by functionalisation; its value is a tuple that begins with the op's own results.
            wrapped = str(node.target).startswith("auto_functionalized")
            name, value = (node.args[0] if wrapped else node.target), node.meta.get("val")
            value = value[0] if wrapped else value
            if isinstance(value, Tensor) and "getitem" not in str(name) and "copy_." not in str(name):
                dtype = str(value.dtype).removeprefix("torch.")
                lines.append(f"{str(name).removesuffix('.default')} {list(value.shape)} {dtype}\n")
        return graph.forward  # type: ignore[no-any-return]

    layer = model_of(window, 1)[0]
    with torch.no_grad():
        x = integers(5, HIDDEN)
        out = torch.compile(layer, backend=aot_autograd(fw_compiler=capture), fullgraph=True, dynamic=False)(x)
        assert torch.equal(out, unsplit(layer)(x))
    assert_expected_inline(
        "".join(lines),
        """\
aten.remainder.Scalar [5, 16] float32
aten.sub.Tensor [5, 16] float32
aten.mm [5, 2] float32
aten._to_copy [5, 2] int64
aten.remainder.Scalar [5, 2] int64
aten.sub.Tensor [5, 2] int64
aten.remainder.Scalar [5, 2] float32
afd.dispatch [6, 8] int32
aten.mm [5, 16] float32
aten.relu [5, 16] float32
aten.add.Tensor [5, 16] float32
afd.combine [5, 16] float32
""",
    )


# Nothing dropped, duplicated or moved.


@on_every_device
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unused", ["dispatch", "combine"])
def test_an_op_whose_output_is_unused_runs_once_per_call(backend: str, unused: str, seed: int) -> None:
    """fault: an op whose output nobody reads is dropped, and the peer hangs."""
    with harness.serving(TOPOLOGY, **{**QUIET, "depth": 4}) as (window,):
        experts = harness.remote(window)

        def half(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor) -> Tensor:
            experts.dispatch(x, ids, weights)
            return base

        def whole(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor) -> Tensor:
            experts.combine(experts.dispatch(x, ids, weights), base)
            return base

        step = harness.random_step(TOPOLOGY, 5)
        compiled = torch.compile(half if unused == "dispatch" else whole, backend=backend, fullgraph=True)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(compiled(*step), step[3])
        harness.synchronize()
        combines = 0 if unused == "dispatch" else 3
        assert (window.stats()["dispatches"], window.stats()["combines"]) == (3, combines)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_ffn_half_can_be_compiled_too(backend: str, seed: int) -> None:
    """arrive, receive and reply in one graph with a bucket of rows; reply has no output at all, and is not dropped."""
    topology = afd_ops.Topology(1, 1, 3)
    with harness.windows(topology, **{**QUIET, "poll_interval": 20.0}) as (attention, ffn):
        port, bucket = ffn.port(), ffn.geometry.tokens * ffn.geometry.topk

        def serve(port: Tensor) -> Tensor:
            item = torch.ops.afd.arrive(port, ffn.id)
            rows, _, offsets = torch.ops.afd.receive(item, port, ffn.id, bucket)
            expert = torch.bucketize(torch.arange(bucket, dtype=torch.int32), offsets, right=True).unsqueeze(1)
            torch.ops.afd.reply(rows * (expert % 3 + 1) + expert, item, port, ffn.id)
            return item

        compiled = torch.compile(serve, backend=backend, fullgraph=True)
        experts = afd_ops.RemoteExperts(0).attach(attention)
        with torch.no_grad():
            for count in (5, 1, 0, 16):
                step = harness.random_step(topology, count)
                ticket = experts.dispatch(*step[:3])
                assert compiled(port)[0, _C.ITEM_COUNT] == 1
                assert torch.equal(experts.combine(ticket, step[3]), expected(topology, *step))
        assert (ffn.stats()["items"], ffn.stats()["replies"]) == (4, 4)


def chain(experts: list[Any], steps: list[tuple[Tensor, ...]], shared: Tensor) -> tuple[Tensor, ...]:
    """Layer after layer, each fed by the one before."""
    x, (_, ids, weights, base) = steps[0][0], steps[0]
    for layer in experts:
        ticket = layer.dispatch(x, ids, weights)
        x = torch.remainder(layer.combine(ticket, base + x @ shared), 5)
    return (x,)


def ubatches(experts: list[Any], steps: list[tuple[Tensor, ...]], shared: Tensor) -> tuple[Tensor, ...]:
    """Two lanes in one graph: while one's tokens are away, the other computes."""
    x, ids, weights, _ = steps[0]
    outs = []
    for first, second in (experts[:2], experts[2:]):
        one, two = first.dispatch(x, ids, weights), second.dispatch(x * 2, ids, weights)
        outs += [first.combine(one, x @ shared), second.combine(two, (x + 1) @ shared)]
    return tuple(outs)


def independent(experts: list[Any], steps: list[tuple[Tensor, ...]], shared: Tensor) -> tuple[Tensor, ...]:
    """One round trip after the other that share nothing: no data says which is first. Sending all rows first would free
    memory, and takes more rings than there are."""
    rows = [torch.relu(steps[0][0] + i) for i in range(len(experts))]
    _, ids, weights, base = steps[0]
    return tuple(
        e.combine(e.dispatch(x, ids, weights), base.float()).sum(0) for e, x in zip(experts, rows, strict=True)
    )


@on_every_device
@pytest.mark.parametrize("program", [chain, ubatches, independent])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "inductor, everything on"])
def test_ops_run_in_program_order(program: Callable[..., tuple[Tensor, ...]], backend: str, seed: int) -> None:
    """faults: reordered across layers (more in flight than rings, in another order than the peers expect), or across
    lanes (two ubatches lose their overlap). Inductor moves whatever no dependency holds, to save memory for one."""
    options = REORDERING if backend.endswith("on") else None
    served: list[int] = []

    def recording(topology: afd_ops.Topology, rank: int) -> afd_ops.Experts:
        experts = harness.experts_of(topology, rank)

        def record(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
            served.append(layer)
            return experts(rows, scales, offsets, layer)

        return record

    one = afd_ops.Topology(1, 1, 5)
    hidden = 256 if program is independent else HIDDEN  # so that a ticket is small beside the rows
    sizes = {**QUIET, "hidden": hidden, "dtype": torch.bfloat16, "depth": 1}
    with harness.serving(one, recording, **sizes) as (window,):
        stages = 2 if program is ubatches else 1
        experts = [harness.remote(window, layer, layer % stages) for layer in range(4)]
        assert all(layer.order is window.order for layer in experts), "one tensor, or nothing orders different layers"
        steps = [harness.random_step(one, TOKENS, hidden=hidden, dtype=torch.bfloat16) for _ in range(2)]
        for step in steps:
            step[1][:, 0] = 0  # every step reaches the peer's experts, which tell the order
        shared = torch.eye(hidden, dtype=torch.bfloat16, device=harness.DEVICE)
        with torch.no_grad():
            with what_runs() as order:
                eager = program(experts, steps, shared)
            compiled = torch.compile(
                program, backend=backend.split(",")[0], fullgraph=True, dynamic=False, options=options
            )
            compiled(experts, steps, shared)
            harness.synchronize()
            served.clear()
            with what_runs() as ran:
                out = compiled(experts, steps, shared)
                harness.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(out, eager, strict=True))
        ours = ("dispatch", "combine")
        if harness.host_reads():  # the profiler of a CUDA build loses some events, also of aot_eager's run
            assert [op for op in ran if op in ours] == [op for op in order if op in ours]
        assert served == [0, 1, 2, 3]


# Overlap: what the source computes between the two ops is between them in the compiled program.


class MoELayer(Layer):
    """In floats, with the shapes of the real thing: softmax gate, topk, a gated shared expert."""

    def __init__(self, layer: int, stage: int = 0) -> None:
        super().__init__(layer, stage)
        self.gate = nn.Parameter(torch.randn(HIDDEN, TOPOLOGY.num_experts))
        self.shared = nn.Parameter(torch.randn(HIDDEN, 48))
        self.down = nn.Parameter(torch.randn(48, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.rms_norm(x, (HIDDEN,))
        weights, ids = torch.softmax(hidden @ self.gate, dim=-1).topk(2)
        ticket = self.experts.dispatch(hidden, ids, weights)
        base = nn.functional.silu(hidden @ self.shared) @ self.down + x
        return self.experts.combine(ticket, base)  # type: ignore[no-any-return]


class Unnormed(MoELayer):
    """Compiled apart from its norm: what is sent is an input of the graph."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.softmax(x @ self.gate, dim=-1).topk(2)
        ticket = self.experts.dispatch(x, ids, weights)
        return self.experts.combine(ticket, torch.relu(x @ self.shared) @ self.down)  # type: ignore[no-any-return]


class Lanes(nn.Module):
    """While one lane's tokens are away, the other lane does its attention, which shares no data with them."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.one, self.two = Layer(layer, 0), Layer(layer, 1)
        self.attention, self.project = nn.Parameter(integers(HIDDEN, 32)), nn.Parameter(integers(32, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden, *routing = self.one.route(x)
        first = self.one.experts.dispatch(hidden, *routing)
        other, *routing = self.two.route(torch.relu(x @ self.attention) @ self.project)
        second = self.two.experts.dispatch(other, *routing)
        out = self.one.experts.combine(first, self.one.base(hidden))
        return out, self.two.experts.combine(second, self.two.base(other))


class WithWorkAfter(nn.Module):
    """Something heavy that needs nothing of the round trip and stands behind it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.after = nn.Parameter(integers(HIDDEN, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x), x @ self.after


WEIGHTS = {(HIDDEN, 2): "gate", (HIDDEN, 5): "gate", (HIDDEN, HIDDEN): "shared", (HIDDEN, 48): "shared"}
WEIGHTS |= {(48, HIDDEN): "down", (HIDDEN, 32): "attention", (32, HIDDEN): "project", (HIDDEN, 24): "after"}


def overlapped(program: list[str]) -> list[Counter[str]]:
    """What runs between each dispatch and its combine."""
    starts, ends = ([i for i, step in enumerate(program) if step == op] for op in ("dispatch", "combine"))
    return [Counter(program[start + 1 : end]) for start, end in zip(starts, ends, strict=True)]


def check_overlap(window: afd_ops.Window, model: nn.Module, options: dict[str, Any], x: Tensor) -> None:
    """Compiled, at least that runs between dispatch and combine which runs there in eager mode."""
    afd_ops.attach(model, window)
    compiled = torch.compile(model, fullgraph=True, options=options or None)
    with torch.no_grad():
        with what_runs(WEIGHTS) as source:
            model(x)
        compiled(x)
        with what_runs(WEIGHTS) as program:
            compiled(x)
    assert Counter(program) == Counter(source)
    for ran, written in zip(overlapped(program), overlapped(source), strict=True):
        assert written["shared"] and ran >= written, program


@pytest.mark.parametrize("options", [{}, REORDERING], ids=["defaults", "everything on"])
@pytest.mark.parametrize("after", [False, True], ids=["alone", "with work after"])
def test_what_base_needs_is_computed_between_dispatch_and_combine(
    window: afd_ops.Window, after: bool, options: dict[str, Any], seed: int
) -> None:
    """faults: inductor sinks the shared expert behind combine, or hoists it in front of dispatch: right results, and no
    overlap. Behind is impossible, since combine needs it; in front is inductor's choice, see below."""
    check_overlap(window, WithWorkAfter(MoELayer(0)) if after else MoELayer(0), options, integers(5, HIDDEN))


@pytest.mark.parametrize("others", [{}, REORDERING], ids=["alone", "with everything else on"])
@pytest.mark.parametrize("kind", [Layer, Unnormed, Lanes])
def test_reorder_for_peak_memory_off_keeps_the_overlap_of_the_source(
    window: afd_ops.Window, kind: type[nn.Module], others: dict[str, Any], seed: int
) -> None:
    """The way to be sure. By default inductor takes whichever order of the whole graph needs the least memory, and what
    base needs may come before dispatch in it: that moves Layer and Unnormed."""
    check_overlap(window, kind(0), {**others, "reorder_for_peak_memory": False}, tokens(5))


# Binding, errors, gradients.


def test_attach_and_detach_after_compiling(window: afd_ops.Window, seed: int) -> None:
    """A model may be compiled before any window exists; attaching costs one compile for all layers, not one each."""
    layers = [Layer(layer, layer % 2).eval() for layer in range(4)]
    oracle = [unsplit(layer) for layer in layers]
    counter = CompileCounterWithBackend("aot_eager")
    for layer in layers:
        layer.compile(backend=counter, fullgraph=True)
    with torch.no_grad():
        x = tokens(5)
        base = [layer.base(layer.route(x)[0]) for layer in layers]
        assert all(torch.equal(layer(x), b) for layer, b in zip(layers, base, strict=True))
        assert counter.frame_count == 1
        afd_ops.attach(nn.ModuleList(layers), window)
        assert all(torch.equal(layer(x), reference(x)) for layer, reference in zip(layers, oracle, strict=True))
        assert counter.frame_count == 2
        afd_ops.attach(nn.ModuleList(layers), None)
        assert all(torch.equal(layer(x), b) for layer, b in zip(layers, base, strict=True))
        afd_ops.attach(nn.ModuleList(layers), window)
        assert all(torch.equal(layer(x), reference(x)) for layer, reference in zip(layers, oracle, strict=True))
        assert counter.frame_count == 2, "both graphs were there already"
        with harness.serving(TOPOLOGY, **QUIET) as (another,):
            afd_ops.attach(nn.ModuleList(layers), another)
            assert all(torch.equal(layer(x), reference(x)) for layer, reference in zip(layers, oracle, strict=True))
            assert another.stats()["dispatches"] == len(layers)
        assert counter.frame_count == 3


def test_a_detached_module_returns_base_and_says_so_once(seed: int) -> None:
    x, ids, weights, base = harness.random_step(TOPOLOGY, 5)
    experts = afd_ops.RemoteExperts(7)
    with pytest.warns(UserWarning, match="RemoteExperts of layer 7 has no window") as said:
        assert torch.equal(experts(x, ids, weights, base), base)
        assert torch.equal(experts(x, ids, weights), torch.zeros_like(x))
        assert experts.combine(experts.dispatch(x, ids, weights), base) is base
    assert len(said) == 1
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", UserWarning)
        compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x, ids, weights, base), base)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_training_is_refused_and_costs_nothing(window: afd_ops.Window, backend: str, seed: int) -> None:
    """fault: training by accident, with experts that silently get no gradient."""
    layer = model_of(window, 1)[0]
    before, x = window.stats(), tokens(5)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with (
        torch.enable_grad(),
        pytest.raises(afd_ops.ArgumentError, match=r"requires grad.*inference_mode"),
        window.step(),
    ):
        compiled(x)
    assert window.stats() == before
    with torch.no_grad():
        assert torch.equal(compiled(x), unsplit(layer)(x))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_bad_argument_in_a_compiled_graph_is_typed_and_nothing_is_lost(
    window: afd_ops.Window, backend: str, seed: int
) -> None:
    experts = afd_ops.RemoteExperts(0).attach(window)

    def round_trip(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor) -> Tensor:
        return experts.combine(experts.dispatch(x, ids, weights), base)

    compiled = torch.compile(round_trip, backend=backend, fullgraph=True, dynamic=True)
    before = window.stats()
    good, long, bad = (harness.random_step(TOPOLOGY, count) for count in (5, TOKENS + 1, 5))
    bad[1][4, 1] = TOPOLOGY.num_experts
    with torch.no_grad():
        for step, says in ((long, "x has 17 tokens.* 16"), (bad, r"topk_ids\[4, 1\] is 5.* 4")):
            with pytest.raises(afd_ops.ArgumentError, match=says), window.step():
                compiled(*step)
        assert window.stats() == before
        window.check()
        assert torch.equal(compiled(*good), expected(TOPOLOGY, *good))


def test_a_compiled_graph_survives_reset(seed: int) -> None:
    """The window id and the ports stay valid, so nothing compiles again: a generation is not baked into a graph."""
    topology = afd_ops.Topology(1, 1, 5)
    with harness.windows(topology, **QUIET) as (window, peer):
        experts = afd_ops.RemoteExperts(0).attach(window)
        server = afd_ops.ExpertServer(peer, harness.experts_of(topology, 0))
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(backend=counter, fullgraph=True)
        def send(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return experts.dispatch(x, ids, weights)

        @torch.compile(backend=counter, fullgraph=True)
        def fetch(ticket: Tensor, base: Tensor) -> Tensor:
            return experts.combine(ticket, base)

        with torch.no_grad():
            for generation in range(3):
                step = harness.random_step(topology, 5)
                ticket = send(*step[:3])
                assert server.step() == 1
                assert torch.equal(fetch(ticket, step[3]), expected(topology, *step))
                lost = send(*step[:3])
                threads = [threading.Thread(target=w.reset) for w in (window, peer)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(20)
                assert window.generation == generation + 1
                with pytest.raises(RuntimeError, match="Stale in afd::combine: ticket is of generation"):
                    fetch(lost, step[3])
        assert counter.frame_count == 2


# Between processes.


def _compiled_steps(
    topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], turns: int, seed: int
) -> Any:
    with afd_ops.Window(topology, bootstrap, **sizes) as window:
        if window.role == "ffn":
            return harness.serve(topology, window)
        torch.manual_seed(seed)
        model = nn.Sequential(*(Layer(layer) for layer in range(3)))
        oracle, counter = unsplit(model), CompileCounterWithBackend("aot_eager")
        afd_ops.attach(model, window)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        with torch.no_grad():
            for turn in range(turns):
                x = tokens(2 + turn % (TOKENS - 1))
                with window.step():
                    out = compiled(x)
                assert torch.equal(out, oracle(x)), turn
        return counter.frame_count, window.stats()["dispatches"]


def test_between_processes_over_shared_memory(seed: int) -> None:
    turns = 20
    topology = afd_ops.Topology(1, 1, TOPOLOGY.num_experts)
    (compiles, dispatches), stats = harness.run_processes(topology, _compiled_steps, turns, seed, poll_interval=0.05)
    assert (compiles, dispatches) == (1, 3 * turns)
    assert stats["replies"] == 3 * turns
