"""Ranks for tests: expert-specific experts, a cluster inside this process, a cluster of processes."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

import afd_ops
from afd_ops import _C
from afd_ops.layout import PAYLOAD_DTYPES, WIDE_DTYPES
from afd_ops.reference import round_trip

# Where windows lie and steps are made: set by the `device` fixture for tests that run on every device.
DEVICE = "cpu"

# Small integers: every product and sum below is exact in float32, bfloat16 and float16, in any order.
SIZES: dict[str, Any] = dict(hidden=16, topk=2, tokens=16, dtype=torch.float32, deadline=20.0, poll_interval=0.002)


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
    """What was dispatched has arrived."""
    for index in range(torch.cuda.device_count() if DEVICE != "cpu" else 0):
        torch.cuda.synchronize(index)


def devices(topology: afd_ops.Topology) -> str | list[str]:
    """On GPUs the FFN ranks have the second one, if there is one."""
    if DEVICE == "cpu":
        return DEVICE
    ffn = "cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"
    return [DEVICE] * topology.attention_size + [ffn] * topology.ffn_size


def fill_with_nan(window: afd_ops.Window) -> None:
    """Every field of every slot but the header: what is read without having been written shows."""
    layout, address = window.geometry.layout, _C.addresses(window.id)["window"]
    if window.heap.device.type == "cuda":
        size = window.geometry.window_bytes(len(window.topology.peers(window.bootstrap.rank))) - layout["slots"]
        slots = device_bytes(window.heap.device, address + layout["slots"], size).view(-1, layout["slot_bytes"])
        slots[:, layout["position"] :] = 0xFF
        torch.cuda.synchronize(window.heap.device)
        return
    for slot in range(_C.facts(window.id)["slots"]):
        start = address + layout["slots"] + slot * layout["slot_bytes"] + layout["position"]
        ctypes.memset(start, 0xFF, layout["slot_bytes"] - layout["position"])


def device_bytes(device: torch.device, address: int, nbytes: int) -> Tensor:
    """Device memory as uint8, by the array interface."""

    class Memory:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)


@contextmanager
def windows(topology: afd_ops.Topology, **sizes: Any) -> Iterator[list[afd_ops.Window]]:
    """The windows of all ranks in this process, NaN-filled, closed at the end."""
    opened = afd_ops.open_local(topology, devices=devices(topology), **{**SIZES, **sizes})
    for window in opened:
        fill_with_nan(window)
    try:
        yield opened
    finally:
        for window in opened:
            window.close()


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
        failures: list[BaseException] = []

        def serve(server: afd_ops.ExpertServer) -> None:
            device = server.window.heap.device
            stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
            try:
                with stream:
                    server.run()
            except (afd_ops.ClosedError, afd_ops.AbortedError):
                pass
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=serve, args=(server,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        try:
            yield opened[: topology.attention_size]
        finally:
            for server in servers:
                server.stop()
            for thread in threads:
                thread.join(30)
        if failures:
            raise failures[0]


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
