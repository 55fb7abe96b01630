"""Captured experts on a GPU: exact, the same as eager, independent of the batch, within a limit, without a word from
the device to the host."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import harness
import pytest
import torch
from cuda_cluster import (
    BY_HAND,
    LAYERS,
    TICKET_RING,
    Cluster,
    capturing,
    cluster,
    device_experts,
    inputs,
    one_step,
    oracle,
    slot_index,
)
from torch import Tensor

import afd_ops
from afd_ops import _C

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

PAIR = afd_ops.Topology(1, 1, 7)
MakeExperts = Callable[[afd_ops.Window], afd_ops.Experts]


@pytest.fixture
def synchronising_is_an_error() -> Iterator[Callable[[], None]]:
    """Call it: from there on, a call that waits for the device raises, in every thread."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def captured_for(window: afd_ops.Window, experts: afd_ops.Experts, limit: int | None = None) -> afd_ops.CapturedExperts:
    facts = _C.facts(window.id)
    return afd_ops.CapturedExperts(
        experts,
        rows=facts["rows"],
        hidden=facts["hidden"],
        owned=facts["owned_experts"],
        dtype=window.dtype,
        device=window.heap.device,
        limit=limit,
    )


def captured(buckets: Iterable[int], layers: Iterable[int] = range(LAYERS), **more: Any) -> MakeExperts:
    def make(window: afd_ops.Window) -> afd_ops.Experts:
        experts = captured_for(window, device_experts(window), **more)
        experts.capture(layers, buckets)
        return experts

    return make


def answered(ready: Cluster, layer: int, count: int) -> int:
    """A round trip of the only attention rank, exact; how many rows its item had."""
    (window,) = ready.attention
    module, step = harness.remote(window, layer), one_step(window, count)
    want = oracle(*step, layer)
    harness.synchronize()
    ticket = module.dispatch(*step[:3])
    assert ready.answer() == [1]
    out = module.combine(ticket, step[3])
    harness.synchronize()
    window.check()
    assert torch.equal(out, want), (layer, count)
    return int((step[1] >= 0).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_items_replay_a_graph_or_run_eagerly_with_the_same_result(dtype: torch.dtype, seed: int) -> None:
    """faults: a graph of another layer or size; rows, offsets or scales of the item before; an output that the graph of
    another bucket has overwritten."""
    buckets, layers = (16, 48, 160, 256), LAYERS - 1  # the last layer and what is larger have no graph
    with cluster(PAIR, captured(buckets, range(layers)), dtype=dtype, **BY_HAND) as ready:
        (server,), draw = ready.servers, random.Random(seed)
        before = server.stats()
        assert before["graphs"] == len(buckets) * layers and before["graph_bytes"] >= 0
        assert before["capture_seconds"] > 0
        uses: Counter[tuple[int, int]] = Counter()
        for _ in range(80):
            layer = draw.randrange(LAYERS)
            rows = answered(ready, layer, draw.choice((0, 1, 2, 5, 16, 40, 64, 100, 128)))
            fitting = [bucket for bucket in buckets if 0 < rows <= bucket]
            if fitting and layer < layers:
                uses[layer, fitting[0]] += 1
        after = server.stats()
        assert after["items"] - before["items"] == 80
        assert after["replayed"] - before["replayed"] > 10 and after["eager"] - before["eager"] > 10
        assert Counter(after["uses"]) - Counter(before["uses"]) == uses
        assert uses.total() == after["replayed"] - before["replayed"] and 0 < after["padding"] < 1
        assert after["coverage"] == after["replayed"] / (after["replayed"] + after["eager"])


def test_a_server_of_captured_experts_never_waits_for_the_device(
    synchronising_is_an_error: Callable[[], None], seed: int
) -> None:
    with cluster(PAIR, captured((64, 256, 512))) as ready:
        (window,), (server,) = ready.attention, ready.servers
        modules = [harness.remote(window, layer) for layer in range(LAYERS)]
        step = one_step(window, 100)
        want = [oracle(*step, layer) for layer in range(LAYERS)]
        for module in modules:  # allocates
            module(*step)
        harness.synchronize()
        synchronising_is_an_error()
        outs = [(layer, modules[layer](*step)) for _ in range(20) for layer in range(LAYERS)]
        done = torch.cuda.current_stream().record_event()
        until = time.monotonic() + 10
        while not done.query():
            assert time.monotonic() < until, "the server's loop has ended"
            time.sleep(0.001)
        torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(out, want[layer]) for layer, out in outs)
        harness.synchronize()
        assert server.stats()["eager"] == 0 and server.stats()["wait_us"]["count"] >= 4


