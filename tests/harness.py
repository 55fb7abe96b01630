"""Ranks for tests: expert-specific experts, a cluster inside this process, a cluster of processes."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import afd_ops
from afd_ops import _C
from afd_ops.captured import device_memory
from afd_ops.layout import PAYLOAD_DTYPES, WIDE_DTYPES
from afd_ops.reference import round_trip

ROOT = Path(__file__).parent.parent

# Where windows lie and steps are made: set by the `device` fixture for tests that run on every device.
DEVICE = "cpu"

# Small integers: every product and sum below is exact in float32, bfloat16 and float16, in any order.
SIZES: dict[str, Any] = dict(hidden=16, topk=2, tokens=16, dtype=torch.float32, deadline=20.0, poll_interval=0.002)


SLEEP_CYCLES = 200_000_000  # of a GPU: about a tenth of a second


def host_reads() -> bool:
    """Whether an op looks into its tensors (ids, ports, tickets, items) before it acts, and raises.

    An op that can be captured in a graph cannot: what is wrong with their content is found by its kernel, which records
    it. `check()` raises it, and combine's output is NaN.
    """
    return not afd_ops.LocalHeap(DEVICE).capturable


def expert(index: int, row: Tensor) -> Tensor:
    """What logical expert `index` does: no two experts agree, so a row sent to the wrong one shows."""
    return row * (index % 3 + 1) + index


def experts_of(topology: afd_ops.Topology, ffn_rank: int) -> afd_ops.Experts:
    owned = topology.experts_of(ffn_rank)

    def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        if rows.dtype == torch.float8_e4m3fn:
            rows = afd_ops.dequantize(rows, scales)
        out, begin = torch.full_like(rows, float("nan")), 0
        for index, end in zip(owned, offsets.tolist(), strict=True):
            out[begin:end] = expert(index, rows[begin:end])
            begin = end
        return out

    return experts


def random_step(
    topology: afd_ops.Topology,
    count: int,
    *,
    hidden: int = 16,
    topk: int = 2,
    dtype: torch.dtype = torch.float32,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`count` tokens: x, topk_ids (some -1, some twice in a row), topk_weights, base: small integers.

    x and base are of the wide dtype of `dtype`, a window's. For float8_e4m3fn the blocks of x have different scales;
    what dequantising gives is no integer, but has few enough bits for exact sums.
    """
    x = torch.randint(-3, 4, (count, hidden))
    if dtype == torch.float8_e4m3fn:
        x *= 2 ** torch.randint(0, 4, (count, hidden // _C.SCALE_BLOCK)).repeat_interleave(_C.SCALE_BLOCK, dim=1)
    dtype = WIDE_DTYPES[PAYLOAD_DTYPES.index(dtype)]
    return (
        x.to(DEVICE, dtype),
        torch.randint(-1, topology.num_experts, (count, topk)).to(DEVICE),
        torch.randint(0, 3, (count, topk)).to(DEVICE, torch.float32),
        torch.randint(-3, 4, (count, hidden)).to(DEVICE, dtype),
    )


def expected(
    topology: afd_ops.Topology,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    base: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`dtype` is the window's, if it is not that of x."""
    return round_trip(x.cpu(), ids.cpu(), weights.cpu(), base.cpu(), topology, expert, dtype).to(base.device)


def remote(window: afd_ops.Window, layer: int = 0, stage: int = 0) -> afd_ops.RemoteExperts:
    return afd_ops.RemoteExperts(layer, stage).to(window.heap.device).attach(window)


def synchronize() -> None:
    """Every op called so far has ended: what was dispatched has arrived."""
    for index in range(torch.cuda.device_count() if DEVICE != "cpu" else 0):
        torch.cuda.synchronize(index)


def devices(topology: afd_ops.Topology) -> str | list[str]:
    """On GPUs the FFN ranks have the second one, if there is one."""
    if DEVICE == "cpu":
        return DEVICE
    ffn = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    return [DEVICE] * topology.attention_size + [ffn] * topology.ffn_size


def memory(device: torch.device, address: int, nbytes: int) -> Tensor:
    """Memory of a window, wherever it lies, as uint8."""
    if device.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)
    return device_memory(address, nbytes, device)


def word(window: afd_ops.Window, offset: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """One word of a window, [1], at a byte offset: to be read or overwritten as a peer could."""
    synchronize()
    return memory(window.heap.device, _C.addresses(window.id)["window"] + offset, dtype.itemsize).view(dtype)


# Byte offsets in a slot, csrc/wire.h's; written again, so that tests see them change.
HEADER = dict(magic=0, version=4, generation=8, layer=12, num_tokens=16, flags=20, sequence=24, routed=32, counts=40)


def poke(window: afd_ops.Window, slot: int, field: str, value: int, index: int = 0) -> int:
    """Overwrites a word of a slot, as a peer could; returns what was there."""
    layout = window.geometry.layout
    within = {**layout, **HEADER}[field] + 4 * index
    at = layout["slots"] + slot * layout["slot_bytes"] + within
    cell = word(window, at, torch.int64 if field == "sequence" else torch.int32)
    before = int(cell)
    cell.fill_(value)
    synchronize()
    return before


def slots_of(window: afd_ops.Window) -> Tensor:
    """A window's slots as they lie in memory: uint8 [slots, slot_bytes]."""
    layout, count = window.geometry.layout, _C.facts(window.id)["slots"]
    address = _C.addresses(window.id)["window"] + layout["slots"]
    return memory(window.heap.device, address, count * layout["slot_bytes"]).view(count, layout["slot_bytes"])


def fill_with_nan(window: afd_ops.Window) -> None:
    """Every field of every slot but the header: what is read without having been written shows."""
    slots_of(window)[:, window.geometry.layout["position"] :] = 0xFF
    if window.heap.device.type == "cuda":
        torch.cuda.synchronize(window.heap.device)  # of a process that shares a host with others: no other device


def together(*actions: Callable[[], Any]) -> list[Any]:
    """Each action in a thread of its own: what it returned, or the exception that ended it."""
    outcomes: list[Any] = [TimeoutError("still running")] * len(actions)

    def run(index: int) -> None:
        try:
            outcomes[index] = actions[index]()
        except BaseException as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(actions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return outcomes


def reset(windows: Sequence[afd_ops.Window]) -> None:
    """Window.reset() is collective."""
    assert together(*(window.reset for window in windows)) == [None] * len(windows)


def settle(window: afd_ops.Window) -> None:
    """After an op: raises what only its kernel found, where a CPU window's op has raised it itself."""
    if not host_reads():
        synchronize()
        window.check()


def take(server: afd_ops.ExpertServer) -> tuple[Tensor, int, int]:
    """The next item of a server, its layer and its rows; the caller answers it."""
    item = torch.ops.afd.arrive(server.port, server.window.id)
    count, layer, rows, _ = server._read(item, server.window.generation)
    assert count > 0, "nothing has arrived"
    return item, layer, rows


@contextmanager
def windows(topology: afd_ops.Topology, **sizes: Any) -> Iterator[list[afd_ops.Window]]:
    """The windows of all ranks in this process, NaN-filled, closed at the end."""
    load_kernels(DEVICE)
    opened = afd_ops.open_local(topology, devices=devices(topology), **{**SIZES, **sizes})
    for window in opened:
        fill_with_nan(window)
    try:
        yield opened
    finally:
        for window in opened:
            window.close()


@cache
def load_kernels(device: str) -> None:
    """Runs the experts of tests once on every GPU: a kernel's first launch behind one that waits is a deadlock."""
    if device == "cpu":
        return
    topology = afd_ops.Topology(1, 1, 3)
    for index in range(torch.cuda.device_count()):
        offsets = torch.tensor([1, 3, 6], dtype=torch.int32, device=f"cuda:{index}")
        for dtype in afd_ops.layout.PAYLOAD_DTYPES:
            rows = torch.ones(6, 128, device=offsets.device).to(dtype)
            experts_of(topology, 0)(rows, torch.ones(6, 1, device=offsets.device), offsets, 0)
    synchronize()


def independent_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream of a GPU whose kernels never queue behind those of its current stream.

    A process has few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8). Two streams that share one wait for each other
    whenever its head waits: with an attention and an FFN rank on one GPU that would be a deadlock until the deadline.
    """
    with torch.cuda.device(device):
        beside = torch.cuda.current_stream()
        here, there = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
        torch.cuda._sleep(1)  # loads the kernels of the probe
        here.add_(1)
        torch.cuda.synchronize()
        for _ in range(16):
            candidate = torch.cuda.Stream()
            torch.cuda._sleep(SLEEP_CYCLES)
            here.add_(1)  # is the head of its queue until the sleep is over
            blocked = beside.record_event()
            with torch.cuda.stream(candidate):
                there.add_(1)
                passed = candidate.record_event()
            until = time.monotonic() + 0.05
            while not passed.query() and time.monotonic() < until:
                time.sleep(0.001)
            independent = passed.query() and not blocked.query()
            torch.cuda.synchronize()
            if independent:
                return candidate
    raise AssertionError("no stream has a hardware queue of its own")


def server_stream(window: afd_ops.Window) -> torch.cuda.Stream | None:
    """Where an FFN rank's server may run beside the attention ranks of this process; None on CPU."""
    device = window.heap.device
    if device.type == "cpu":
        return None
    return independent_stream(device) if device == torch.device(DEVICE) else torch.cuda.Stream(device)


def run_on(stream: torch.cuda.Stream | None, server: afd_ops.ExpertServer) -> None:
    with torch.cuda.stream(stream) if stream else nullcontext():
        server.run()


def runner(server: afd_ops.ExpertServer) -> Callable[[], None]:
    """server.run() on a stream of its own, for another thread; made while nothing waits."""
    return partial(run_on, server_stream(server.window), server)


@contextmanager
def answering(
    servers: Sequence[afd_ops.ExpertServer], streams: Sequence[torch.cuda.Stream | None] | None = None
) -> Iterator[None]:
    """A thread per server, on a stream of its own. An error that ends one fails the test at the end.

    Whoever gives no streams has not seen to it that all kernels are loaded and all memory is there: on a GPU that
    attention ranks share, that could wait for a combine that waits for the answer.
    """
    if streams is None:
        if any(server.window.heap.device == torch.device(DEVICE) for server in servers) and not host_reads():
            pytest.skip("needs two CUDA devices")
        streams = [server_stream(server.window) for server in servers]
    failures: list[BaseException] = []

    def serve(server: afd_ops.ExpertServer, stream: torch.cuda.Stream | None) -> None:
        try:
            run_on(stream, server)
        except (afd_ops.ClosedError, afd_ops.AbortedError):
            pass
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=pair, daemon=True) for pair in zip(servers, streams, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for server in servers:
            server.stop()
        for thread in threads:
            thread.join(30)
    if failures:
        raise failures[0]


@contextmanager
def serving(
    topology: afd_ops.Topology,
    make_experts: Callable[[afd_ops.Topology, int], afd_ops.Experts] = experts_of,
    **sizes: Any,
) -> Iterator[list[afd_ops.Window]]:
    """The attention ranks' windows, with every FFN rank served by a thread of its own."""
    with windows(topology, **sizes) as opened:
        servers = [
            afd_ops.ExpertServer(w, make_experts(topology, w.role_rank)) for w in opened[topology.attention_size :]
        ]
        with answering(servers):
            yield opened[: topology.attention_size]


def _child(
    body: Callable[..., Any],
    rank: int,
    address: str,
    topology: afd_ops.Topology,
    args: tuple[Any, ...],
    sizes: dict[str, Any],
    results: Any,
    timeout: float,
    device: str,
) -> None:
    global DEVICE
    DEVICE = device if device == "cpu" else f"cuda:{rank * torch.cuda.device_count() // topology.world_size}"
    faulthandler.dump_traceback_later(timeout + 10, exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)
    try:
        bootstrap = afd_ops.Bootstrap.connect(address, rank, topology.world_size, timeout=20)
        results.put((rank, body(topology, bootstrap, {**SIZES, **sizes}, *args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_processes(
    topology: afd_ops.Topology, body: Callable[..., Any], *args: Any, timeout: float = 90.0, **sizes: Any
) -> list[Any]:
    """body(topology, bootstrap, sizes, *args) in a process per rank; its results by world rank.

    The processes fork from a server that has torch and afd_ops loaded; a rank that raises fails the test with its
    traceback, one that is late is killed by its process id.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "afd_ops", "harness"])
    results = context.SimpleQueue()
    address = f"127.0.0.1:{free_port()}"
    children = [
        context.Process(
            target=_child, args=(body, rank, address, topology, args, sizes, results, timeout, DEVICE), daemon=True
        )
        for rank in range(topology.world_size)
    ]
    for child in children:
        child.start()
    deadline = time.monotonic() + timeout
    collected: dict[int, Any] = {}
    failed: list[str] = []
    try:
        while len(collected) + len(failed) < len(children):
            if not results.empty():
                rank, value, error = results.get()
                if error:
                    failed.append(f"rank {rank}:\n{error}")
                else:
                    collected[rank] = value
            elif dead := [r for r, c in enumerate(children) if c.exitcode is not None and r not in collected]:
                time.sleep(0.1)  # its result may be on the way
                if results.empty() and len(collected) + len(failed) < len(children):
                    raise RuntimeError(f"ranks {dead} ended without a result\n" + "\n".join(failed))
            elif time.monotonic() > deadline:
                missing = sorted(set(range(len(children))) - set(collected))
                raise TimeoutError(f"ranks {missing} gave no result within {timeout} s\n" + "\n".join(failed))
            else:
                time.sleep(0.002)
    finally:
        for child in children:
            child.join(max(0.1, min(5.0, deadline - time.monotonic())))
            if child.is_alive():
                child.kill()
    if failed:
        raise AssertionError("\n".join(failed))
    return [collected[rank] for rank in range(len(children))]


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def process_window(
    topology: afd_ops.Topology, bootstrap: afd_ops.Bootstrap, sizes: dict[str, Any]
) -> Iterator[afd_ops.Window]:
    """This process's window, NaN-filled: over shared memory, or over NVSHMEM on DEVICE."""
    heap = None
    if DEVICE != "cpu":
        from afd_ops.heap.nvshmem import NvshmemHeap

        torch.cuda.set_device(DEVICE)
        heap = NvshmemHeap(bootstrap, DEVICE)
    with afd_ops.Window(topology, bootstrap, heap=heap, **sizes) as window:
        fill_with_nan(window)
        bootstrap.barrier()
        yield window
    if heap is not None:
        heap.finalize()


def serve(topology: afd_ops.Topology, window: afd_ops.Window) -> dict[str, Any]:
    """The FFN rank's half of a multi-process test."""
    afd_ops.ExpertServer(window, experts_of(topology, window.role_rank)).run()
    return window.stats()


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
