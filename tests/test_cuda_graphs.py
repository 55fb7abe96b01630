"""CUDA graphs: the attention half captured by hand and by torch.compile, the FFN half captured too, errors, reset.

All payloads are small integers, so that every replay must equal the oracle exactly. While something may be waiting on a
GPU a test only copies and replays: inputs are drawn and expected results computed before, results are compared after,
so that no kernel of the test is first loaded, and nothing is queued by the thousand, behind a kernel that waits.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import harness
import pytest
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
from cuda_cluster import (
    BY_HAND,
    FUSED,
    SPLIT,
    Captured,
    attention_half,
    attention_oracle,
    capturing,
    cluster,
    differing,
    inputs,
    nans_like,
    one_step,
    oracle,
)
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config

import afd_ops
from afd_ops import _C

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

AHEAD = 8  # steps launched before the host waits
TURNS = 200


@pytest.fixture(params=["one GPU", "two GPUs"])
def placement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the FFN ranks are: beside the attention ranks, or on a GPU of their own."""
    if request.param == "one GPU":
        monkeypatch.setattr(harness, "devices", lambda topology: "cuda:0")
    elif torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


# Captured by hand.


@pytest.mark.parametrize("count", [FUSED, SPLIT])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_captured_attention_half_is_exact_on_fresh_inputs(
    placement: None, dtype: torch.dtype, count: int, seed: int
) -> None:
    """faults: a replay that sees the data, the sequence or the flag of the one before; on one GPU, waiting kernels that
    leave no room for the work they wait for."""
    with cluster(afd_ops.Topology(1, 2, 7), dtype=dtype) as ready:
        (window,) = ready.attention
        captured, before = Captured(window, count, layer=2), window.stats()
        steps = inputs(window, TURNS, count)
        want, outs = attention_oracle(*steps, 2), nans_like(steps[3])
        torch.cuda.synchronize()
        for turn in range(TURNS):
            captured.replay([t[turn] for t in steps], outs[turn])
            if turn % AHEAD == AHEAD - 1:
                torch.cuda.current_stream().synchronize()
        torch.cuda.current_stream().synchronize()
        window.check()
        assert differing(outs, want) == []
        after = window.stats()
        assert [after[name] - before[name] for name in ("dispatches", "combines")] == [TURNS, TURNS]


def test_captured_sizes_and_eager_calls_mix_in_any_order(placement: None, seed: int) -> None:
    """fault: eager calls and replays of several captured sizes on one window give stale passes or clobbered data."""
    sizes = (0, 1, 5, 64, 65, 128)
    with cluster(afd_ops.Topology(1, 2, 7)) as ready:
        (window,) = ready.attention
        graphs = {count: Captured(window, count, layer) for layer, count in enumerate(sizes)}
        eager, draw = harness.remote(window, 9), random.Random(seed)
        plan: list[tuple[Captured | None, list[Tensor], Tensor, Tensor]] = []
        for _ in range(150):
            count = draw.choice([*sizes, -1, -1])
            captured = graphs.get(count)
            step = one_step(window, count if captured else draw.randrange(129))
            want = attention_oracle(*step, captured.layer) if captured else oracle(*step, 9)
            plan.append((captured, step, want, nans_like(step[3])))
        torch.cuda.synchronize()
        outs = []
        for turn, (captured, step, _, out) in enumerate(plan):
            if captured:
                captured.replay(step, out)
            else:
                out = eager.combine(eager.dispatch(*step[:3]), step[3])
            outs.append(out)
            if turn % AHEAD == AHEAD - 1:
                torch.cuda.current_stream().synchronize()
        torch.cuda.current_stream().synchronize()
        window.check()
        wrong = [
            turn for turn, (entry, out) in enumerate(zip(plan, outs, strict=True)) if not torch.equal(entry[2], out)
        ]
        assert wrong == [], [(turn, len(plan[turn][1][0]), plan[turn][0] is not None) for turn in wrong]


