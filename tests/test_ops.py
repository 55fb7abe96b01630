"""The ops one by one, on every device: schemas, opcheck, fakes, the input contract, the refusal of gradients.

`by_hand` walks through a round trip of two attention and two FFN ranks in this process and stops before any op, so that
a test can look at that op's call, misuse it, or repeat it, and then let the round trip end: its result must be exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import harness
import pytest
import torch
from harness import SIZES, expected, random_step
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import afd_ops
from afd_ops import _C

pytestmark = pytest.mark.usefixtures("device")

SCHEMAS = {
    "plan": "plan(Tensor topk_ids, Tensor expert_map, int ffn_size, int local_experts) -> (Tensor, Tensor, Tensor)",
    "dispatch": (
        "dispatch(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor port, Tensor(a!) order, int window) -> Tensor"
    ),
    "arrive": "arrive(Tensor(a!) port, int window) -> Tensor",
    "receive": "receive(Tensor item, Tensor(a!) port, int window, int rows) -> (Tensor, Tensor, Tensor)",
    "receive_into": (
        "receive_into(Tensor item, Tensor(a!) rows, Tensor(b!) scales, Tensor(c!) offsets, Tensor(d!) port, int window)"
        " -> ()"
    ),
    "reply": "reply(Tensor expert_out, Tensor item, Tensor(a!) port, int window) -> ()",
    "combine": "combine(Tensor ticket, Tensor base, Tensor port, Tensor(a!) order, int window) -> Tensor",
}
TOPOLOGY = afd_ops.Topology(2, 2, 5)  # ffn 0 owns experts 0 to 2, ffn 1 owns 3 and 4
LAYER, STAGE = 3, 1
HIDDEN, TOPK, TOKENS = SIZES["hidden"], SIZES["topk"], SIZES["tokens"]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
MODES: list[Callable[[], AbstractContextManager[Any]]] = [torch.enable_grad, torch.no_grad, torch.inference_mode]
Call = tuple[Any, ...]


def sizes_of(dtype: torch.dtype) -> dict[str, Any]:
    return {**SIZES, "dtype": dtype, "hidden": 256 if dtype == torch.float8_e4m3fn else HIDDEN}


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[tuple[str, torch.dtype], list[afd_ops.Window]]]:
    """All ranks' windows, per device and payload dtype. Every test leaves them as idle as it found them."""
    opened: dict[tuple[str, torch.dtype], list[afd_ops.Window]] = {}
    yield opened
    for window in itertools.chain(*opened.values()):
        window.close()


@pytest.fixture
def cluster(
    clusters: dict[tuple[str, torch.dtype], list[afd_ops.Window]], device: str, request: pytest.FixtureRequest
) -> Iterator[list[afd_ops.Window]]:
    dtype = request.node.callspec.params.get("dtype", torch.float32)
    if (device, dtype) not in clusters:
        sizes = {**sizes_of(dtype), "stages": 2, "depth": 3}
        clusters[device, dtype] = afd_ops.open_local(TOPOLOGY, devices=harness.devices(TOPOLOGY), **sizes)
        for window in clusters[device, dtype]:
            harness.fill_with_nan(window)
    windows = clusters[device, dtype]
    yield windows
    harness.synchronize()
    if any(_C.in_flight(w.id) for w in windows if w.role == "attention") or any(w.errors() for w in windows):
        harness.reset(windows)  # a test failed half way, or made a kernel stop a window; the next is not to blame


def overload(name: str) -> Any:
    return getattr(torch.ops.afd, name).default


def argument_names(name: str) -> list[str]:
    return [argument.name for argument in overload(name)._schema.arguments]


def rows_apart(t: Tensor) -> Tensor:
    """The same values in every other row of a larger tensor."""
    return torch.stack([t, torch.full_like(t, 9)], dim=1)[:, 0]


