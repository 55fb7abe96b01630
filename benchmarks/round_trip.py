"""The round trip between two GPUs: ours, and the physical floor, in one run.

    python benchmarks/round_trip.py [--tokens 1,16,128] [--hidden 7168] [--paths ours,floor] [--out FILE] [--profile]

One attention rank and one FFN rank, a process and a GPU each, over an NVSHMEM window; top-8 of 32 experts, all on the
FFN rank. `ours` is the period of a free-running chain: both sides are captured graphs, the FFN side (arrive, receive,
an expert-specific scale of the first 64 columns, reply) is launched ahead of arrivals, no host in the loop, each
dispatch's input the output before. `drained` is one pair alone, host-synchronised before and after. Results are checked
before and after timing. `--profile` prints the kernels of both ranks.

`floor` = two puts of T rows + one write and one read of the expert-grouped rows at the measured copy rate.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import torch
import torch.multiprocessing as mp
import triton
import triton.language as tl
from torch import Tensor

import afd_ops
from afd_ops.heap.nvshmem import NvshmemHeap

EXPERTS, TOPK = 32, 8
COLUMNS = 64  # of a row that the experts change
PAIRS = 32  # per replay of the attention side
DROPPED, TRIALS, REPLAYS = 16, 5, 10


@triton.jit
def _scale_rows(rows, offsets, scale, hidden, experts: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    ends = tl.load(offsets + tl.arange(0, experts))
    if row < tl.max(ends):
        factor = tl.load(scale + tl.sum((ends <= row).to(tl.int32)))
        at = rows + row * hidden + tl.arange(0, columns)
        v = tl.load(at)
        tl.store(at, (v.to(tl.float32) * factor).to(v.dtype))


def scale_rows(rows: Tensor, offsets: Tensor, scale: Tensor) -> Tensor:
    """The first COLUMNS of row r times the scale of its expert, in place.

    Shows for every row which expert it met, and costs next to nothing beside the transport that is measured.
    """
    _scale_rows[(rows.shape[0],)](rows, offsets, scale, rows.shape[1], EXPERTS, COLUMNS, num_warps=1)
    return rows


class Floor:
    """SM-driven puts, compiled with nvcc."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        source = Path(__file__).parent / "floor.cu"
        nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
        command = [
            nvcc,
            "-O3",
            "-arch=sm_90",
            "-shared",
            "-Xcompiler",
            "-fPIC",
            str(source),
            "-o",
            str(folder / "floor.so"),
        ]
        subprocess.run(command, check=True)
        self.put = ctypes.CDLL(str(folder / "floor.so")).floor_put
        self.put.argtypes = (
            [ctypes.c_void_p] * 2 + [ctypes.c_int64] + [ctypes.c_void_p] * 2 + [ctypes.c_int, ctypes.c_void_p]
        )

    def microseconds(self, source: Tensor, peer: Tensor, nbytes: int) -> float:
        """Best over the CTA sweep, per put inside a replayed graph."""
        done = torch.zeros(1, dtype=torch.int32, device="cuda")
        flag = peer[-256:].view(torch.int32)

        def put(ctas: int) -> None:
            stream = torch.cuda.current_stream().cuda_stream
            assert (
                self.put(source.data_ptr(), peer.data_ptr(), nbytes, done.data_ptr(), flag.data_ptr(), ctas, stream)
                == 0
            )

        return min(graph_microseconds(lambda c=ctas: put(c), 20) for ctas in (4, 16, 32, 64, 132))


