"""What only a GPU can show: streams, synchronisation, lazy loading, what a profiler sees, real experts.

The round trip itself is tested for every device in test_round_trip.py, graphs in test_cuda_graphs.py, errors in
test_cuda_errors.py, NVSHMEM in test_nvshmem.py.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from cuda_cluster import (
    BY_HAND,
    FUSED,
    SPLIT,
    TICKET_RING,
    Captured,
    assert_exact_again,
    capturing,
    cluster,
    differing,
    inputs,
    nans_like,
    one_step,
    oracle,
    slot_index,
)
from harness import SLEEP_CYCLES
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import afd_ops
from afd_ops import _C
from afd_ops.reference import routed_sum

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_gpu")]

PAIR = afd_ops.Topology(1, 1, 7)


# Nothing waits on the host.


@contextlib.contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("count", [0, FUSED, SPLIT])
def test_no_op_synchronises(count: int, seed: int) -> None:
    """fault: a hidden wait for the device in dispatch, combine or the server loop, which also ends a capture."""
    with cluster(PAIR, **BY_HAND) as ready:
        (window,) = ready.attention
        module, step = harness.remote(window, 3), one_step(window, count)
        want, probe = oracle(*step, 3), torch.ones(1, device=window.heap.device)
        torch.cuda.synchronize()
        with synchronising_is_an_error():
            with window.step():
                ticket = module.dispatch(*step[:3])
            assert ready.answer() == [1]
            with window.step():
                out = module.combine(ticket, step[3])
            with pytest.raises(RuntimeError, match="synchronizing"):
                probe.cpu()  # the mode does notice
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_the_served_module_synchronises_nowhere(seed: int) -> None:
    """RemoteExperts.forward and ExpertServer.run together: the mode is the whole process's."""
    with cluster(afd_ops.Topology(1, 2, 7)) as ready:
        (window,) = ready.attention
        module, step = harness.remote(window, 2), one_step(window, SPLIT)
        want = oracle(*step, 2)
        torch.cuda.synchronize()
        with synchronising_is_an_error():
            outs = [module(*step) for _ in range(10)]
            done = torch.cuda.current_stream().record_event()
            until = time.monotonic() + 10
            while not done.query():
                assert time.monotonic() < until, "the server's loop has ended"
                time.sleep(0.001)
        assert all(torch.equal(out, want) for out in outs)