@pytest.mark.parametrize("count", [FUSED, SPLIT])
@pytest.mark.parametrize("how", ["a graph each", "one graph"])
def test_two_stages_are_captured_on_two_streams(how: str, count: int, seed: int) -> None:
    """Two ubatches: lanes share nothing, so no order between their streams is needed."""
    turns = TURNS // 2
    with cluster(afd_ops.Topology(1, 2, 7), stages=2) as ready:
        (window,) = ready.attention
        steps = [inputs(window, turns, count) for _ in range(2)]
        want = [attention_oracle(*steps[stage], stage) for stage in range(2)]
        outs = [nans_like(lane[3]) for lane in steps]
        main, side = torch.cuda.current_stream(), torch.cuda.Stream(window.heap.device)
        lanes = [Captured(window, count, layer=stage, stage=stage) for stage in range(2)]
        graph = torch.cuda.CUDAGraph()
        if how == "one graph":
            with capturing(graph, main):
                side.wait_stream(main)
                lanes[0].out = attention_half(lanes[0].module, *lanes[0].buffers)
                with torch.cuda.stream(side):
                    lanes[1].out = attention_half(lanes[1].module, *lanes[1].buffers)
                main.wait_stream(side)
        torch.cuda.synchronize()
        for turn in range(turns):
            if how == "one graph":
                for lane, step in zip(lanes, steps, strict=True):
                    for buffer, fresh in zip(lane.buffers, step, strict=True):
                        buffer.copy_(fresh[turn])
                graph.replay()
                for lane, out in zip(lanes, outs, strict=True):
                    out[turn].copy_(lane.out)
            else:
                for stage, stream in enumerate((main, side)):
                    with torch.cuda.stream(stream):
                        lanes[stage].replay([t[turn] for t in steps[stage]], outs[stage][turn])
            if turn % AHEAD == AHEAD - 1:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        window.check()
        assert [differing(outs[stage], want[stage]) for stage in range(2)] == [[], []]


@pytest.mark.parametrize("count", [FUSED, SPLIT])
@pytest.mark.parametrize(
    ("dtype", "behind"),
    [
        (torch.bfloat16, "arrive"),
        (torch.bfloat16, "a copy"),
        (torch.bfloat16, "a join"),
        (torch.float8_e4m3fn, "arrive"),
    ],
)
def test_a_captured_ffn_half_launched_ahead_serves_a_captured_attention_half(
    dtype: torch.dtype, behind: str, count: int, seed: int
) -> None:
    """No host in the loop: arrive, receive into a fixed bucket, experts by offsets on the device and reply are nodes of
    one graph, launched before anything was sent; the next generation is served by the same graphs.
    fault: receive, launched for the end of arrive, finds something else in front of it."""
    ahead, rounds = 16, 5
    with cluster(afd_ops.Topology(1, 1, 7), threads=False, poll_interval=5.0, dtype=dtype) as ready:
        (window,), (ffn,), (server,), (stream,) = ready.attention, ready.ffn, ready.servers, ready.streams
        bucket = ffn.geometry.tokens * ffn.geometry.topk
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(ffn.heap.device)
        with capturing(graph, stream):
            item = torch.ops.afd.arrive(server.port, ffn.id)
            if behind == "a copy":
                item = torch.empty_like(item).copy_(item)
            elif behind == "a join":
                side.wait_stream(stream)
                with torch.cuda.stream(side):
                    item = torch.empty_like(item).copy_(item)
                stream.wait_stream(side)
            rows, scales, offsets = torch.ops.afd.receive(item, server.port, ffn.id, bucket)
            layer: Any = item[0, _C.ITEM_LAYER]
            torch.ops.afd.reply(server.experts(rows, scales, offsets, layer), item, server.port, ffn.id)
        lanes = [Captured(window, count, layer) for layer in range(3)]
        for generation in range(2):
            before = ffn.stats()
            steps = inputs(window, ahead * rounds, count)
            want = torch.stack(
                [attention_oracle(*(t[n] for t in steps), n % len(lanes)) for n in range(ahead * rounds)]
            )
            outs = nans_like(steps[3])
            torch.cuda.synchronize()
            try:
                for begin in range(0, ahead * rounds, ahead):
                    with torch.cuda.stream(stream):
                        for _ in range(ahead):
                            graph.replay()
                    for turn in range(begin, begin + ahead):
                        lanes[turn % len(lanes)].replay([t[turn] for t in steps], outs[turn])
                    torch.cuda.current_stream().synchronize()
                window.check()
                ffn.check()
                assert differing(outs, want) == []
            except BaseException:
                ffn.poison()  # else every arrive that is still queued waits out its poll interval
                raise
            stream.synchronize()
            after = ffn.stats()
            assert [after[name] - before[name] for name in ("items", "replies")] == [ahead * rounds] * 2
            assert window.generation == generation
            ready.reset()


# Errors and reset.