def columns_first(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def by_hand(
    windows: list[afd_ops.Window], tokens: int, dtype: torch.dtype = torch.float32, *, strided: bool = False
) -> Iterator[tuple[str, Call]]:
    """One round trip; yields each op's name and arguments before it is called, and checks the results at the end."""
    attention, ffn = windows[: TOPOLOGY.attention_size], windows[TOPOLOGY.attention_size :]
    apart, across = (rows_apart, columns_first) if strided else (torch.Tensor.contiguous, torch.Tensor.contiguous)
    steps = [random_step(TOPOLOGY, tokens, **sizes_of(dtype)) for _ in attention]
    args: Call = (across(steps[0][1]), torch.tensor(TOPOLOGY.expert_map, dtype=torch.int32).to(harness.DEVICE), 2, 3)
    yield "plan", args
    tickets = []
    for window, (x, ids, weights, _) in zip(attention, steps, strict=True):
        args = (apart(x), across(ids), across(weights), window.port(LAYER, STAGE), window.order, window.id)
        yield "dispatch", args
        tickets.append(torch.ops.afd.dispatch(*args))
    harness.synchronize()
    for window in ffn:
        taken = 0
        while taken < len(attention):  # one item holds them all only if its rows fit
            args = (window.port(), window.id)
            yield "arrive", args
            item = torch.ops.afd.arrive(*args)
            count, layer, rows = item[0, _C.ITEM_COUNT :].tolist()[:3]
            assert (layer, count > 0) == (LAYER, True)
            taken += count
            args = (item, window.port(), window.id, rows)
            yield "receive", args
            x, scales, offsets = torch.ops.afd.receive(*args)
            facts = _C.facts(window.id)
            buffers = (
                torch.zeros(rows + 3, facts["hidden"], dtype=dtype, device=x.device),
                torch.zeros((rows + 3, *scales.shape[1:]) if scales.dim() > 1 else 0, device=x.device),
                torch.zeros(facts["owned_experts"], dtype=torch.int32, device=x.device),
            )
            args = (item, *buffers, window.port(), window.id)
            yield "receive_into", args
            torch.ops.afd.receive_into(*args)
            assert torch.equal(buffers[0][:rows].float(), x.float()) and torch.equal(buffers[2], offsets)
            assert torch.equal(buffers[1][:rows], scales)
            out = harness.experts_of(TOPOLOGY, window.role_rank)(buffers[0][:rows], buffers[1][:rows], offsets, layer)
            args = (apart(out), item, window.port(), window.id)
            yield "reply", args
            torch.ops.afd.reply(*args)
    for window, ticket, step in zip(attention, tickets, steps, strict=True):
        args = (ticket, apart(step[3]), window.port(LAYER, STAGE), window.order, window.id)
        yield "combine", args
        assert torch.equal(torch.ops.afd.combine(*args), expected(TOPOLOGY, *step, dtype))
    harness.synchronize()
    for window in windows:
        window.check()
        assert window.errors() == []


def stop_before(name: str, trip: Iterator[tuple[str, Call]]) -> Call:
    return next(args for op, args in trip if op == name)


def finish(trip: Iterator[tuple[str, Call]]) -> None:
    for _ in trip:
        pass


class State:
    """Every byte of the protocol on all ranks: window memory, sequences, rings, what is taken, the cursor."""

    TAKEN_BYTES = 32  # struct Taken of csrc/control.h

    def __init__(self, windows: list[afd_ops.Window]) -> None:
        harness.synchronize()
        self.memory: list[Tensor] = []
        for window in windows:
            g, at, slots = window.geometry, _C.addresses(window.id), _C.facts(window.id)["slots"]
            sizes = {
                "window": g.layout["slots"] + slots * g.layout["slot_bytes"],
                "next": 8 * g.stages,
                "ring": 8 * g.stages * g.depth,
                "taken": self.TAKEN_BYTES * slots,
                "cursor": 4,
            }
            if window.device_half:
                at |= window.device_half.addresses(window.id)
            self.memory += [harness.memory(window.heap.device, at[name], size) for name, size in sizes.items()]
        self.content = [part.clone() for part in self.memory]
        harness.synchronize()

    def restore(self) -> None:
        harness.synchronize()
        with _disable_current_modes():  # of opcheck, which would take these copies for the op's
            for part, content in zip(self.memory, self.content, strict=True):
                part.copy_(content)
        harness.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and all(map(torch.equal, self.content, other.content))

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def refused(
    windows: list[afd_ops.Window], window: afd_ops.Window, kind: type[afd_ops.AfdError], says: str
) -> Iterator[None]:
    """The op inside, of `window`, is refused for the content of an argument: it raises `says` and leaves every rank as
    it was; where its kernel finds it, check() raises `kind`, and only a reset makes the ranks go on."""
    state = State(windows)
    if harness.host_reads():
        with pytest.raises(RuntimeError, match=says) as raised:
            yield
        assert type(afd_ops.errors.typed(raised.value)) is kind
        assert State(windows) == state
    else:
        yield
        harness.synchronize()
        with pytest.raises(kind):
            window.check()


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """torch fills fresh tensors, so that what an op leaves unwritten is the same in two runs."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Rearmed(TorchDispatchMode):
    """Puts all ranks back to where they are now before every call of `op` on real tensors: each call sees the first."""

    supports_higher_order_operators = True  # after functionalisation the op is called where no mode sees it

    def __init__(self, op: Any, windows: list[afd_ops.Window]) -> None:
        super().__init__()
        self.op, self.state, self.calls = op, State(windows), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.arg_tree_leaves(*args, **kwargs)
        real = not any(isinstance(leaf, FakeTensor) or getattr(leaf, "is_meta", False) for leaf in leaves)
        if real and (func is self.op or args[:1] == (self.op,)):
            self.state.restore()
            self.calls += 1
        return func(*args, **kwargs)


# Schemas and opcheck.


def test_every_op_has_its_documented_schema_and_no_other_exists(device: str) -> None:
    """fault: a schema that does not parse, or a kernel under another name, is a silent no-op of the extension."""
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("afd::")}
    assert names == {f"afd::{name}" for name in SCHEMAS}
    for name, schema in SCHEMAS.items():
        assert str(overload(name)._schema) == f"afd::{schema}"
        assert getattr(torch.ops.afd, name).overloads() == ["default"]
        for key in (torch.device(device).type.upper(), "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"afd::{name}", key), (name, key)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SCHEMAS)
def test_opcheck(cluster: list[afd_ops.Window], name: str, dtype: torch.dtype, tokens: int, seed: int) -> None:
    """faults: undeclared mutation, an alias, a missing fake, one whose sizes, strides or dtype differ, a static T."""
    if name == "receive_into" and dtype == torch.float8_e4m3fn:
        pytest.skip("opcheck compares an argument that is written to by arithmetic that the CPU lacks for float8")
    trip = by_hand(cluster, tokens, dtype, strided=tokens == 5)
    args = stop_before(name, trip)
    with Rearmed(overload(name), cluster) as rearmed:
        results = torch.library.opcheck(overload(name), args)
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) >= 4
    assert rearmed.calls >= 4
    rearmed.state.restore()
    finish(trip)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize(
    ("dtype", "strided"), [(torch.float32, False), (torch.float32, True), (torch.float8_e4m3fn, False)]
)
def test_fakes_are_like_the_real_thing_in_every_mode(
    cluster: list[afd_ops.Window], tokens: int, dtype: torch.dtype, strided: bool, seed: int
) -> None:
    """fault: a fake's strides differ from the real ones, and compiled code reads the rows at the wrong place."""

    def look(t: Tensor) -> tuple[Any, ...]:
        return [*map(int, t.shape)], [*map(int, t.stride())], t.dtype, t.device, t.layout, int(t.storage_offset())

    trip = by_hand(cluster, tokens, dtype, strided=strided)
    for name, args in trip:
        fakes = []
        for mode in MODES:
            for shape_env in (None, ShapeEnv()):
                with mode(), FakeTensorMode(shape_env=shape_env) as fake:
                    out = overload(name)(*(fake.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
                outs = [t for t in (out if isinstance(out, tuple) else [out]) if t is not None]
                if shape_env is not None and tokens == 5 and name in ("plan", "dispatch", "combine"):
                    assert any(isinstance(s, torch.SymInt) for t in outs for s in t.shape), f"{name}: T became static"
                fakes.append([look(t) for t in outs])
        before = State(cluster)
        for mode, pair in zip(MODES, zip(fakes[::2], fakes[1::2], strict=True), strict=True):
            before.restore()
            with mode():
                out = overload(name)(*args)
            real = [look(t) for t in (out if isinstance(out, tuple) else [out]) if t is not None]
            assert pair == (real, real), (name, mode)
        before.restore()


@pytest.mark.parametrize("dtype", DTYPES)
def test_receive_gives_the_bucket_that_was_asked_for(
    cluster: list[afd_ops.Window], dtype: torch.dtype, seed: int
) -> None:
    trip = by_hand(cluster, 5, dtype)
    item, port, window, rows = stop_before("receive", trip)
    exact, factors, ends = torch.ops.afd.receive(item, port, window, rows)
    bucket, scales, offsets = torch.ops.afd.receive(item, port, window, rows + 7)
    assert exact.dtype == dtype and bucket.shape == (rows + 7, sizes_of(dtype)["hidden"])
    assert torch.equal(bucket[:rows].float(), exact.float()) and torch.equal(offsets, ends)
    if dtype == torch.float8_e4m3fn:
        assert scales.shape == (rows + 7, 2) and torch.equal(scales[:rows], factors)
    else:
        assert scales.shape == factors.shape == (0,)
    finish(trip)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn])
@pytest.mark.parametrize(("name", "argument"), [("dispatch", "x"), ("reply", "expert_out")])
def test_a_float8_window_takes_and_gives_bfloat16(
    cluster: list[afd_ops.Window], dtype: torch.dtype, name: str, argument: str, seed: int
) -> None:
    trip = by_hand(cluster, 5, dtype)
    good = stop_before(name, trip)
    at, state = argument_names(name).index(argument), State(cluster)
    for wrong in (torch.float32, torch.float16, dtype):
        with pytest.raises(
            RuntimeError, match=f"^Argument in afd::{name}: {argument} is .*, expected bfloat16"
        ) as told:
            overload(name)(*good[:at], good[at].to(wrong), *good[at + 1 :])
        assert f"{argument} is {str(wrong).removeprefix('torch.')}" in str(told.value)
    assert State(cluster) == state
    finish(trip)


@pytest.mark.memcheck
@pytest.mark.parametrize(("ffn_size", "num_experts"), [(2, 5), (40, 77)])
@pytest.mark.parametrize("width", [torch.int32, torch.int64])
def test_plan_is_what_its_definition_says(ffn_size: int, num_experts: int, width: torch.dtype, seed: int) -> None:
    topology = afd_ops.Topology(1, ffn_size, num_experts)
    ids = torch.randint(-1, num_experts, (9, 3)).to(width)
    ids[4], ids[5] = ids[5, 0], -1  # one expert three times, and padding
    expert_map = torch.tensor(topology.expert_map, dtype=torch.int32)
    on_device = [t.to(harness.DEVICE) for t in (columns_first(ids), expert_map)]
    got = [t.cpu() for t in torch.ops.afd.plan(*on_device, ffn_size, topology.local_experts)]
    position = torch.full((ffn_size, 9, 3, 2), -1, dtype=torch.int32)
    counts = torch.zeros(ffn_size, topology.local_experts, dtype=torch.int32)
    masks = [[0] * -(-ffn_size // 32) for _ in range(9)]
    for t, k in itertools.product(range(9), range(3)):
        index = int(ids[t, k])
        if index < 0:
            continue
        rank, local = topology.expert_map[index]
        position[rank, t, k] = torch.tensor([local, counts[rank, local]])
        counts[rank, local] += 1
        masks[t][rank // 32] |= 1 << rank % 32
    wrapped = torch.tensor(masks).to(torch.int32)  # bit 31 makes an int32 negative
    assert torch.equal(got[0], position) and torch.equal(got[1], counts) and torch.equal(got[2], wrapped)


# The input contract.


def cut(t: Tensor) -> Tensor:
    return t[:-1]


def wide(t: Tensor) -> Tensor:
    return torch.cat([t, t[:, :1]], dim=1)


def flat(t: Tensor) -> Tensor:
    return t.flatten()


def deep(t: Tensor) -> Tensor:
    return t[None]


def with_word(*place: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[place] = value
        return t

    return change


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype)


class Refusal(NamedTuple):
    """A bad argument of a step of 5 tokens.

    Attributes:
        wrong: what is wrong with it.
        says: what the error says beside the argument's name.
        found: for what the host does not see without reading memory: what check() raises where a kernel finds it, None
            where no kernel looks.
    """

    op: str
    argument: str
    wrong: str
    change: Callable[[Any], Any]
    says: tuple[str, ...]
    found: type[afd_ops.AfdError] | str | None = "by the host"


ARGUMENT, STALE = afd_ops.ArgumentError, afd_ops.StaleError
ROWS: list[tuple[Any, ...]] = [
    ("dispatch", "x", "1 dimension", flat, ("x has 1 dim", "expected 2")),
    ("dispatch", "x", "3 dimensions", deep, ("x has 3 dim", "expected 2")),
    ("dispatch", "x", "hidden", wide, ("x has size 17", "expected 16")),
    ("dispatch", "x", "bfloat16", to(torch.bfloat16), ("x is bfloat16", "expected float32")),
    ("dispatch", "x", "float64", to(torch.float64), ("x is float64", "expected float32")),
    ("dispatch", "x", "int32", to(torch.int32), ("x is int32", "expected float32")),
    ("dispatch", "x", "last stride", columns_first, ("x has stride 5", "expected 1")),
    ("dispatch", "x", "capacity", lambda x: x.new_zeros(TOKENS + 1, HIDDEN), ("x has 17", "16")),
    ("dispatch", "topk_ids", "1 dimension", flat, ("topk_ids has 1 dim", "expected 2")),
    ("dispatch", "topk_ids", "tokens", cut, ("topk_ids has size 4", "expected 5")),
    ("dispatch", "topk_ids", "topk", wide, ("topk_ids has size 3", "expected 2")),
    ("dispatch", "topk_ids", "float32", to(torch.float32), ("topk_ids is float32", "expected int32 or int64")),
    ("dispatch", "topk_ids", "int16", to(torch.int16), ("topk_ids is ", "expected int32 or int64")),
    ("dispatch", "topk_ids", "id E", with_word(4, 1, value=5), ("topk_ids[4, 1] is 5", "0 to 4"), ARGUMENT),
    ("dispatch", "topk_ids", "id -2", with_word(4, 1, value=-2), ("topk_ids[4, 1] is -2", "-1", "0 to 4"), ARGUMENT),
    ("dispatch", "topk_ids", "id 2^32", with_word(0, 0, value=2**32), ("topk_ids[0, 0] is 4294967296",), ARGUMENT),
    ("dispatch", "topk_weights", "1 dimension", flat, ("topk_weights has 1 dim", "expected 2")),
    ("dispatch", "topk_weights", "tokens", cut, ("topk_weights has size 4", "expected 5")),
    ("dispatch", "topk_weights", "topk", wide, ("topk_weights has size 3", "expected 2")),
    ("dispatch", "topk_weights", "bfloat16", to(torch.bfloat16), ("topk_weights is bfloat16", "expected float32")),
    ("dispatch", "topk_weights", "float64", to(torch.float64), ("topk_weights is float64", "expected float32")),
    ("dispatch", "port", "stage", with_word(2, value=2), ("port is for stage 2", "2 stages"), ARGUMENT),
    ("combine", "ticket", "1 dimension", flat, ("ticket has 1 dim", "expected 2")),
    ("combine", "ticket", "width", wide, ("ticket has size 9", "expected 8")),
    ("combine", "ticket", "int64", to(torch.int64), ("ticket is int64", "expected int32")),
    ("combine", "ticket", "strided", columns_first, ("ticket is not contiguous",)),
    ("combine", "ticket", "no rows", lambda t: t[:0], ("ticket has 0 rows", "at least 1")),
    ("combine", "ticket", "rows", cut, ("base has size 5", "expected 4")),
    ("combine", "port", "stage", with_word(2, value=0), ("ticket is of stage 1", "port is of stage 0"), STALE),
    ("combine", "port", "layer", with_word(1, value=4), ("ticket is of layer 3", "port is of layer 4"), STALE),
    ("combine", "base", "1 dimension", flat, ("base has 1 dim", "expected 2")),
    ("combine", "base", "tokens", cut, ("base has size 4", "expected 5")),
    ("combine", "base", "hidden", wide, ("base has size 17", "expected 16")),
    ("combine", "base", "int32", to(torch.int32), ("base is int32", "expected float32, bfloat16 or float16")),
    ("combine", "base", "float64", to(torch.float64), ("base is float64", "expected float32, bfloat16 or float16")),
    ("combine", "base", "last stride", columns_first, ("base has stride 5", "expected 1")),
    ("receive", "rows", "too few", lambda rows: rows - 1, ("rows is ", "but the item has "), ARGUMENT),
    ("receive", "rows", "negative", lambda rows: -1, ("rows is -1",)),
    ("receive_into", "rows", "too few", lambda rows: rows[:1], ("rows is 1", "but the item has "), ARGUMENT),
    ("receive_into", "rows", "hidden", wide, ("rows has size 17", "expected 16")),
    ("receive_into", "rows", "float16", to(torch.float16), ("rows is float16", "expected float32")),
    ("receive_into", "rows", "strided", columns_first, ("rows is not contiguous",)),
    ("receive_into", "scales", "some", lambda scales: scales.new_ones(3), ("scales has size 3", "expected 0")),
    ("receive_into", "offsets", "size", cut, ("offsets has size 2", "expected 3")),
    ("receive_into", "offsets", "int64", to(torch.int64), ("offsets is int64", "expected int32")),
    ("reply", "expert_out", "1 dimension", flat, ("expert_out has 1 dim", "expected 2")),
    ("reply", "expert_out", "rows", cut, ("expert_out has ", "but the item has "), ARGUMENT),
    ("reply", "expert_out", "hidden", wide, ("expert_out has size 17", "expected 16")),
    ("reply", "expert_out", "float16", to(torch.float16), ("expert_out is float16", "expected float32")),
    ("reply", "expert_out", "last stride", columns_first, ("expert_out has stride ", "expected 1")),
    ("plan", "topk_ids", "1 dimension", flat, ("topk_ids has 1 dim", "expected 2")),
    ("plan", "topk_ids", "float32", to(torch.float32), ("topk_ids is float32", "expected int32 or int64")),
    ("plan", "topk_ids", "id E", with_word(0, 1, value=5), ("topk_ids[0, 1] is 5", "0 to 4"), None),
    ("plan", "expert_map", "1 dimension", flat, ("expert_map has 1 dim", "expected 2")),
    ("plan", "expert_map", "width", wide, ("expert_map has size 3", "expected 2")),
    ("plan", "expert_map", "int64", to(torch.int64), ("expert_map is int64", "expected int32")),
    ("plan", "expert_map", "strided", columns_first, ("expert_map is not contiguous",)),
    ("plan", "expert_map", "rank", with_word(0, 0, value=2), ("expert_map[0] is (2, 0)", "below (2, 3)"), None),
    ("plan", "expert_map", "local", with_word(4, 1, value=-1), ("expert_map[4] is (1, -1)", "below (2, 3)"), None),
]
# The FFN ranks' ops need nothing of a port's content.
PORT: dict[str, Any] = {"dispatch": ARGUMENT, "combine": STALE}
PORT |= dict.fromkeys(("arrive", "receive", "receive_into", "reply"))
for _op in PORT:
    ROWS += [
        (_op, "port", "no magic", torch.zeros_like, ("port holds 0", str(_C.PORT_MAGIC), "attach(window)"), PORT[_op]),
        (_op, "port", "size", cut, ("port has size 3", "expected 4")),
        (_op, "port", "2 dimensions", deep, ("port has 2 dim", "expected 1")),
        (_op, "port", "int64", to(torch.int64), ("port is int64", "expected int32")),
        (_op, "port", "stage -1", with_word(2, value=-1), ("port is for stage -1", "2 stages"), PORT[_op]),
        (_op, "port", "strided", lambda p: torch.stack([p, torch.zeros_like(p)], 1)[:, 0], ("port is not contiguous",)),
    ]
for _op in ("receive", "receive_into", "reply"):
    ROWS += [
        (_op, "item", "1 dimension", flat, ("item has 1 dim", "expected 2")),
        (_op, "item", "slots", cut, ("item has size 12", "expected 13")),
        (_op, "item", "width", wide, ("item has size 9", "expected 8")),
        (_op, "item", "int64", to(torch.int64), ("item is int64", "expected int32")),
        (_op, "item", "strided", columns_first, ("item is not contiguous",)),
        (_op, "item", "count", with_word(0, _C.ITEM_COUNT, value=13), ("item holds 13 slots", "0 to 12"), None),
        (_op, "item", "region", with_word(1, 0, value=2), ("item names slot (2, ",), None),
        (_op, "item", "ring", with_word(1, 2, value=-1), ("item names slot (", ", -1)"), None),
    ]
REFUSED = [Refusal(*row) for row in ROWS]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda r: f"{r.op}-{r.argument}-{r.wrong}")
def test_a_bad_argument_is_refused_by_name_and_nothing_is_lost(
    cluster: list[afd_ops.Window], refusal: Refusal, seed: int
) -> None:
    """faults: written before it was checked, a ring or sequence used up, a wrong stride or width read silently."""
    name, found = refusal.op, refusal.found
    if found is None and not harness.host_reads():
        pytest.skip("its kernel takes this for granted")
    trip = by_hand(cluster, 5)
    good = stop_before(name, trip)
    names = argument_names(name)
    bad = tuple(refusal.change(a) if n == refusal.argument else a for n, a in zip(names, good, strict=True))
    if isinstance(found, type) and not harness.host_reads():
        (window,) = [w for w in cluster if w.id == bad[names.index("window")]]
        out = overload(name)(*bad)
        harness.synchronize()
        with pytest.raises(found, match=refusal.argument if found is ARGUMENT else "ticket"):
            window.check()
        assert name != "combine" or bool(out.isnan().all())
        harness.reset(cluster)
    else:
        state, stats = State(cluster), [window.stats() for window in cluster]
        with pytest.raises(RuntimeError) as raised:
            overload(name)(*bad)
        message = str(raised.value)
        assert message.startswith(f"Argument in afd::{name.removesuffix('_into')}: ")
        assert all(part in message for part in refusal.says), message
        assert type(afd_ops.errors.typed(raised.value)) is afd_ops.ArgumentError
        assert State(cluster) == state
        assert [window.stats() for window in cluster] == stats
        finish(trip)
    finish(by_hand(cluster, 5))


def test_a_ticket_that_was_cut_with_its_base_is_the_callers_fault_not_the_peers(
    cluster: list[afd_ops.Window], seed: int
) -> None:
    """fault: the caller slices padding off both, and a healthy peer is accused and the window stopped."""
    trip = by_hand(cluster, 5)
    ticket, base, *rest = stop_before("combine", trip)
    kind, says = ARGUMENT, r"^Argument in afd::combine: ticket has 4 tokens, expected 5, as many as"
    with refused(cluster, cluster[0], kind if harness.host_reads() else STALE, says):
        torch.ops.afd.combine(ticket[:-1], base[:-1], *rest)
    if harness.host_reads():
        finish(trip)


def test_a_full_lane_says_its_depth_and_nothing_is_lost(cluster: list[afd_ops.Window], seed: int) -> None:
    """fault: more dispatches in flight than rings hang or overwrite."""
    window = cluster[0]
    before = State(cluster)
    steps = [random_step(TOPOLOGY, 2) for _ in range(4)]
    for step in steps[:3]:
        torch.ops.afd.dispatch(*step[:3], window.port(0, 0), window.order, window.id)
    slots = [harness.slots_of(peer).clone() for peer in cluster[2:]]
    says = r"^RingBusy in afd::dispatch: stage 0 .*3 dispatches in flight \(depth 3\)"
    with refused(cluster, window, afd_ops.RingBusyError, says):
        torch.ops.afd.dispatch(*steps[3][:3], window.port(0, 0), window.order, window.id)
    assert all(map(torch.equal, slots, [harness.slots_of(peer) for peer in cluster[2:]]))
    if harness.host_reads():
        before.restore()
    else:
        harness.reset(cluster)
    finish(by_hand(cluster, 2))


def test_a_ticket_is_good_once(cluster: list[afd_ops.Window], seed: int) -> None:
    trip = by_hand(cluster, 3)
    used = stop_before("combine", trip)
    finish(trip)
    with refused(cluster, cluster[0], STALE, r"^Stale in afd::combine: ticket with sequence .* was used before"):
        torch.ops.afd.combine(*used)


@pytest.mark.parametrize("name", ["receive", "reply"])
def test_an_item_is_good_until_it_is_answered(cluster: list[afd_ops.Window], name: str, seed: int) -> None:
    if name == "receive" and not harness.host_reads():
        pytest.skip("its kernel does not ask whether the item was answered; reply's does")
    trip = by_hand(cluster, 3)
    used = stop_before(name, trip)
    finish(trip)
    with refused(cluster, cluster[2], STALE, f"^Stale in afd::{name}: item with sequence .* was answered before"):
        overload(name)(*used)


@pytest.mark.parametrize(("name", "place"), [("receive", "item"), ("reply", "item"), ("combine", "ticket")])
def test_what_is_of_another_generation_is_refused(
    cluster: list[afd_ops.Window], name: str, place: str, seed: int
) -> None:
    trip = by_hand(cluster, 3)
    good = stop_before(name, trip)
    bad = tuple(
        with_word(0, 0, value=77)(a) if n == place else a for n, a in zip(argument_names(name), good, strict=True)
    )
    says = f"^Stale in afd::{name}: {place} is of generation 77, .* at {cluster[0].generation}"
    if name == "combine" or harness.host_reads():
        with refused(cluster, cluster[0], STALE, says):
            overload(name)(*bad)
    else:  # an item of before a reset, which a server loop may still hold: dropped without a word
        state = State(cluster)
        overload(name)(*bad)
        assert State(cluster) == state
        cluster[2].check()
    if name != "combine" or harness.host_reads():
        finish(trip)


@pytest.mark.parametrize("name", ["dispatch", "arrive", "receive", "reply", "combine"])
def test_a_window_that_is_not_there_or_of_the_other_role_is_refused(
    cluster: list[afd_ops.Window], name: str, seed: int
) -> None:
    trip = by_hand(cluster, 3)
    good = stop_before(name, trip)
    at = argument_names(name).index("window")
    of_role = "attention" if name in ("dispatch", "combine") else "ffn"
    other = next(window for window in cluster if window.role != of_role)
    state = State(cluster)
    for window, says in [
        (0, "^Closed in .* window 0 does not exist"),
        (-1, "^Closed in .* window -1 does not exist"),
        (2**40, f"^Closed in .* window {2**40} does not exist"),
        (other.id, f"^Argument in .* window {other.id} belongs to .*{other.role}.* op is for {of_role} ranks"),
    ]:
        with pytest.raises(RuntimeError, match=says):
            overload(name)(*good[:at], window, *good[at + 1 :])
    assert State(cluster) == state
    finish(trip)


def test_nothing_pending_is_an_empty_item_that_nobody_answers(cluster: list[afd_ops.Window]) -> None:
    window = cluster[2]
    state, stats = State(cluster), window.stats()
    item = torch.ops.afd.arrive(window.port(), window.id)
    assert item[0, _C.ITEM_COUNT] == 0 and item[0, _C.ITEM_ROWS] == 0
    rows, _, offsets = torch.ops.afd.receive(item, window.port(), window.id, 0)
    assert rows.shape == (0, HIDDEN) and offsets.tolist() == [0, 0, 0]
    torch.ops.afd.reply(rows, item, window.port(), window.id)
    assert State(cluster) == state and window.stats() == stats


@pytest.mark.memcheck
@pytest.mark.parametrize("name", ["dispatch", "combine", "reply"])
def test_row_strides_are_honoured_even_zero(cluster: list[afd_ops.Window], name: str, seed: int) -> None:
    trip = by_hand(cluster, 5)
    args = stop_before(name, trip)
    before = State(cluster)
    data = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())
    same = args[data][:1].expand(args[data].shape)
    assert same.stride(0) == 0
    after = []
    for tensor in (same, same.contiguous(), rows_apart(same)):
        before.restore()
        out = overload(name)(*args[:data], tensor, *args[data + 1 :])
        after.append((State(cluster), out))
    assert all(state == after[0][0] for state, _ in after)
    assert all(out is None or torch.equal(out, after[0][1]) for _, out in after)
    before.restore()
    finish(trip)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name != "receive_into"])