def test_no_op_copies_from_the_device(seed: int) -> None:
    """fault: a device-to-host copy that no debug mode sees (into pinned memory, say)."""

    def on_device(profiler: profile) -> list[str]:
        return [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with cluster(PAIR, **BY_HAND) as ready:
        (window,) = ready.attention
        module, step = harness.remote(window), one_step(window, SPLIT)
        want = oracle(*step)
        torch.cuda.synchronize()
        with profile(activities=activities) as profiler:
            ticket = module.dispatch(*step[:3])
            assert ready.answer() == [1]
            out = module.combine(ticket, step[3])
            harness.synchronize()
        with profile(activities=activities) as canary:
            step[2].cpu()
        assert torch.equal(out, want)
        assert any("DtoH" in name for name in on_device(canary)), on_device(canary)
        ran = on_device(profiler)
        assert any("dispatch" in name for name in ran) and any("reply" in name for name in ran), ran
        assert not [name for name in ran if "DtoH" in name]


@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_a_captured_layer_is_at_most_three_kernels_and_nothing_else(count: int, seed: int) -> None:
    """No copy, no memset, no foreign kernel, no synchronisation. The experts of this server launch nothing, so that
    whatever is not one of the FFN side's three kernels is the attention side's."""
    layers = 4
    with cluster(PAIR, **BY_HAND) as ready:
        (window,), (ffn,), (server,), (stream,) = ready.attention, ready.ffn, ready.servers, ready.streams
        modules, (x, ids, weights, base) = [harness.remote(window, n) for n in range(layers)], inputs(window, 1, count)
        bucket = ffn.geometry.tokens * ffn.geometry.topk
        attention, served = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with capturing(attention, torch.cuda.current_stream()):
            y = x[0]
            for module in modules:
                y = module.combine(module.dispatch(y, ids[0], weights[0]), base[0])
        with capturing(served, stream):
            for _ in range(layers):
                item = torch.ops.afd.arrive(server.port, ffn.id)
                rows, _, _ = torch.ops.afd.receive(item, server.port, ffn.id, bucket)
                torch.ops.afd.reply(rows, item, server.port, ffn.id)

        def step() -> None:
            with synchronising_is_an_error():
                with torch.cuda.stream(stream):
                    served.replay()
                attention.replay()
            harness.synchronize()

        step()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
        window.check()
        assert not y.isnan().any()
        ran = [event.name for event in profiler.events() if event.device_type == DeviceType.CUDA]
        kernels = [re.findall(r"(\w+)_kernel", name) for name in ran]
        ffn_side = [name for name in kernels if name in (["arrive"], ["receive"], ["reply"])]
        rest = [name for name in kernels if name not in ffn_side]
        assert len(ffn_side) == 3 * layers, ran
        assert all(name in (["dispatch"], ["await"], ["combine"]) for name in rest), ran
        assert 2 * layers <= len(rest) <= 3 * layers, ran


FIRST_LAUNCH = """
import faulthandler, time
import torch
import afd_ops

faulthandler.dump_traceback_later(50, exit=True)
topology = afd_ops.Topology(1, 1, 4)
sides = [torch.cuda.Stream("cuda:0") for _ in range(2)]
for tokens, dtype, base_dtype, answered in (
    (4, torch.bfloat16, torch.bfloat16, True),
    (100, torch.float16, torch.float32, True),
    (4, torch.float32, torch.float32, False),
):
    attention, ffn = afd_ops.open_local(
        topology, devices="cuda:0", hidden=64, topk=2, tokens=128, dtype=dtype, deadline=8.0, poll_interval=4.0
    )
    module, port = afd_ops.RemoteExperts(0).to("cuda:0").attach(attention), ffn.port()
    x = (torch.arange(tokens * 64) % 5).reshape(tokens, 64).to(dtype)
    ids = torch.arange(tokens * 2).reshape(tokens, 2) % 5 - 1
    weights = (torch.arange(tokens * 2).reshape(tokens, 2) % 3).float()
    want = 1 + x.float() * (weights * (ids >= 0)).sum(1, keepdim=True)
    step = [t.to("cuda:0") for t in (x, ids, weights, torch.ones(tokens, 64, dtype=base_dtype))]
    for side in sides:
        with torch.cuda.stream(side):
            torch.empty(1 << 16, device="cuda:0")  # memory for what follows: this is about kernels
    torch.cuda.synchronize()
    begun = time.monotonic()
    with torch.cuda.stream(sides[0]):
        out = module.combine(module.dispatch(*step[:3]), step[3])
    time.sleep(0.2)
    assert not sides[0].query(), "combine does not wait"
    if answered:
        with torch.cuda.stream(sides[1]):
            item = torch.ops.afd.arrive(port, ffn.id)
            stream = sides[1].cuda_stream
            count, layer, rows, _ = ffn.device_half.next_item(ffn.id, 5_000_000_000, 0, 0, stream)
            received, scales, offsets = torch.ops.afd.receive(item, port, ffn.id, rows)
            torch.ops.afd.reply(received, item, port, ffn.id)  # experts that change nothing and launch nothing
    else:
        ffn.poison()
    torch.cuda.synchronize()
    took = time.monotonic() - begun
    assert took < 4.0, f"{took} s: the answer's kernels could not start"
    if answered:
        attention.check()
        assert torch.equal(out.cpu().float(), want), tokens
    else:
        assert bool(out.cpu().isnan().all())
    attention.close()
    ffn.close()
print("started")
"""


def test_a_first_launch_behind_a_waiting_kernel_does_not_deadlock() -> None:
    """fault: with lazy loading a kernel's first launch waits for the GPU to be idle, behind the combine that waits for
    that kernel; shown in a fresh process, on one GPU, for all ops of an answer and for poison()."""
    environment = {"CUDA_MODULE_LOADING": "LAZY", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    (output,) = harness.run_scripts(FIRST_LAUNCH, (), environment=environment)
    assert "started" in output.split(), output


# What a profiler of the whole machine sees.

# A tool as NVTX loads it: takes the place of two functions of the core API, by their numbers in nvtxTypes.h.
TOOL = r"""
#include <stdio.h>
enum { CALLBACKS = 1, CORE = 1, PUSH = 9, POP = 11 };
struct callbacks { size_t size; int (*functions)(int module, void**** out, unsigned* count); };
static int push(const char* name) { return fprintf(stderr, "nvtx push %s\n", name); }
static int pop(void) { return fprintf(stderr, "nvtx pop\n"); }
int InitializeInjectionNvtx2(const void* (*table)(unsigned)) {
  const struct callbacks* c = table(CALLBACKS);
  void*** functions = 0;
  unsigned count = 0;
  if (c == 0 || !c->functions(CORE, &functions, &count) || count <= POP) return 0;
  *functions[PUSH] = (void*)push;
  *functions[POP] = (void*)pop;
  return 1;
}
"""

ANNOTATED = """
import torch
import afd_ops, harness

harness.DEVICE = "cuda:0"
topology = afd_ops.Topology(1, 1, 3)
with harness.windows(topology) as (attention, ffn):
    x, ids, weights, base = harness.random_step(topology, 4)
    expert_map = torch.tensor(topology.expert_map, dtype=torch.int32, device="cuda:0")
    torch.ops.afd.plan(ids, expert_map, 1, 3)
    module, server = harness.remote(attention), afd_ops.ExpertServer(ffn, harness.experts_of(topology, 0))
    ticket = module.dispatch(x, ids.abs(), weights)
    harness.synchronize()
    item, layer, rows = harness.take(server)  # op by op: a server makes one call of two ops
    received = torch.ops.afd.receive(item, server.port, ffn.id, rows)
    torch.ops.afd.reply(server.experts(*received, layer), item, server.port, ffn.id)
    module.combine(ticket, base)
    harness.synchronize()
"""


def test_every_op_is_an_nvtx_range(tmp_path: Path) -> None:
    if not shutil.which("g++"):
        pytest.skip("no g++ here")
    (tmp_path / "tool.c").write_text(TOOL)
    tool = str(tmp_path / "tool.so")
    subprocess.run(["g++", "-xc", "-shared", "-fPIC", str(tmp_path / "tool.c"), "-o", tool], check=True)
    (output,) = harness.run_scripts(ANNOTATED, (), environment={"NVTX_INJECTION64_PATH": tool})
    ranges = re.findall(r"^nvtx push afd::(\w+)\nnvtx pop$", output, re.MULTILINE)
    assert ranges == ["plan", "dispatch", "arrive", "receive", "reply", "combine"], output


# Streams.


def test_ops_run_on_the_current_stream_in_event_order(seed: int) -> None:
    """fault: an op on another stream than the caller's reads its arguments before they are there."""
    with cluster(afd_ops.Topology(1, 2, 7)) as ready:
        (window,) = ready.attention
        module, step = harness.remote(window, 1), one_step(window, SPLIT)
        want = oracle(*step, 1)
        late = [torch.full_like(t, -1 if t.dtype == torch.int64 else float("nan")) for t in step]
        sender, taker = (torch.cuda.Stream(window.heap.device) for _ in range(2))
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        with torch.cuda.stream(sender):
            torch.cuda._sleep(2 * SLEEP_CYCLES)
            for buffer, value in zip(late[:3], step[:3], strict=True):
                buffer.copy_(value)
            ticket = module.dispatch(*late[:3])
            sent = sender.record_event()
        with torch.cuda.stream(taker):
            taker.wait_event(sent)
            torch.cuda._sleep(SLEEP_CYCLES)
            late[3].copy_(step[3])
            out = module.combine(ticket, late[3])
        assert not sent.query(), "dispatch did not wait for its stream, or the host for the device"
        taker.synchronize()
        window.check()
        assert torch.equal(out, want)


def filling(device: torch.device) -> Callable[[torch.cuda.Stream, int], torch.cuda.Event]:
    """Launches so many matrix products, each of which fills every multiprocessor for about a millisecond."""
    a = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    out = torch.mm(a, a)
    torch.cuda.synchronize(device)

    def fill(stream: torch.cuda.Stream, count: int) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            for _ in range(count):
                torch.mm(a, a, out=out)
            return stream.record_event(torch.cuda.Event(enable_timing=True))

    return fill


@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_a_wait_and_work_that_fills_the_gpu_do_not_hold_each_other_up(
    count: int, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """faults: CTAs that wait keep other work off the GPU; a round trip gets its turn when all other work is over."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    with cluster(PAIR, **BY_HAND) as ready:
        (window,), (ffn,) = ready.attention, ready.ffn
        module, step = harness.remote(window, 1), one_step(window, count)
        want, device = oracle(*step, 1), window.heap.device
        side, fill = harness.independent_stream(device), filling(device)
        with torch.cuda.stream(ready.streams[0]):
            there, fill_there = harness.independent_stream(ffn.heap.device), filling(ffn.heap.device)

        def milliseconds() -> float:
            begin = side.record_event(torch.cuda.Event(enable_timing=True))
            end = fill(side, 30)
            end.synchronize()
            return begin.elapsed_time(end)

        milliseconds()
        alone = milliseconds()
        ticket = module.dispatch(*step[:3])
        out = module.combine(ticket, step[3])
        beside = milliseconds()
        assert not torch.cuda.current_stream().query(), "combine does not wait"
        assert ready.answer() == [1]
        torch.cuda.current_stream().synchronize()
        window.check()
        assert torch.equal(out, want)
        assert beside < 1.5 * alone, (beside, alone)

        work = [fill(side, 400), fill_there(there, 400)]
        begun = time.monotonic()
        ticket = module.dispatch(*step[:3])
        assert ready.answer() == [1]
        out = module.combine(ticket, step[3])
        torch.cuda.current_stream().synchronize()
        took = time.monotonic() - begun
        assert not any(event.query() for event in work), "the round trip waited for all other work"
        harness.synchronize()
        window.check()
        assert torch.equal(out, want)
        record_property("beside_alone_ms", (beside, alone))
        print(f"work of {alone:.1f} ms alone takes {beside:.1f} beside a wait; a round trip inside it {took * 1e3:.1f}")


@pytest.mark.parametrize("count", [FUSED, SPLIT])
def test_two_ubatches_with_work_between_are_exact(count: int, seed: int) -> None:
    """Each lane's wait has the other's dispatch and compute before it, in one graph on one stream."""
    turns = 50
    with cluster(afd_ops.Topology(1, 2, 7), stages=2) as ready:
        (window,) = ready.attention
        modules = [harness.remote(window, stage, stage) for stage in range(2)]
        steps = [inputs(window, turns, count) for _ in range(2)]
        want = [oracle(*steps[stage], stage) for stage in range(2)]
        outs, buffers = [nans_like(lane[3]) for lane in steps], [[t[0].clone() for t in lane] for lane in steps]
        a = torch.ones(2048, 2048, device=window.heap.device, dtype=torch.bfloat16)
        torch.mm(a, a)
        graph, answers = torch.cuda.CUDAGraph(), []
        with capturing(graph, torch.cuda.current_stream()):
            tickets = []
            for module, lane in zip(modules, buffers, strict=True):
                tickets.append(module.dispatch(*lane[:3]))
                torch.mm(a, a)
            for module, ticket, lane in zip(modules, tickets, buffers, strict=True):
                answers.append(module.combine(ticket, lane[3]))
                torch.mm(a, a)
        torch.cuda.synchronize()
        for turn in range(turns):
            for lane, fresh in zip(buffers, steps, strict=True):
                for buffer, stacked in zip(lane, fresh, strict=True):
                    buffer.copy_(stacked[turn])
            graph.replay()
            for out, answer in zip(outs, answers, strict=True):
                out[turn].copy_(answer)
            if turn % 8 == 7:
                torch.cuda.current_stream().synchronize()
        torch.cuda.current_stream().synchronize()
        window.check()
        assert [differing(outs[stage], want[stage]) for stage in range(2)] == [[], []]


def test_deterministic_algorithms_change_no_result(seed: int) -> None:
    """torch then fills fresh tensors with NaN, between the allocation and our kernels and inside a capture, too."""
    torch.use_deterministic_algorithms(True)
    try:
        with cluster(afd_ops.Topology(1, 2, 7)) as ready:
            (window,) = ready.attention
            for count in (FUSED, SPLIT):
                captured, module = Captured(window, count, layer=1), harness.remote(window, 1)
                steps = inputs(window, 10, count)
                want, outs = oracle(*steps[:3], steps[3] * 2 + steps[0], 1), nans_like(steps[3])
                torch.cuda.synchronize()
                for turn in range(10):
                    captured.replay([t[turn] for t in steps], outs[turn])
                torch.cuda.current_stream().synchronize()
                assert differing(outs, want) == []
                x, weights = torch.randn_like(steps[0][0]), torch.rand_like(steps[2][0])
                torch.cuda.synchronize()
                twice = [module(x, steps[1][0], weights, x) for _ in range(2)]
                torch.cuda.current_stream().synchronize()
                assert torch.equal(*twice)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_slot_beyond_4_gib_is_exact(seed: int) -> None:
    """fault: an offset (slot x bytes) that does not fit 32 bits wraps around, into another slot."""
    sizes = dict(hidden=8192, topk=2, tokens=4096, stages=5, depth=16)
    with cluster(PAIR, **sizes) as ready:
        (window,) = ready.attention
        stage, depth = window.geometry.stages - 1, window.geometry.depth
        layout, last = window.geometry.layout, slot_index(window, 0, stage, depth - 1)
        assert layout["slots"] + last * layout["slot_bytes"] > 2**32
        module = harness.remote(window, 2, stage)
        for ring in range(depth):
            step = one_step(window, 4096 if ring == depth - 1 else 3)
            want = oracle(*step, 2)
            torch.cuda.synchronize()
            ticket = module.dispatch(*step[:3])
            out = module.combine(ticket, step[3])
            torch.cuda.current_stream().synchronize()
            window.check()
            assert int(ticket[0, TICKET_RING]) == ring
            assert torch.equal(out, want), ring


# Construction.


def test_what_cannot_be_adopted_says_so_and_disturbs_nothing(seed: int) -> None:
    """fault: the CUDA error of a failed construction is raised by the next op of another window."""
    from afd_ops import _C_cuda

    with cluster(PAIR, **BY_HAND) as ready:
        (window,) = ready.attention
        with pytest.raises(RuntimeError, match="map_host"):  # its Control is mapped already
            _C_cuda.adopt(window.id, _C.addresses(window.id)["control"], 0)
        assert_exact_again(ready)
        with pytest.raises(ValueError, match=r"topk is 65, .* on CUDA expected at most 64"):
            afd_ops.open_local(PAIR, devices="cuda:0", hidden=16, topk=65, tokens=1)
        assert_exact_again(ready)
        with pytest.raises(ValueError, match=r"slots \+ experts of one rank are 8\d{3}; .* at most .*, 6016"):
            afd_ops.open_local(PAIR, devices="cuda:0", hidden=16, topk=2, tokens=1, depth=1024, stages=8)
        assert_exact_again(ready)


# Real experts.

EXPERTS, WIDTH, INNER, CHOICES, LIMIT = 16, 512, 256, 4, 10.0


class SwiGLU:
    """Weights of all logical experts, and two ways to use them."""

    def __init__(self, device: str) -> None:
        self.gate_up = (torch.randn(EXPERTS, 2 * INNER, WIDTH, device=device) / WIDTH**0.5).bfloat16()
        self.down = (torch.randn(EXPERTS, WIDTH, INNER, device=device) / INNER**0.5).bfloat16()

    def exactly(self, index: int, row: Tensor) -> Tensor:
        gate, up = (self.gate_up[index].double() @ row).chunk(2)
        return self.down[index].double() @ (nn.functional.silu(gate.clamp(max=LIMIT)) * up.clamp(-LIMIT, LIMIT))

    def served_by(self, window: afd_ops.Window) -> afd_ops.Experts:
        owned = window.topology.experts_of(window.role_rank)
        weights = [w[owned].to(window.heap.device) for w in (self.gate_up, self.down)]
        experts = afd_ops.GroupedSwiGLU([weights[0]], [weights[1]], LIMIT)
        for rows in (1, 2, 8, 17, 64, 130, 256, 512):  # nothing is loaded for the first time while something waits
            offsets = torch.full((len(owned),), rows, dtype=torch.int32, device=window.heap.device)
            x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=window.heap.device)
            experts(x, x, offsets, 0)
        torch.cuda.synchronize(window.heap.device)
        return experts


def routed(tokens: int) -> list[Tensor]:
    """x, ids, weights, base as a gate gives them."""
    weights, ids = torch.softmax(torch.randn(tokens, EXPERTS, device="cuda:0"), -1).topk(CHOICES)
    x, base = (torch.randn(tokens, WIDTH, device="cuda:0").bfloat16() for _ in range(2))
    return [x, ids, weights, base]


REAL: dict[str, Any] = dict(hidden=WIDTH, topk=CHOICES, tokens=128, **BY_HAND)


@pytest.mark.parametrize("tokens", [8, SPLIT])
def test_the_chain_on_one_gpu_equals_a_naive_moe(tokens: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """dispatch, grouped SwiGLU experts and combine in bf16 against a per-token MoE in float64, eager and replayed."""
    monkeypatch.setattr(harness, "devices", lambda topology: "cuda:0")
    experts = SwiGLU("cuda:0")

    def naive(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor) -> Tensor:
        return base.double() + routed_sum(x.double(), ids, weights.double(), experts.exactly)

    with cluster(afd_ops.Topology(1, 2, EXPERTS), experts.served_by, **REAL) as ready:
        (window,) = ready.attention
        module, fresh = harness.remote(window), [routed(tokens) for _ in range(4)]
        want = [naive(*step) for step in fresh]
        elsewhere = naive(fresh[0][0], (fresh[0][1] + 1) % EXPERTS, *fresh[0][2:])
        torch.cuda.synchronize()
        ticket = module.dispatch(*fresh[0][:3])
        assert ready.answer() == [1, 1]
        eager = module.combine(ticket, fresh[0][3])
        torch.cuda.synchronize()
        torch.testing.assert_close(eager.double(), want[0], rtol=1e-2, atol=2e-2)
        assert not torch.allclose(eager.double(), elsewhere, rtol=1e-2, atol=2e-2), "the tolerance sees no misrouting"

        buffers, graph = [t.clone() for t in fresh[0]], torch.cuda.CUDAGraph()
        with capturing(graph, torch.cuda.current_stream()):
            out = module.combine(module.dispatch(*buffers[:3]), buffers[3])
        for step, expected in zip(fresh, want, strict=True):
            for buffer, value in zip(buffers, step, strict=True):
                buffer.copy_(value)
            graph.replay()
            assert ready.answer() == [1, 1]
            torch.cuda.synchronize()
            window.check()
            torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=2e-2)
            if step is fresh[0]:
                assert torch.equal(out, eager)


def test_an_answer_does_not_depend_on_who_else_is_in_the_batch(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    """bf16 experts, bit for bit: one region alone, and the same together with another in one item."""
    experts, equal = SwiGLU("cuda:0"), {}
    with cluster(afd_ops.Topology(2, 1, EXPERTS), experts.served_by, **REAL, rows=2 * 128 * CHOICES) as ready:
        modules = [harness.remote(window) for window in ready.attention]
        for mine, other in ((1, 1), (1, 64), (5, 40), (17, 1), (33, 31), (100, 100)):
            steps, outs = [routed(mine), routed(other)], []
            for together in (False, True):
                asked = [modules[rank].dispatch(*steps[rank][:3]) for rank in range(1 + together)]
                torch.cuda.synchronize()
                assert ready.answer() == [1 + together]
                answers = [modules[rank].combine(t, steps[rank][3]) for rank, t in enumerate(asked)]
                outs.append(answers[0])
                torch.cuda.synchronize()
            equal[mine, other] = torch.equal(*outs)
    record_property("bit_equal", str(equal))
    print(f"alone and batched are bit-equal: {equal}")
    if not all(equal.values()):
        pytest.xfail(f"grouped_mm promises nothing across batch sizes, and here it does not hold: {equal}")