@pytest.mark.parametrize("count", [FUSED, SPLIT])
@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ("poisons", afd_ops.PeerFailedError, "failed and poisoned this window"),
        ("leaves", afd_ops.PeerLeftError, "closed its window"),
        ("is silent", afd_ops.PeerTimeoutError, "did not answer within 0.5 s"),
    ],
)
def test_an_error_in_a_replay_gives_nan_and_check_names_the_peer(
    fault: str, error: type[afd_ops.PeerError], says: str, count: int, seed: int
) -> None:
    """faults: zeros or stale rows that look like a result; an error that nobody learns of, because a replay calls no
    Python; every later replay waiting out the deadline again."""
    silent = fault == "is silent"
    with cluster(afd_ops.Topology(1, 2, 7), **{**BY_HAND, "deadline": 0.5 if silent else 10.0}) as ready:
        (window,), (_, bad) = ready.attention, ready.ffn
        captured, replays = Captured(window, count, layer=3), 20
        steps = inputs(window, 2 + replays, count)
        want, outs = attention_oracle(*steps, 3), torch.zeros_like(steps[3])
        torch.cuda.synchronize()
        captured.replay([t[0] for t in steps], outs[0])
        assert ready.answer(0, 1) == [1, 1]
        torch.cuda.current_stream().synchronize()
        window.check()

        begun = time.monotonic()
        captured.replay([t[1] for t in steps], outs[1])
        assert ready.answer(0) == [1]
        if fault == "poisons":
            bad.poison()
        elif fault == "leaves":
            bad.close()
        torch.cuda.current_stream().synchronize()
        took = time.monotonic() - begun
        assert (0.4 if silent else 0.0) < took < 5.0
        with pytest.raises(error, match=says) as caught:
            window.check()
        assert "rank 2 (ffn 1)" in str(caught.value)
        where = caught.value
        assert (where.op, where.peer, where.layer, where.stage) == ("combine", 1, 3, 0)

        begun = time.monotonic()
        for turn in range(2, 2 + replays):
            captured.replay([t[turn] for t in steps], outs[turn])
        torch.cuda.current_stream().synchronize()
        assert time.monotonic() - begun < 1.0, "later replays must end at once"
        assert torch.equal(outs[0], want[0])
        assert bool(outs[1:].isnan().all())
        with pytest.raises(error, match=says):  # the first error is kept
            window.check()


@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_a_captured_graph_survives_reset(count: int, seed: int) -> None:
    """fault: a generation or an address baked into the graph. A replay waiting when the window is reset gives NaN."""
    with cluster(afd_ops.Topology(1, 2, 7), **BY_HAND) as ready:
        (window,) = ready.attention
        captured = Captured(window, count, layer=1)
        for generation in range(3):
            assert window.generation == generation
            steps = inputs(window, 4, count)
            want, outs = attention_oracle(*steps, 1), torch.zeros_like(steps[3])
            torch.cuda.synchronize()
            for turn in range(3):
                captured.replay([t[turn] for t in steps], outs[turn])
                assert ready.answer() == [1, 1]
                torch.cuda.current_stream().synchronize()
            captured.replay([t[3] for t in steps], outs[3])  # nobody answers this one
            ready.reset()
            torch.cuda.synchronize()
            window.check()
            assert differing(outs[:3], want[:3]) == []
            assert bool(outs[3].isnan().all())


# torch.compile and cudagraph trees.

HIDDEN, NUM_EXPERTS = 32, 5
COMPILED: dict[str, Any] = dict(
    hidden=HIDDEN,
    topk=2,
    tokens=96,
    dtype=torch.float32,
    stages=2,
    poll_interval=0.02,  # a quiet idle server
)
RUNS: list[int] = []  # one entry each time Python runs a layer; a replay adds none


@torch.library.custom_op("afd_tests::tick", mutates_args=(), schema="(Tensor x) -> Tensor")
def tick(x: Tensor) -> Tensor:
    RUNS.append(x.shape[0])
    return x.clone()