def test_a_closed_window_refuses_its_server_and_a_new_one(seed: int) -> None:
    """fault: a server's kernels are launched, unasked, into memory that was given back."""
    with cluster(PAIR, **BY_HAND) as ready:
        (ffn,), (server,) = ready.ffn, ready.servers
        answered(ready, 1, 5)
        ffn.close()
        for refused in (server, afd_ops.ExpertServer(ffn, device_experts(ffn))):
            with torch.inference_mode(), pytest.raises(RuntimeError, match=r"Closed in afd::arrive: .* is closed"):
                refused.step()
            with pytest.raises(afd_ops.ClosedError, match="was closed while its server ran"):
                refused.run()


def test_a_step_of_a_server_is_not_captured(seed: int) -> None:
    """fault: nothing runs while a stream captures, and the server waits for its mail without end."""
    with harness.windows(PAIR, **WEIGHTS) as (_, ffn):
        server, graph = afd_ops.ExpertServer(ffn, device_experts(ffn)), torch.cuda.CUDAGraph()
        with (
            pytest.raises(RuntimeError, match=r"afd::arrive: a server's step cannot be captured in a graph"),
            capturing(graph, torch.cuda.Stream(ffn.heap.device)),
        ):
            server.step()


@pytest.mark.parametrize("together", [False, True])
def test_a_server_goes_on_beside_a_slot_that_is_refused(together: bool, seed: int) -> None:
    """fault: arrive lets receive onto the device when it has found a slot, refuses the slot, and waits for another one
    with receive in the way."""
    with cluster(afd_ops.Topology(2, 1, 7), **BY_HAND) as ready:
        (ffn,) = ready.ffn
        modules = [harness.remote(window, 1) for window in ready.attention]
        steps = [one_step(window, 5) for window in ready.attention]
        want = oracle(*steps[0], 1)
        bad = modules[1].dispatch(*steps[1][:3])
        harness.poke(ffn, slot_index(ffn, 1, 0, int(bad[0, TICKET_RING])), "magic", 0)
        if not together:
            begun = time.monotonic()
            assert ready.answer() == [0]
            if torch.cuda.get_device_capability(ffn.heap.device)[0] >= 9:  # else receive is not on its way
                assert time.monotonic() - begun < BY_HAND["poll_interval"] / 2
        good = modules[0].dispatch(*steps[0][:3])
        harness.synchronize()
        assert ready.answer() == [1]
        outs = [module.combine(t, s[3]) for module, t, s in zip(modules, (good, bad), steps, strict=True)]
        harness.synchronize()
        assert torch.equal(outs[0], want) and bool(outs[1].isnan().all())
        (record,) = ffn.errors()
        assert (record["kind"], record["peer"]) == ("Protocol", 1)
        with pytest.raises(afd_ops.PeerFailedError):
            ready.attention[1].check()


def answer_with_ops(server: afd_ops.ExpertServer) -> int:
    item, layer, rows = harness.take(server)
    received = torch.ops.afd.receive(item, server.port, server.window.id, rows)
    torch.ops.afd.reply(server.experts(*received, layer), item, server.port, server.window.id)
    return int(item[0, _C.ITEM_COUNT])


@pytest.mark.parametrize("refused, answer", [([0, 1], afd_ops.ExpertServer.step), ([0], answer_with_ops)])
def test_arrive_waits_on_when_it_has_refused_what_was_ready(
    refused: list[int], answer: Callable[[afd_ops.ExpertServer], int], seed: int
) -> None:
    """fault: arrive ends empty before the poll interval does: a server's, when it has refused several slots as it does
    when it has refused the only one; or the op, with no receive in the way."""
    with cluster(afd_ops.Topology(3, 1, 7), **BY_HAND) as ready:
        (ffn,) = ready.ffn
        modules = [harness.remote(window, 1) for window in ready.attention]
        steps = [one_step(window, 5) for window in ready.attention]
        for rank in refused:
            ticket = modules[rank].dispatch(*steps[rank][:3])
            harness.poke(ffn, slot_index(ffn, rank, 0, int(ticket[0, TICKET_RING])), "magic", 0)
        harness.synchronize()
        counts: list[int] = []

        def serve() -> None:
            with torch.cuda.stream(ready.streams[0]), torch.inference_mode():
                counts.append(answer(ready.servers[0]))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        time.sleep(0.3)
        good = modules[2].dispatch(*steps[2][:3])
        thread.join(10)
        assert counts == [1]
        assert torch.equal(modules[2].combine(good, steps[2][3]), oracle(*steps[2], 1))
        assert [record["peer"] for record in ffn.errors()] == refused


