"""What only a GPU can show: streams, synchronisation, lazy loading, errors found by kernels, NVSHMEM, real experts.

The round trip itself is tested for every device in test_round_trip.py, graphs in test_cuda_graphs.py.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import pytest
import torch
from harness import SLEEP_CYCLES, slots_of
from test_cuda_graphs import (
    BY_HAND,
    FUSED,
    SPLIT,
    Captured,
    Cluster,
    capturing,
    cluster,
    differing,
    inputs,
    nans_like,
    one_step,
    oracle,
)
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed import HashStore
from torch.profiler import ProfilerActivity, profile

import afd_ops
from afd_ops import _C
from afd_ops.reference import routed_sum

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent
PAIR = afd_ops.Topology(1, 1, 7)
TICKET_GENERATION, TICKET_RING = 0, 2  # words of a ticket's first row


@pytest.fixture(autouse=True)
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "DEVICE", "cuda:0")


def run_scripts(
    script: str,
    *arguments: tuple[str, ...],
    seconds: float = 60.0,
    environment: dict[str, str] | None = None,
    killed: int = -1,
) -> list[str]:
    """The script in a fresh process per tuple of arguments, all at once; what they print. None outlives the call.

    All must end well, but for the one of index `killed`: by SIGKILL.
    """
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(environment or {})}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *words],
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in arguments
    ]
    until, outputs = time.monotonic() + seconds, []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=max(0.1, until - time.monotonic()))[0])
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        late = [process.communicate()[0] for process in processes[len(outputs) :]]
        raise AssertionError(f"not over within {seconds} s:\n" + "\n".join([*outputs, *late])) from None
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    for index, process in enumerate(processes):
        expected = -signal.SIGKILL if index == killed else 0
        assert process.returncode == expected, f"process {index}: {process.returncode}\n" + "\n".join(outputs)
    return outputs


def slot_index(window: afd_ops.Window, region: int, stage: int, ring: int) -> int:
    return (region * window.geometry.stages + stage) * window.geometry.depth + ring


def assert_exact_again(ready: Cluster, layer: int = 1, stage: int = 0) -> None:
    """Every attention rank's next steps, more of them than rings."""
    for window in ready.attention:
        module = harness.remote(window, layer, stage)
        for count in (SPLIT, 1, FUSED, 0, 2):
            step = one_step(window, count)
            want = oracle(*step, layer)
            torch.cuda.synchronize()
            ticket = module.dispatch(*step[:3])
            assert ready.answer() == [1] * len(ready.servers)
            out = module.combine(ticket, step[3])
            torch.cuda.synchronize()
            window.check()
            assert torch.equal(out, want), count


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
            count, layer, rows, _ = ffn.next_item(5.0)
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
    (output,) = run_scripts(FIRST_LAUNCH, (), environment=environment)
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
    item, layer, rows = harness.take(server)  # op by op: a server's step launches a graph
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
    (output,) = run_scripts(ANNOTATED, (), environment={"NVTX_INJECTION64_PATH": tool})
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
    (output,) = run_scripts(ELSEWHERE, ())
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


def assert_the_attention_rank_learns_of_it(module: afd_ops.RemoteExperts, ticket: Tensor, base: Tensor) -> None:
    assert module.window is not None
    out = module.combine(ticket, base)
    torch.cuda.current_stream().synchronize()
    assert bool(out.isnan().all())
    with pytest.raises(afd_ops.PeerFailedError, match=r"\(ffn 0\)"):
        module.window.check()