@tick.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Layer(nn.Module):
    """A decoder layer in small: norm, gate, routed experts, shared expert; in integers that stay small."""

    def __init__(self, layer: int, stage: int = 0) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randint(-1, 2, (HIDDEN, 2)).float(), requires_grad=False)
        self.shared = nn.Parameter(torch.randint(-1, 2, (HIDDEN, HIDDEN)).float(), requires_grad=False)
        self.experts = afd_ops.RemoteExperts(layer, stage)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.remainder(x, 7) - 3
        score = hidden @ self.gate
        return hidden, torch.remainder(score.long(), NUM_EXPERTS + 1) - 1, torch.remainder(score, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, ids, weights = self.route(tick(x))
        ticket = self.experts.dispatch(hidden, ids, weights)
        base = torch.relu(hidden @ self.shared) + hidden
        return self.experts.combine(ticket, base)

    def unsplit(self, x: Tensor) -> Tensor:
        hidden, ids, weights = self.route(x)
        return oracle(hidden, ids, weights, torch.relu(hidden @ self.shared) + hidden, self.experts.layer)


@pytest.fixture
def fresh_compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No graph of before, none of a cache, compiled in this process; a graph that cannot be recorded is an error."""
    torch._dynamo.reset()
    counters.clear()
    RUNS.clear()
    settings = {"triton.cudagraph_or_error": True, "fx_graph_cache": False, "compile_threads": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        with inductor_config.patch(settings), functorch_config.patch(enable_autograd_cache=False):
            yield
    torch._dynamo.reset()


def hidden_states(window: afd_ops.Window, count: int) -> Tensor:
    return torch.randint(-5, 6, (count, HIDDEN), device=window.heap.device).float()


def tree_manager() -> Any:
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None, "no cudagraph was recorded"
    return manager


def re_records(manager: Any) -> int:
    return sum(sum(by_function.values()) for by_function in manager.num_rerecord.values())


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("marked", [True, False], ids=["marked dynamic", "unmarked"])
def test_reduce_overhead_records_every_size_once_and_then_runs_no_python(marked: bool, seed: int) -> None:
    """faults: "skipping cudagraphs due to mutated inputs"; a recording per step; sizes of one window that disturb each
    other, or the eager calls between them."""
    sizes, layers = (80, 32, 2, 17), 3
    with cluster(afd_ops.Topology(1, 2, NUM_EXPERTS), **COMPILED) as ready:
        (window,) = ready.attention
        model = nn.Sequential(*(Layer(layer) for layer in range(layers))).to(window.heap.device)
        assert afd_ops.attach(model, window) == layers
        eager, draw = harness.remote(window, 7), random.Random(seed)
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        calls, before = 0, window.stats()["dispatches"]

        def check(count: int) -> None:
            nonlocal calls
            x = hidden_states(window, count)
            want = x
            for layer in model:
                want = layer.unsplit(want)
            if marked:
                torch._dynamo.mark_dynamic(x, 0)
            torch.cuda.synchronize()
            out = compiled(x)
            torch.cuda.current_stream().synchronize()
            calls += layers
            assert torch.equal(out, want), count

        with torch.inference_mode():
            for _ in range(2):  # one warm-up and one recording a size
                for count in sizes:
                    check(count)
            if not marked:  # the first size was compiled for itself, before torch guessed that sizes vary
                check(sizes[0])
                check(sizes[0])
            python = len(RUNS)
            if marked:
                assert python == 2 * layers * len(sizes)
            for _ in range(40):
                if draw.random() < 0.3:
                    step = one_step(window, draw.randrange(97))
                    want = oracle(*step, 7)
                    torch.cuda.synchronize()
                    out = eager(*step)
                    torch.cuda.current_stream().synchronize()
                    calls += 1
                    assert torch.equal(out, want)
                else:
                    check(draw.choice(sizes))
        window.check()
        manager = tree_manager()
        assert len(RUNS) == python, "Python ran after a size was recorded"
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert counters["stats"]["unique_graphs"] == (1 if marked else 2)
        assert re_records(manager) == 0
        recorded = manager.new_graph_id().id  # counts recordings from 0
        assert recorded == len(sizes) if marked else len(sizes) <= recorded <= len(sizes) + 1
        assert window.stats()["dispatches"] - before == calls


@pytest.mark.usefixtures("fresh_compiler")
def test_130_ports_share_one_compile_and_none_is_recorded_twice(seed: int) -> None:
    """fault: 61 layers x 2 stages pass torch's limit of 128 re-recordings of a function and run uncaptured from there.

    One compiled function serves all layers; a step begins with mark_step_begin(), so that torch takes its calls for one
    path of graphs."""
    depth, stages, count, turns = 65, 2, 16, 5
    with cluster(afd_ops.Topology(1, 1, NUM_EXPERTS), **COMPILED) as ready:
        (window,) = ready.attention
        layers = [[Layer(layer, stage) for stage in range(stages)] for layer in range(depth)]
        everything = nn.ModuleList(lane for layer in layers for lane in layer).to(window.heap.device)
        assert afd_ops.attach(everything, window) == depth * stages
        call = torch.compile(lambda layer, x: layer(x), mode="reduce-overhead", fullgraph=True)
        before = window.stats()["dispatches"]
        with torch.inference_mode():
            for turn in range(turns):
                xs = [hidden_states(window, count) for _ in range(stages)]
                want = list(xs)
                for layer in layers:
                    want = [lane.unsplit(x) for lane, x in zip(layer, want, strict=True)]
                torch.cuda.synchronize()
                torch.compiler.cudagraph_mark_step_begin()
                for layer in layers:
                    xs = [call(lane, x) for lane, x in zip(layer, xs, strict=True)]
                torch.cuda.current_stream().synchronize()
                assert all(torch.equal(x, y) for x, y in zip(xs, want, strict=True)), turn
        window.check()
        manager = tree_manager()
        assert len(RUNS) == 2 * depth * stages, "Python runs once to warm up and once to record"
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert counters["stats"]["unique_graphs"] == 1
        assert re_records(manager) == 0
        assert manager.new_graph_id().id == depth * stages
        assert window.stats()["dispatches"] - before == turns * depth * stages
