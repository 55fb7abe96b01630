"""Errors on a GPU: arguments that are refused before a launch, and what only the device can see."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import harness
import pytest
import torch
from cuda_cluster import (
    BY_HAND,
    FUSED,
    SPLIT,
    TICKET_GENERATION,
    TICKET_RING,
    Captured,
    assert_exact_again,
    cluster,
    differing,
    inputs,
    nans_like,
    one_step,
    oracle,
    slot_index,
)
from harness import slots_of
from torch import Tensor

import afd_ops

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

PAIR = afd_ops.Topology(1, 1, 7)


# Arguments.


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_an_id_out_of_range_counts_as_none_and_check_reports_it(count: int, width: torch.dtype, seed: int) -> None:
    """faults: an index from outside writes out of the window; a 64-bit id cut to 32 bits becomes a legal one; the
    peers, or the rest of the step, pay for it. In a replay nobody can raise: all other choices count exactly."""
    outside = [7, 8, 1000, -2, 2**31 - 1, -(2**31)]
    if width == torch.int64:
        outside += [2**32, 2**32 + 1, 2**40 + 3, -(2**33), 2**63 - 1, -(2**63)]
    with cluster(afd_ops.Topology(1, 2, 7), stages=2, **BY_HAND) as ready:
        (window,) = ready.attention
        stage = 1
        captured = Captured(window, count, layer=1, stage=stage, ids=width)
        steps = inputs(window, 2, count)
        steps[1] = steps[1].to(width)
        legal = steps[1].clone()
        places = torch.randperm(count * window.geometry.topk, device=legal.device)[: len(outside)]
        steps[1][1].view(-1)[places] = torch.tensor(outside, dtype=width, device=legal.device)
        legal[1].view(-1)[places] = -1
        want = oracle(steps[0], legal, steps[2], steps[3] * 2 + steps[0], 1)
        outs = nans_like(steps[3])
        torch.cuda.synchronize()

        captured.replay([t[0] for t in steps], outs[0])
        assert ready.answer() == [1, 1]
        harness.synchronize()
        window.check()
        before = [slots_of(ffn).clone() for ffn in ready.ffn]
        harness.synchronize()
        captured.replay([t[1] for t in steps], outs[1])
        ready.answer()
        harness.synchronize()

        target = slot_index(ready.ffn[0], 0, stage, 1)  # this lane's second dispatch
        for ffn, content in zip(ready.ffn, before, strict=True):
            changed = (slots_of(ffn) != content).any(1).nonzero().flatten().tolist()
            assert set(changed) <= {target}, "written outside the slot of this dispatch"
        assert differing(outs, want) == []
        with pytest.raises(afd_ops.ArgumentError, match="topk_ids"):
            window.check()
        ready.reset()
        assert_exact_again(ready, stage=stage)


def test_a_misaligned_argument_is_refused_by_name(seed: int) -> None:
    """fault: a 16-byte access at another address ends the whole process's use of the GPU."""
    with cluster(PAIR, dtype=torch.float32, hidden=16, **BY_HAND) as ready:
        (window,), (ffn,), (server,), (stream,) = ready.attention, ready.ffn, ready.servers, ready.streams
        module, (x, ids, weights, base) = harness.remote(window, 1), one_step(window, 8)
        want = oracle(x, ids, weights, base, 1)

        def misaligned(t: Tensor) -> list[Tensor]:
            shifted = torch.zeros(t.numel() + 1, device=t.device)[1:].view_as(t)
            apart = torch.zeros(t.shape[0], t.shape[1] + 1, device=t.device)[:, :-1]
            for bad in (shifted, apart):
                bad.copy_(t)
            return [shifted, apart]

        for bad in misaligned(x):
            with pytest.raises(afd_ops.ArgumentError, match=r"dispatch: x .*16"), window.step():
                module.dispatch(bad, ids, weights)
        window.check()
        ticket = module.dispatch(x, ids, weights)
        for bad in misaligned(base):
            with pytest.raises(RuntimeError, match=r"Argument in afd::combine: base .*16"):
                module.combine(ticket, bad)
        with torch.cuda.stream(stream):
            item, layer, rows = harness.take(server)
            received, scales, offsets = torch.ops.afd.receive(item, server.port, ffn.id, rows)
            answer = server.experts(received, scales, offsets, layer)
            for bad in misaligned(answer):
                with pytest.raises(RuntimeError, match=r"Argument in afd::reply: expert_out .*16"):
                    torch.ops.afd.reply(bad, item, server.port, ffn.id)
            torch.ops.afd.reply(answer, item, server.port, ffn.id)
        out = module.combine(ticket, base)
        torch.cuda.synchronize()
        assert torch.equal(out, want)
        assert_exact_again(ready)