def test_an_empty_item_names_no_layer_whatever_lies_in_the_slots(seed: int) -> None:
    """fault: arrive's rehearsal left a layer that nobody had checked in an item that nobody had sent, and an engine
    that computes empty items too indexed its weights by it."""
    with harness.windows(PAIR, poll_interval=0.002) as (_, ffn):
        server = afd_ops.ExpertServer(ffn, device_experts(ffn))
        harness.slots_of(ffn)[:, : ffn.geometry.layout["position"]] = 0x7F  # headers and counts
        harness.synchronize()
        with torch.inference_mode():
            assert server.step() == 0
            item = torch.ops.afd.arrive(server.port, ffn.id)
            assert server._read(item, ffn.generation)[:3] == (0, 0, 0)
        assert [int(item[0, word]) for word in (_C.ITEM_COUNT, _C.ITEM_LAYER, _C.ITEM_ROWS)] == [0, 0, 0]
        ffn.check()


# In bfloat16 and float16 an answer does not depend on who else was in the batch, bit for bit.

WEIGHTS: dict[str, Any] = dict(hidden=512, topk=4, tokens=128)


def swiglu(window: afd_ops.Window) -> afd_ops.GroupedSwiGLU:
    """Random experts, the same for the same layer and dtype."""
    generator = torch.Generator().manual_seed(5)
    owned = len(window.topology.experts_of(window.role_rank))
    gate_up = [torch.randn(owned, 2 * 256, 512, generator=generator) / 23 for _ in range(2)]
    down = [torch.randn(owned, 512, 256, generator=generator) / 16 for _ in range(2)]
    place = [[w.to(window.heap.device, window.dtype) for w in weights] for weights in (gate_up, down)]
    return afd_ops.GroupedSwiGLU(*place, limit=10.0)


@pytest.mark.parametrize(("dtype", "graphs"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float16, False)])
def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(dtype: torch.dtype, graphs: bool, seed: int) -> None:
    """Alone, with small and with large companions, in the smallest bucket that holds the item or in a larger one."""
    topology = afd_ops.Topology(3, 1, 8)

    def experts(window: afd_ops.Window) -> afd_ops.Experts:
        if not graphs:
            return swiglu(window)
        made = captured_for(window, swiglu(window))
        made.capture(range(2), (16, 64, 256, 1024, 1536))
        return made

    sizes = {**WEIGHTS, "dtype": dtype, "rows": 3 * 128 * 4, **BY_HAND}
    with cluster(topology, experts, **sizes) as ready:
        (server,) = ready.servers
        modules = [harness.remote(window, 1) for window in ready.attention]

        def answers(counts: tuple[int, ...]) -> Tensor:
            """The first rank's, in an item with the others'."""
            tickets = [
                module.dispatch(*(t[:count] for t in step))
                for module, step, count in zip(modules, steps, counts, strict=True)
                if count >= 0
            ]
            harness.synchronize()
            assert ready.answer() == [len(tickets)]
            outs = [
                module.combine(ticket, torch.zeros_like(step[0][: ticket.shape[0] - 1]))
                for module, step, ticket in zip(modules, steps, tickets, strict=False)
            ]
            harness.synchronize()
            for window in ready.attention:
                window.check()
            return outs[0]

        for mine in (1, 3, 17, 64, 128):
            steps = []
            for window in ready.attention:
                x, ids, weights, _ = one_step(window, 128)
                steps.append((torch.randn_like(x), ids, torch.rand_like(weights)))
            alone = answers((mine, -1, -1))
            assert not alone.isnan().any() and alone.abs().max() > 0
            for others in ((0, 0), (1, 0), (3, 40), (128, 1), (128, 128)):
                assert torch.equal(alone, answers((mine, *others))), (mine, others)
        assert (server.stats()["replayed"] > 0) == graphs


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_a_graph_gives_what_the_same_experts_give_eagerly(dtype: torch.dtype, seed: int) -> None:
    """Bit for bit, whatever the bucket."""
    with harness.windows(PAIR, **WEIGHTS, dtype=dtype) as (_, window):
        experts = swiglu(window)
        made = captured_for(window, experts)
        made.capture([0, 1], [32, 128, 512])
        rows, scales, offsets = made.inputs.rows, made.inputs.scales, made.inputs.offsets
        device = window.heap.device
        with torch.inference_mode(), torch.cuda.device(device):
            for layer in (0, 1):
                for live in (1, 31, 32, 33, 100, 128, 129, 500, 512):
                    rows.copy_(torch.randn(rows.shape, device=device))
                    ends = torch.randint(0, live + 1, (offsets.shape[0],), device=device).sort().values
                    ends[-1] = live
                    offsets.copy_(ends)
                    entry = next(e for e in made._graphs if e.layer == layer and e.bucket >= live)
                    entry.graph.graph.replay()
                    eager = experts(rows[:live], scales[:live], offsets, layer)
                    assert torch.equal(entry.graph.out[:live], eager), (layer, live)