def test_a_bucket_that_is_too_small_is_an_error_and_no_offset_passes_its_end(seed: int) -> None:
    """fault: offsets that lie beyond the rows send the experts' GEMM out of its input."""
    with cluster(PAIR, **BY_HAND) as ready:
        (window,), (ffn,), (server,), (stream,) = ready.attention, ready.ffn, ready.servers, ready.streams
        module, (x, ids, weights, base) = harness.remote(window, 1), one_step(window, SPLIT)
        torch.cuda.synchronize()
        ticket = module.dispatch(x, ids.clamp(min=0), weights)
        with torch.cuda.stream(stream):
            item, layer, rows = harness.take(server)
            assert rows == SPLIT * window.geometry.topk
            received, scales, offsets = torch.ops.afd.receive(item, server.port, ffn.id, rows // 2)
            out = server.experts(received, scales, offsets, layer)
            stream.synchronize()
            assert int(offsets.max()) <= rows // 2
            with pytest.raises(afd_ops.ArgumentError, match="rows"):
                ffn.check()
            with contextlib.suppress(RuntimeError):  # the window has stopped
                torch.ops.afd.reply(out, item, server.port, ffn.id)
        assert_the_attention_rank_learns_of_it(module, ticket, base)
        ready.reset()
        assert_exact_again(ready)


def test_experts_that_return_too_few_rows_are_an_error(seed: int) -> None:
    """fault: reply reads past the end of expert_out and answers with whatever lies there."""
    with cluster(PAIR, **BY_HAND) as ready:
        (window,), (ffn,), (server,), (stream,) = ready.attention, ready.ffn, ready.servers, ready.streams
        module, (x, ids, weights, base) = harness.remote(window, 1), one_step(window, SPLIT)
        torch.cuda.synchronize()
        ticket = module.dispatch(x, ids.clamp(min=0), weights)
        with torch.cuda.stream(stream):
            item, layer, rows = harness.take(server)
            out = server.experts(*torch.ops.afd.receive(item, server.port, ffn.id, rows), layer)
            torch.ops.afd.reply(out[: rows - 1], item, server.port, ffn.id)  # the host does not know the item's rows
            stream.synchronize()
            with pytest.raises(afd_ops.ArgumentError, match="expert_out"):
                ffn.check()
        assert_the_attention_rank_learns_of_it(module, ticket, base)
        ready.reset()
        assert_exact_again(ready)


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


# NVSHMEM.

PERMUTED = """
import faulthandler, sys
import torch
import afd_ops, harness

faulthandler.dump_traceback_later(55, exit=True)
rank, address = int(sys.argv[1]), sys.argv[2]
topology = afd_ops.Topology(1, 1, 5)
harness.DEVICE = f"cuda:{rank}"
bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=30)
sizes = {**harness.SIZES, "dtype": torch.bfloat16, "deadline": 10.0}
with harness.process_window(topology, bootstrap, sizes) as window:
    if window.role == "ffn":
        harness.serve(topology, window)
    for turn in range(30 if window.role == "attention" else 0):
        step = harness.random_step(topology, turn % 17, **sizes)
        out = harness.remote(window, turn)(*step)
        assert torch.equal(out, harness.expected(topology, *step)), turn
print("exact", torch.cuda.get_device_properties(harness.DEVICE).uuid)
"""

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@two_gpus
def test_permuted_visible_devices_reach_each_other() -> None:
    """fault: device numbers of the process and of the machine are confused, and peers map each other's wrong GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1"
    names = visible.split(",")[1::-1]
    address = f"127.0.0.1:{harness.free_port()}"
    outputs = run_scripts(
        PERMUTED, ("0", address), ("1", address), environment={"CUDA_VISIBLE_DEVICES": ",".join(names)}
    )
    used = [re.findall(r"^exact (\S+)$", output, re.MULTILINE) for output in outputs]
    mine = [str(torch.cuda.get_device_properties(index).uuid) for index in range(2)]
    assert used == [[mine[1]], [mine[0]]], (outputs, mine)


LOST = """
import faulthandler, os, signal, sys, time
import torch
import afd_ops, harness
from afd_ops.heap.nvshmem import NvshmemHeap

faulthandler.dump_traceback_later(85, exit=True)
rank, address, victim = int(sys.argv[1]), sys.argv[2], sys.argv[3]
LAST, DEADLINE = 9, 30.0  # layer of the step in which somebody dies; seconds
topology = afd_ops.Topology(1, 1, 5)
harness.DEVICE = f"cuda:{rank % torch.cuda.device_count()}"
bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=30)
heap = NvshmemHeap(bootstrap, harness.DEVICE)
window = afd_ops.Window(topology, bootstrap, heap=heap, **{**harness.SIZES, "deadline": DEADLINE})
begun = 0.0


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def named(act):
    try:
        act()
    except afd_ops.PeerFailedError as error:
        assert error.peer == 0 and "'s process ended without closing its window" in str(error), error
        print("named", error, f"{time.monotonic() - begun:.1f} s", flush=True)
    else:
        raise AssertionError("nobody was named")


def experts(rows, scales, offsets, layer):
    if layer == LAST:
        die()
    return harness.experts_of(topology, 0)(rows, scales, offsets, layer)


if window.role == "ffn":
    begun = time.monotonic()
    named(afd_ops.ExpertServer(window, experts).run)