def test_a_refused_argument_costs_nothing_of_what_is_in_flight(seed: int) -> None:
    """fault: a step that refuses an argument takes another lane's dispatch for its own, and poisons the window."""
    with cluster(PAIR, **BY_HAND) as ready:
        (window,) = ready.attention
        module, step = harness.remote(window, 1), one_step(window, FUSED)
        want = oracle(*step, 1)
        torch.cuda.synchronize()
        ticket = module.dispatch(*step[:3])
        with pytest.raises(afd_ops.ArgumentError, match="topk_weights"), window.step():
            module.dispatch(step[0], step[1], step[2].double())
        window.check()
        assert ready.answer() == [1]
        out = module.combine(ticket, step[3])
        torch.cuda.synchronize()
        window.check()
        assert torch.equal(out, want)


ELSEWHERE = """
import faulthandler
import torch
import afd_ops

faulthandler.dump_traceback_later(50, exit=True)
topology = afd_ops.Topology(1, 1, 4)
attention, ffn = afd_ops.open_local(
    topology, devices="cuda:0", hidden=64, topk=2, tokens=8, deadline=5.0, poll_interval=2.0
)
module, server = afd_ops.RemoteExperts(0).to("cuda:0").attach(attention), afd_ops.ExpertServer(ffn, lambda r, *_: r)
good = {
    "x": torch.ones(4, 64, dtype=torch.bfloat16, device="cuda:0"),
    "topk_ids": torch.zeros(4, 2, dtype=torch.int64, device="cuda:0"),
    "topk_weights": torch.ones(4, 2, device="cuda:0"),
    "base": torch.ones(4, 64, dtype=torch.bfloat16, device="cuda:0"),
    "expert_map": torch.tensor(topology.expert_map, dtype=torch.int32, device="cuda:0"),
}
others = ["cpu"] + ["cuda:1"] * (torch.cuda.device_count() > 1)


def refuses(op, names, call):
    for name in names:
        for device in others:
            try:
                call(**{**good, name: good[name].to(device)})
            except RuntimeError as error:
                text = str(error).splitlines()[0]
                assert text.startswith(f"Argument in afd::{op}: ") and name in text, (op, name, device, error)
            else:
                raise AssertionError(f"{op} took {name} on {device}")
            torch.cuda.synchronize()


def dispatch(x, topk_ids, topk_weights, **_):
    return module.dispatch(x, topk_ids, topk_weights)


refuses("dispatch", ["x", "topk_ids", "topk_weights"], dispatch)
refuses("plan", ["expert_map"], lambda topk_ids, expert_map, **_: torch.ops.afd.plan(topk_ids, expert_map, 1, 4))
ticket = dispatch(**good)
refuses("combine", ["base"], lambda base, **_: module.combine(ticket, base))
torch.cuda.synchronize()
assert server.step() == 1
assert bool((module.combine(ticket, good["base"]).cpu() == 3).all())
attention.check()
print("refused")
"""


def test_a_tensor_on_another_device_is_refused_by_name() -> None:
    """fault: a kernel reads host memory, an illegal access that ends the process's use of the GPU (so: its own
    process). Ids made on the CPU beside hidden states on the GPU are an everyday slip."""
    (output,) = harness.run_scripts(ELSEWHERE, ())
    assert "refused" in output.split(), output


# Errors that only the device can see.