def test_graphs_keep_to_their_limit_and_outlive_a_window(seed: int) -> None:
    made: list[afd_ops.CapturedExperts] = []

    def first(window: afd_ops.Window) -> afd_ops.Experts:
        made.append(captured_for(window, device_experts(window)))
        made[0].capture(range(LAYERS), (16, 64, 512))
        return made[0]

    with cluster(PAIR, first, **BY_HAND) as ready:
        for layer in range(LAYERS):
            answered(ready, layer, 64)
    (kept,) = made
    with cluster(PAIR, lambda window: kept, **BY_HAND) as ready:  # as when a failed rank was restarted
        for layer in range(LAYERS):
            answered(ready, layer, 64)
        assert ready.servers[0].stats()["eager"] == 0
    assert kept.stats()["graphs"] == 3 * LAYERS

    with harness.windows(PAIR, hidden=256, topk=4, tokens=128, dtype=torch.bfloat16) as (_, window):
        free = captured_for(window, device_experts(window))
        free.capture(range(LAYERS), (16, 512))
        none = captured_for(window, device_experts(window), limit=0)
        none.capture(range(LAYERS), (16, 512))
        if free.nbytes > 0:  # the driver takes memory in large pieces
            assert none.nbytes <= 0 or none.stats()["graphs"] == 0
            assert none.stats()["graphs"] < free.stats()["graphs"]


def test_a_size_that_does_not_fit_takes_no_other_graph_away() -> None:
    """fault: it was captured into the pool of all others, which then stayed as large when it had gone; so they went."""

    def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        return rows + torch.zeros((rows.shape[0], 1 << 16), dtype=torch.uint8, device=rows.device).sum()

    sizes: dict[str, Any] = dict(rows=512, hidden=256, owned=1, dtype=torch.bfloat16, device="cuda")
    made = afd_ops.CapturedExperts(experts, **sizes)
    made.capture(range(2), [16, 64])
    made._graphs.limit = made.nbytes + (16 << 20)
    made.capture(range(2), [512])  # takes 32 MB while it is there
    assert made.stats()["uses"].keys() == {(layer, rows) for layer in range(2) for rows in (16, 64)}
    assert made.nbytes <= made._graphs.limit
    made.capture(range(2, 4), [64])
    assert made.stats()["graphs"] == 6


def test_a_graph_that_is_garbage_does_not_end_a_capture() -> None:
    """fault: captured experts that an engine has dropped are garbage that refers to itself; collected during the next
    ones' capture, their graphs were destroyed there, and the capture failed: operation not permitted."""
    spare = []

    def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        if spare and torch.cuda.is_current_stream_capturing():
            cycle = [spare.pop()]
            cycle.append(cycle)
            del cycle
            assert [[] for _ in range(100_000)]  # far more than the collector lets pass
        return rows + 1

    def made() -> afd_ops.CapturedExperts:
        sizes: dict[str, Any] = dict(rows=16, hidden=256, owned=1, dtype=torch.bfloat16, device="cuda")
        captured = afd_ops.CapturedExperts(experts, **sizes)
        captured.capture([0], [16])
        return captured

    spare.append(made())
    assert made().stats()["graphs"] == 1 and not spare


def test_four_ranks_and_two_stages_together_are_exact(seed: int) -> None:
    """Batches of any composition, captured and eager, while every lane runs free."""
    topology, turns, count = afd_ops.Topology(4, 1, 7), 60, 24
    with cluster(topology, captured((64, 128, 512)), stages=2, rows=4 * 128 * 4) as ready:
        lanes = [(window, stage) for window in ready.attention for stage in range(2)]
        steps = [inputs(window, turns, count) for window, _ in lanes]
        modules = [[harness.remote(w, layer, stage) for layer in range(LAYERS)] for w, stage in lanes]
        wants = [
            torch.stack([oracle(*(t[turn] for t in step), turn % LAYERS) for turn in range(turns)]) for step in steps
        ]
        outs: list[list[Tensor]] = [[] for _ in lanes]
        harness.synchronize()
        for turn in range(turns):
            tickets = [
                module[turn % LAYERS].dispatch(*(t[turn] for t in step[:3]))
                for module, step in zip(modules, steps, strict=True)
            ]
            for out, module, step, ticket in zip(outs, modules, steps, tickets, strict=True):
                out.append(module[turn % LAYERS].combine(ticket, step[3][turn]))
            if turn % 4 == 3:
                torch.cuda.current_stream().synchronize()
        torch.cuda.current_stream().synchronize()
        for window in ready.attention:
            window.check()
        for out, want in zip(outs, wants, strict=True):
            assert torch.equal(torch.stack(out), want)
        found = ready.servers[0].stats()
        assert max(found["batch_sizes"]) > 1, found["batch_sizes"]
        print("batch sizes", found["batch_sizes"], "coverage", found["coverage"])