else:
    for layer in (0, 1, 2, LAST):
        module, (x, ids, weights, base) = harness.remote(window, layer), harness.random_step(topology, 6)
        ids = ids.abs()
        want = harness.expected(topology, x, ids, weights, base)
        if layer == LAST and victim == "attention":
            time.sleep(0.3)  # the FFN rank waits in arrive
            die()
        begun = time.monotonic()
        out = module.combine(module.dispatch(x, ids, weights), base)
        torch.cuda.synchronize()
        if layer == LAST:
            assert time.monotonic() - begun < DEADLINE
            named(window.check)
            assert bool(out.isnan().all())
        else:
            window.check()
            assert torch.equal(out, want), layer
bootstrap.timeout = heap._end.timeout = 3.0
for together in (window.reset, heap.finalize):
    begun = time.monotonic()
    try:
        together()
    except afd_ops.BootstrapError as error:
        assert f"for rank {1 - rank} " in str(error) or rank == 1 and "lost the store" in str(error), error  # its host
        assert time.monotonic() - begun < 10.0
        print("refused", together.__name__, error, flush=True)
window.close()
print("closed", flush=True)
os._exit(0)  # NVSHMEM's memory ends with the process
"""


@pytest.mark.parametrize("victim", ["attention", "ffn"])
def test_a_killed_process_is_named_by_the_one_that_waits_for_it(victim: str) -> None:
    """kill -9 while the other waits in arrive, or in combine: a kernel that spins on a GPU of its own. What NVSHMEM
    could only do with all ranks is refused instead of waited for."""
    address, index = f"127.0.0.1:{harness.free_port()}", ("attention", "ffn").index(victim)
    outputs = run_scripts(LOST, ("0", address, victim), ("1", address, victim), seconds=90, killed=index)
    assert re.search(rf"^named rank {index} \({victim} 0\)", outputs[1 - index], re.MULTILINE), outputs
    assert re.findall(r"^refused (\w+)", outputs[1 - index], re.MULTILINE) == ["reset", "finalize"], outputs
    assert "closed" in outputs[1 - index].split(), outputs


def test_a_missing_nvshmem_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """faults: an ImportError from somewhere below; a library that is there and does not load."""
    from afd_ops.heap.nvshmem import NvshmemHeap

    real: Callable[..., Any] = importlib.import_module
    core: list[Any] = []

    def patched(name: str, *args: Any) -> Any:
        if name != "nvshmem.core":
            return real(name, *args)
        if core:
            return core[0]
        raise ModuleNotFoundError("No module named 'nvshmem'")

    monkeypatch.setattr(importlib, "import_module", patched)
    alone = afd_ops.Bootstrap(HashStore(), 0, 1, timeout=5)
    with pytest.raises(RuntimeError, match=r"needs nvshmem\.core.*No module named 'nvshmem'.*pip install nvshmem4py"):
        NvshmemHeap(alone, "cuda:0")

    def broken(empty: bool = False) -> Any:
        raise OSError("libnvshmem_host.so.3: cannot open shared object file")

    core.append(SimpleNamespace(get_unique_id=broken, init_status=lambda: 0))
    with pytest.raises(RuntimeError, match=r"NVSHMEM does not load.*cannot open shared object.*LD_LIBRARY_PATH"):
        NvshmemHeap(alone, "cuda:0")


class Deaf:
    """Peer memory that takes no store."""

    def __getitem__(self, _: Any) -> Deaf:
        return self

    def view(self, _: torch.dtype) -> Deaf:
        return self

    def fill_(self, _: int) -> Deaf:
        return self

    def zero_(self) -> Deaf:
        return self

    def item(self) -> int:
        return 0


def test_an_unreachable_peer_is_refused_by_name() -> None:
    """fault: stores that arrive nowhere, found out by a deadline."""
    from afd_ops.heap.nvshmem import NvshmemHeap

    def no_address(memory: Tensor, pe: int) -> Tensor:
        raise RuntimeError("nvshmem_ptr returned NULL")

    for peer_memory, says in (
        (no_address, r"PE 0 has no direct address for the memory of PE 1 .*NULL.*peer access"),
        (lambda memory, pe: Deaf(), r"PE 0 wrote \d+ to PE 1 and read back 0: peer access does not work"),
    ):
        heap = object.__new__(NvshmemHeap)
        heap.device, heap._segments = torch.device("cuda:0"), []
        heap.core = SimpleNamespace(
            tensor=lambda shape, dtype: torch.ones(shape, dtype=dtype, device="cuda:0"),
            my_pe=lambda: 0,
            get_peer_tensor=peer_memory,
        )
        segment = heap.allocate(4096)
        assert segment.peer("0") == segment.address
        with pytest.raises(RuntimeError, match=says):
            segment.peer("1")


def _joining(topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], turns: int) -> Any:
    import numpy
    import nvshmem.core as core
    from cuda.core import Device

    from afd_ops.heap.nvshmem import NvshmemHeap

    torch.cuda.set_device(harness.DEVICE)
    device = Device(torch.device(harness.DEVICE).index)
    device.set_current()
    unique = core.get_unique_id(empty=bootstrap.rank != 0)
    text = bootstrap.broadcast(base64.b64encode(unique._data.tobytes()).decode())
    unique._data.view(numpy.int8)[:] = numpy.frombuffer(base64.b64decode(text), dtype=numpy.int8)
    core.init(device=device, uid=unique, rank=bootstrap.rank, nranks=bootstrap.world_size, initializer_method="uid")
    engines_own = core.tensor((64,), dtype=torch.int32)
    engines_own.fill_(bootstrap.rank + 1)
    heap = NvshmemHeap(bootstrap, harness.DEVICE)
    with afd_ops.Window(topology, bootstrap, heap=heap, **sizes) as window:
        if window.role == "ffn":
            harness.serve(topology, window)
        for turn in range(turns if window.role == "attention" else 0):
            step = harness.random_step(topology, turn % 17, **sizes)
            assert torch.equal(harness.remote(window, turn)(*step), harness.expected(topology, *step)), turn
    heap.finalize()  # not its own: leaves everything as it is
    alive, kept = int(core.init_status()) >= 2, int(engines_own.sum().item())
    bootstrap.barrier()
    core.free_tensor(engines_own)
    core.finalize()
    return alive, kept


def test_a_window_joins_an_nvshmem_that_the_engine_began(seed: int) -> None:
    """fault: initialising NVSHMEM a second time, or ending it below the engine that still uses it."""
    results = harness.run_processes(
        afd_ops.Topology(1, 1, 5), _joining, 20, timeout=60, dtype=torch.bfloat16, deadline=10.0
    )
    assert results == [(True, 64 * 1), (True, 64 * 2)]


def _captured_steps(
    topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any], turns: int, count: int, seed: int
) -> Any:
    with harness.process_window(topology, bootstrap, sizes) as window:
        if window.role == "ffn":
            return harness.serve(topology, window)
        torch.manual_seed(seed + bootstrap.rank)
        module = harness.remote(window, 1)
        steps = [harness.random_step(topology, count, **sizes) for _ in range(turns)]
        want = [harness.expected(topology, *step) for step in steps]
        eager = [module(*step) for step in steps[:3]]
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out, expected in zip(eager, want[:3], strict=True))
        buffers, graph = [t.clone() for t in steps[0]], torch.cuda.CUDAGraph()
        with capturing(graph, torch.cuda.Stream(harness.DEVICE)):
            out = module.combine(module.dispatch(*buffers[:3]), buffers[3])
        wrong = []
        for turn, step in enumerate(steps):
            for buffer, fresh in zip(buffers, step, strict=True):
                buffer.copy_(fresh)
            graph.replay()
            torch.cuda.synchronize()
            window.check()
            if not torch.equal(out, want[turn]):
                wrong.append(turn)
        assert wrong == []
        return window.stats()


@two_gpus
@pytest.mark.parametrize(("attention", "ffn", "count", "turns"), [(1, 1, SPLIT, 40), (1, 1, FUSED, 60), (2, 2, 12, 20)])
def test_end_to_end_between_processes_eager_and_replayed(
    attention: int, ffn: int, count: int, turns: int, seed: int
) -> None:
    """The full round trip over NVSHMEM against the reference, the attention half captured and replayed on fresh tokens;
    with more ranks than GPUs, two processes share each."""
    topology = afd_ops.Topology(attention, ffn, 5)
    stats = harness.run_processes(
        topology, _captured_steps, turns, count, seed, timeout=60, tokens=128, dtype=torch.bfloat16, deadline=10.0
    )
    assert [s["dispatches"] for s in stats] == [turns + 3] * attention + [0] * ffn
    assert sum(s["replies"] for s in stats) == (turns + 3) * attention * ffn


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