def test_no_op_writes_to_its_arguments(cluster: list[afd_ops.Window], name: str, seed: int) -> None:
    """order, or port, is declared mutated only to keep the ops in order; a compiler may hand an op a clone of it."""
    trip = by_hand(cluster, 5)
    args = stop_before(name, trip)
    before = [a.clone() if isinstance(a, Tensor) else a for a in args]
    state = State(cluster)
    overload(name)(*args)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(args, before, strict=True))
    state.restore()
    finish(trip)


# Gradients.

TRAINED = [("dispatch", "x"), ("dispatch", "topk_weights"), ("combine", "base"), ("reply", "expert_out")]


@pytest.mark.parametrize(("name", "argument"), TRAINED)
@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_training_by_accident_is_refused_in_forward(
    cluster: list[afd_ops.Window], name: str, argument: str, how: str, seed: int
) -> None:
    """fault: the ticket is int32, so a backward would run through and silently treat the experts as a constant."""
    trip = by_hand(cluster, 5)
    good = stop_before(name, trip)
    names = argument_names(name)
    grad = tuple(a.clone().requires_grad_() if n == argument else a for n, a in zip(names, good, strict=True))
    state, call = State(cluster), overload(name)
    if how == "compiled":
        torch._dynamo.reset()
        call = torch.compile(lambda *args: overload(name)(*args), backend="aot_eager", fullgraph=True)
    with torch.enable_grad(), pytest.raises(RuntimeError) as raised:
        call(*grad)
    assert f"Argument in afd::{name}: {argument} requires grad" in str(raised.value)
    assert "inference" in str(raised.value)
    assert type(afd_ops.errors.typed(raised.value)) is afd_ops.ArgumentError
    assert State(cluster) == state
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = call(*grad)
            assert out is None or not out.requires_grad
        state.restore()
    finish(trip)


@pytest.mark.memcheck
@pytest.mark.parametrize("mode", MODES)
def test_a_round_trip_works_in_every_mode(cluster: list[afd_ops.Window], mode: Any, seed: int) -> None:
    with mode():
        finish(by_hand(cluster, 5))