def graph_microseconds(call: Callable[[], object], count: int) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    graph.replay()
    times = []
    for _ in range(TRIALS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes read plus written per microsecond on one GPU: the best of the copy engine's node and of plain kernels.

    A slow copy would make the floor too high and every ratio too kind.
    """
    a = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    ways: tuple[Callable[[], object], ...] = (
        lambda: b.copy_(a),
        lambda: torch.neg(a, out=b),
        lambda: torch.neg(a.view(torch.int64), out=b.view(torch.int64)),
    )
    return 2 * a.numel() * a.element_size() / min(graph_microseconds(way, 5) for way in ways)


@contextmanager
def profiled(case: dict[str, Any], name: str) -> Iterator[None]:
    if not case["profile"]:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            mean = event.self_device_time_total / event.count
            print(f"  {name:9s} T={case['tokens']:5d} {mean:9.2f} us x {event.count:4d}  {event.key[:80]}", flush=True)


def inputs(tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1234)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).cuda()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(tokens)]).int().cuda()
    weights = torch.rand(tokens, TOPK, generator=generator)
    return x, ids, (weights / weights.sum(1, keepdim=True)).cuda()


def scales() -> Tensor:
    return torch.linspace(0.5, 1.5, EXPERTS, device="cuda")


def run_attention(window: afd_ops.Window, barrier: Callable[[], object], case: dict[str, Any]) -> dict[str, Any]:
    x, ids, weights = inputs(case["tokens"], case["hidden"], case["torch_dtype"])
    base = torch.zeros_like(x)
    experts = afd_ops.RemoteExperts(0).cuda().attach(window)
    factors = scales()[ids.long()]

    def chain(count: int) -> Tensor:
        y = x
        for _ in range(count):
            y = experts.combine(experts.dispatch(y, ids, weights), base)
        return y

    def check(y: Tensor, count: int) -> float:
        """Largest difference from `count` round trips in plain torch, rounded where ours are: 0 is expected."""
        expected = x
        for _ in range(count):
            total = torch.zeros_like(x, dtype=torch.float32)
            for k in range(TOPK):
                row = expected.clone()
                row[:, :COLUMNS] = (row[:, :COLUMNS].float() * factors[:, k : k + 1]).to(row.dtype)
                total += weights[:, k : k + 1] * row.float()
            expected = total.to(x.dtype)
        return float((y.float() - expected.float()).abs().max().item())

    error = check(chain(PAIRS), PAIRS)
    graph, single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(PAIRS)
    with torch.cuda.graph(single):
        one = chain(1)
    barrier()
    with profiled(case, "attention"):
        for _ in range(-(-DROPPED // PAIRS)):
            graph.replay()
        torch.cuda.synchronize()
    periods = []
    for _ in range(TRIALS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        periods.append(begin.elapsed_time(end) * 1e3 / (REPLAYS * PAIRS))
    error = max(error, check(y, PAIRS))
    drained = []
    for _ in range(64):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        single.replay()
        torch.cuda.synchronize()
        drained.append((time.perf_counter() - begin) * 1e6)
    error = max(error, check(one, 1))
    window.check()
    return {"period_us": statistics.median(periods), "drained_us": statistics.median(drained[16:]), "error": error}


def run_ffn(window: afd_ops.Window, barrier: Callable[[], object], case: dict[str, Any]) -> None:
    port, factor, rows = window.port(), scales(), case["tokens"] * TOPK

    def serve() -> None:
        item = torch.ops.afd.arrive(port, window.id)
        x, _, offsets = torch.ops.afd.receive(item, port, window.id, rows)
        torch.ops.afd.reply(scale_rows(x, offsets, factor), item, port, window.id)

    for _ in range(PAIRS):
        serve()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serve()
    barrier()
    with profiled(case, "ffn"):
        for _ in range(-(-DROPPED // PAIRS) * PAIRS):
            graph.replay()
        torch.cuda.synchronize()
    for _ in range(TRIALS * REPLAYS * PAIRS + 64):
        graph.replay()
    torch.cuda.synchronize()


def ours(rank: int, heap: NvshmemHeap, bootstrap: afd_ops.Bootstrap, case: dict[str, Any]) -> dict[str, Any]:
    topology = afd_ops.Topology(1, 1, EXPERTS)
    with afd_ops.Window(
        topology, bootstrap, heap=heap, hidden=case["hidden"], topk=TOPK, tokens=case["capacity"],
        dtype=case["torch_dtype"], deadline=20.0, poll_interval=20.0,
    ) as window, torch.inference_mode():  # fmt: skip
        if rank == 0:
            return run_attention(window, bootstrap.barrier, case)
        run_ffn(window, bootstrap.barrier, case)
        return {}


def worker(rank: int, address: str, args: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=60)
    heap = NvshmemHeap(bootstrap, f"cuda:{rank}")
    rows: list[dict[str, Any]] = []
    rate = 0.0
    if "floor" in args.paths:
        memory = heap.core.tensor((1 << 27,), dtype=torch.uint8)
        heap.keep(memory)
        peer = heap.core.get_peer_tensor(memory, 1 - rank)
        if rank == 0:
            put, rate = Floor(), copy_rate()
            source = torch.empty(1 << 27, dtype=torch.uint8, device="cuda").random_(0, 255)
        bootstrap.barrier()
    for tokens, hidden, capacity in args.cases:
        case: dict[str, Any] = {
            "tokens": tokens, "hidden": hidden, "dtype": "bfloat16", "torch_dtype": torch.bfloat16, "topk": TOPK,
            "capacity": capacity or tokens, "profile": args.profile,
        }  # fmt: skip
        found: dict[str, dict[str, Any]] = {}
        if "floor" in args.paths and rank == 0:
            one_way = put.microseconds(source, peer, tokens * hidden * 2)
            grouped = 2 * tokens * TOPK * hidden * 2 / rate
            found["floor"] = {"period_us": 2 * one_way + grouped, "drained_us": None, "error": None, "put_us": one_way}
        bootstrap.barrier()
        if "ours" in args.paths:
            found["ours"] = ours(rank, heap, bootstrap, case)
        bootstrap.barrier()
        if rank == 0:
            public = {k: v for k, v in case.items() if k not in ("torch_dtype", "profile")}
            rows += [{"path": path, **public, **figures} for path, figures in found.items()]
            line = "  ".join(f"{path} {f['period_us']:8.1f}" for path, f in found.items())
            extra = found.get("ours", {})
            print(
                f"T={tokens:5d} H={hidden} cap={case['capacity']:5d}  {line}  drained {extra.get('drained_us', 0):7.1f}"
                f"  error {extra.get('error', 0):.1e}",
                flush=True,
            )
    if rank == 0:
        common.write(args.out, rows, versions={"cuda": str(torch.version.cuda)}, copy_bytes_per_us=rate)
    bootstrap.barrier()
    heap.finalize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", default="1,16,128,1024,4096")
    parser.add_argument("--hidden", default="7168")
    parser.add_argument("--capacity", type=int, default=0, help="tokens of the window; as many as are sent if left out")
    parser.add_argument("--paths", default="floor,ours")
    parser.add_argument("--profile", action="store_true", help="print the kernels of both ranks")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "round_trip.2xH200.json")
    args = parser.parse_args()
    args.paths = args.paths.split(",")
    args.cases = [(int(t), int(h), args.capacity) for h in args.hidden.split(",") for t in args.tokens.split(",")]
    os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
    mp.spawn(worker, args=(f"127.0.0.1:{29533 + os.getpid() % 1000}", args), nprocs=2)


if __name__ == "__main__":
    main()