@pytest.mark.memcheck
@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_a_ticket_used_twice_gives_nan_and_an_error(count: int, seed: int) -> None:
    """fault: the second combine takes the reply to another request, or waits for ever."""
    with cluster(PAIR, **BY_HAND) as ready:
        (window,) = ready.attention
        module, step = harness.remote(window, 1), one_step(window, count)
        want = oracle(*step, 1)
        torch.cuda.synchronize()
        ticket = module.dispatch(*step[:3])
        assert ready.answer() == [1]
        outs = [module.combine(ticket, step[3]) for _ in range(2)]
        torch.cuda.synchronize()
        assert torch.equal(outs[0], want)
        assert bool(outs[1].isnan().all())
        with pytest.raises(afd_ops.StaleError):
            window.check()
        ready.reset()
        assert_exact_again(ready)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_dispatch_without_a_free_ring_is_an_error_and_publishes_nothing(depth: int, seed: int) -> None:
    """faults: the payload that a slow reader is still reading is overwritten; a hang; a ticket that looks right."""
    with cluster(afd_ops.Topology(1, 2, 7), depth=depth, **BY_HAND) as ready:
        (window,) = ready.attention
        module = harness.remote(window, 1)
        for _ in range(depth):
            module.dispatch(*one_step(window, SPLIT)[:3])
        harness.synchronize()
        before = [slots_of(ffn).clone() for ffn in ready.ffn]
        harness.synchronize()
        refused = module.dispatch(*one_step(window, SPLIT)[:3])
        harness.synchronize()
        for ffn, content in zip(ready.ffn, before, strict=True):
            assert torch.equal(slots_of(ffn), content)
        assert int(refused[0, TICKET_GENERATION]) == -1
        with pytest.raises(afd_ops.RingBusyError, match=f"depth.* {depth}"):
            window.check()
        assert window.stats()["dispatches"] == depth + 1  # and the cluster's first
        ready.reset()
        assert_exact_again(ready)


def test_more_experts_than_threads_and_more_slots_than_lanes_are_exact(seed: int) -> None:
    """faults: arrive sees the slots of its first 32 only, or places the rows of its first 256 experts only."""
    stages, depth, tokens, topk = 5, 3, 40, 8
    slots = 3 * stages * depth
    sizes = dict(stages=stages, depth=depth, tokens=tokens, topk=topk, rows=slots * tokens * topk, dtype=torch.float32)
    with cluster(afd_ops.Topology(3, 1, 600), **sizes, **BY_HAND) as ready:
        for _ in range(3):
            sent = []
            for window in ready.attention:
                for stage in [*range(stages)] * depth:
                    module, step = harness.remote(window, 1, stage), one_step(window, tokens)
                    sent.append((module, step, module.dispatch(*step[:3])))
            harness.synchronize()
            assert ready.answer() == [slots]
            for module, step, ticket in sent:
                assert torch.equal(module.combine(ticket, step[3]), oracle(*step, 1))
        for window in ready.windows:
            window.check()


@contextlib.contextmanager
def stopped_by_the_ffn_rank(says: str) -> Iterator[tuple[afd_ops.ExpertServer, Tensor, int, int]]:
    """A server, its item of SPLIT tokens, layer and rows, on the server's stream. What the body does stops the FFN rank
    with an argument error that says this; the attention rank learns of it, and a reset mends both."""
    with cluster(PAIR, **BY_HAND) as ready:
        (window,), (ffn,), (server,), (stream,) = ready.attention, ready.ffn, ready.servers, ready.streams
        module, (x, ids, weights, base) = harness.remote(window, 1), one_step(window, SPLIT)
        torch.cuda.synchronize()
        ticket = module.dispatch(x, ids.clamp(min=0), weights)
        with torch.cuda.stream(stream):
            item, layer, rows = harness.take(server)
            assert rows == SPLIT * window.geometry.topk
            yield server, item, layer, rows
            torch.cuda.current_stream().synchronize()
            with pytest.raises(afd_ops.ArgumentError, match=says):
                ffn.check()
        out = module.combine(ticket, base)
        torch.cuda.current_stream().synchronize()
        assert bool(out.isnan().all())
        with pytest.raises(afd_ops.PeerFailedError, match=r"\(ffn 0\)"):
            window.check()
        ready.reset()
        assert_exact_again(ready)


def test_a_bucket_that_is_too_small_is_an_error_and_no_offset_passes_its_end(seed: int) -> None:
    """fault: offsets that lie beyond the rows send the experts' GEMM out of its input."""
    with stopped_by_the_ffn_rank("rows") as (server, item, layer, rows):
        received, scales, offsets = torch.ops.afd.receive(item, server.port, server.window.id, rows // 2)
        out = server.experts(received, scales, offsets, layer)
        torch.cuda.current_stream().synchronize()
        assert int(offsets.max()) <= rows // 2
        with contextlib.suppress(RuntimeError):  # the window has stopped
            torch.ops.afd.reply(out, item, server.port, server.window.id)


def test_experts_that_return_too_few_rows_are_an_error(seed: int) -> None:
    """fault: reply reads past the end of expert_out and answers with whatever lies there."""
    with stopped_by_the_ffn_rank("expert_out") as (server, item, layer, rows):
        out = server.experts(*torch.ops.afd.receive(item, server.port, server.window.id, rows), layer)
        torch.ops.afd.reply(out[: rows - 1], item, server.port, server.window.id)  # the host does not know the rows


def test_a_bad_position_closes_its_region_and_the_other_is_answered_exactly(seed: int) -> None:
    """faults: an index from the wire leaves the item's rows; while one region is being closed by some threads, others
    still work on it, and rows of a healthy one are mixed up."""
    sizes = dict(hidden=4096, tokens=64, rows=2 * 64 * 4)
    with cluster(afd_ops.Topology(2, 1, 7), **sizes, **BY_HAND) as ready:
        (ffn,), layout, topk = ready.ffn, ready.ffn[0].geometry.layout, ready.ffn[0].geometry.topk
        for generation in range(4):
            modules = [harness.remote(window, 1) for window in ready.attention]
            steps = [one_step(window, 64) for window in ready.attention]
            want = oracle(*steps[0], 1)
            torch.cuda.synchronize()
            tickets = [module.dispatch(*step[:3]) for module, step in zip(modules, steps, strict=True)]
            torch.cuda.synchronize()
            slot = slots_of(ffn)[slot_index(ffn, 1, 0, int(tickets[1][0, TICKET_RING]))]
            position = slot[layout["position"] : layout["position"] + 64 * topk * 8].view(torch.int32).view(64, topk, 2)
            position[17 * (generation + 1) % 64, 0] = torch.tensor([99, 0], dtype=torch.int32, device=slot.device)
            torch.cuda.synchronize(slot.device)
            assert ready.answer() == [2]
            outs = [module.combine(t, s[3]) for module, t, s in zip(modules, tickets, steps, strict=True)]
            torch.cuda.synchronize()
            ready.attention[0].check()
            assert torch.equal(outs[0], want)
            assert bool(outs[1].isnan().all())
            with pytest.raises(afd_ops.PeerFailedError):
                ready.attention[1].check()
            (record,) = ffn.errors()
            assert (record["kind"], record["peer"], record["layer"]) == ("Protocol", 1, 1)
            ready.reset()


@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_a_replay_after_close_gives_nan_and_writes_nothing(count: int, seed: int) -> None:
    """fault: a graph outlives its window, and goes on storing into the memory its peers have given back."""
    with cluster(afd_ops.Topology(1, 2, 7), **BY_HAND) as ready:
        (window,) = ready.attention
        captured, step = Captured(window, count), one_step(window, count)
        out = torch.zeros_like(step[3])
        window.close()
        before = [slots_of(ffn).clone() for ffn in ready.ffn]
        harness.synchronize()
        begun = time.monotonic()
        captured.replay(step, out)
        harness.synchronize()
        assert time.monotonic() - begun < 5.0
        assert bool(out.isnan().all())
        for ffn, content in zip(ready.ffn, before, strict=True):
            assert torch.equal(slots_of(ffn), content)
