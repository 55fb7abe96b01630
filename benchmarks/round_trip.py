"""The round trip between two GPUs beside what it should be measured by, all in one run.

    python benchmarks/round_trip.py [--quick | --full | --tokens 1,128 ...] [--repeat 3] [--paths ours,floor]

ours     the period of a free-running chain: an attention rank and an FFN rank, a process and a GPU each, over an
         NVSHMEM window. Both sides are captured graphs, the FFN side (arrive, receive, experts, reply) launched ahead
         of arrivals, no host in the loop, each dispatch's input the output before. The experts scale the first 64
         columns of a row, no two alike: there is no GEMM in any path. `drained` is one pair alone, the host's launch
         and wait included.
floor    two puts of T rows + one write and one read of the expert-grouped rows at the measured copy rate. Where it is
         more than a tenth above what these GPUs are known to do the run is void.
stock    the same job composed of stock tensor ops (stock_ops.py).
nccl     send and receive of the bare activations (bare_nccl.py).
fan_in   1 to 4 attention ranks onto one FFN rank, the worst rank's period (fan_in.py).
kernels  the kernels of the round trip, each alone (kernels.py): what a quantised payload does to dispatch.

Results are compared before and after timing with the same in plain torch, rounded where ours are: `error` is the
largest difference, 0 if all is well; stock sums in bf16, its error is relative. Of the runs of --repeat, each in fresh
processes, all are recorded, and of each size the one with our longest period is reported.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import bare_nccl
import common
import fan_in
import floor
import kernels
import stock_ops
import torch
import torch.multiprocessing as mp
import workload
from torch import Tensor
from workload import Case

import afd_ops
from afd_ops.heap.nvshmem import NvshmemHeap

PATHS = ("floor", "ours", "stock", "nccl", "fan_in", "kernels")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PAIRS = 32  # per replay of either side
STOCK_TOKENS = (1, 16, 128, 1024, 4096)
QUICK = [
    *(Case(t) for t in STOCK_TOKENS),
    *(Case(t, hidden=4096) for t in (128, 4096)),
    *(Case(t, topk=6) for t in (128, 4096)),
    *(Case(t, dtype=FP8) for t in (1, 128, 1024, 4096)),
    *(Case(1, capacity=c) for c in (128, 8192)),
]
FULL = [
    *(
        Case(t, hidden, dtype, topk)
        for hidden, dtype, topk, t in itertools.product(
            (7168, 4096), (BF16, FP8), (8, 6), (1, 16, 64, 128, 512, 1024, 4096, 8192)
        )
    ),
    *(Case(1, capacity=c) for c in (128, 8192)),
]
FAN_IN = {"quick": (1, 128), "full": (1, 16, 128, 1024)}
KERNELS = {"quick": (1, 1024, 4096), "full": (1, 16, 128, 1024, 4096)}
NOT_MEASURED = {"drained_us": None, "error": None}
LIMIT = {"quick": 120.0, "full": 240.0}  # seconds of a process that hangs


def replays(tokens: int) -> int:
    return max(1, min(10, 1280 // tokens))


def is_plain(case: Case) -> bool:
    """The yardsticks know bf16 and a window as large as its batch; NCCL does not know topk."""
    return case.dtype == BF16 and case.topk == 8 and case.capacity in (0, case.tokens)


@contextmanager
def profiled(on: bool, name: str, tokens: int) -> Iterator[None]:
    if not on:
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yield
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            mean = event.self_device_time_total / event.count
            print(f"  {name:9s} T={tokens:5d} {mean:9.2f} us x {event.count:4d}  {event.key[:80]}", flush=True)


def run_attention(
    window: afd_ops.Window, barrier: Callable[[], object], case: Case, *, profile: bool
) -> dict[str, Any]:
    x, ids, weights = workload.inputs(case)
    base, factors = torch.zeros_like(x), workload.factors()
    experts = afd_ops.RemoteExperts(0).cuda().attach(window)

    def chain(count: int) -> Tensor:
        y = x
        for _ in range(count):
            y = experts.combine(experts.dispatch(y, ids, weights), base)
        return y

    def want(count: int, whole: bool) -> Tensor:
        return workload.expected(case, x, ids, weights, count, factors=factors, whole=whole)

    error = workload.difference(chain(PAIRS), want(PAIRS, True))
    graph, single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(PAIRS)
    with torch.cuda.graph(single):
        one = chain(1)
    barrier()
    with profiled(profile, "attention", case.tokens):
        graph.replay()
        torch.cuda.synchronize()
    period = common.period_us(graph.replay, PAIRS, replays(case.tokens))
    error = max(error, workload.difference(y, want(PAIRS, False)))
    drained = common.drained_us(single.replay)
    error = max(error, workload.difference(one, want(1, False)))
    window.check()
    return {"period_us": period, "drained_us": drained, "error": error}


def run_ffn(window: afd_ops.Window, barrier: Callable[[], object], case: Case, *, profile: bool) -> None:
    port, rows = window.port(), case.tokens * case.topk
    experts = workload.Experts(case, rows)

    def serve(apply: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        item = torch.ops.afd.arrive(port, window.id)
        received = torch.ops.afd.receive(item, port, window.id, rows)
        torch.ops.afd.reply(apply(*received), item, port, window.id)

    for _ in range(PAIRS):
        serve(experts.whole)
    torch.cuda.synchronize()
    graph, single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(PAIRS):
            serve(experts)
    with torch.cuda.graph(single):
        serve(experts)
    barrier()
    with profiled(profile, "ffn", case.tokens):
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(common.TRIALS * replays(case.tokens)):
        graph.replay()
    for _ in range(common.DRAINED):
        single.replay()
    torch.cuda.synchronize()


def ours(rank: int, heap: NvshmemHeap, bootstrap: afd_ops.Bootstrap, case: Case, *, profile: bool) -> dict[str, Any]:
    topology = afd_ops.Topology(1, 1, workload.EXPERTS)
    with (
        afd_ops.Window(topology, bootstrap, heap=heap, deadline=20.0, poll_interval=20.0, **case.window) as window,
        torch.inference_mode(),
    ):
        if rank == 0:
            return run_attention(window, bootstrap.barrier, case, profile=profile)
        run_ffn(window, bootstrap.barrier, case, profile=profile)
        return {}


class Results:
    """What a process found, on disk after every figure: a later failure costs only what comes after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun = time.monotonic()
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}

    def add(self, path: str, case: Case, figures: dict[str, Any]) -> None:
        row = {"path": path, **case.row, "attention_ranks": 1, **figures}
        self.content["rows"].append(row)
        self.save()
        took = f"{time.monotonic() - self.begun:6.1f} s"
        print(f"{took}  {label(row)}  {path:5s} {row['period_us']:9.1f} us  error {row['error']}", flush=True)

    def save(self) -> None:
        self.path.write_text(json.dumps(self.content))


def watchdog(args: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(LIMIT[args.set], exit=True)


def pair(rank: int, address: str, library: Path, args: argparse.Namespace, path: Path) -> None:
    watchdog(args)
    torch.cuda.set_device(rank)
    bootstrap = afd_ops.Bootstrap.connect(address, rank, 2, timeout=LIMIT[args.set])
    heap = NvshmemHeap(bootstrap, f"cuda:{rank}")
    results = Results(path)
    lower: floor.Floor | None = None
    if "floor" in args.paths:
        most = max(case.tokens * case.hidden * case.wide.itemsize for case in args.cases)
        most = max(most, max(floor.KNOWN_PUTS) * 7168 * 2)
        memory = heap.core.tensor((most + 512,), dtype=torch.uint8)
        heap.keep(memory)
        peer = heap.core.get_peer_tensor(memory, 1 - rank)
        if rank == 0:
            lower = floor.Floor(library, peer)
            results.content["copy_bytes_per_us"] = lower.bytes_per_us
            results.content["void"] = lower.void()
        bootstrap.barrier()
    for case in args.cases:
        if lower:
            put = lower.put_us(case.tokens * case.hidden * case.dtype.itemsize)
            results.add("floor", case, {"period_us": lower.round_trip_us(case), **NOT_MEASURED, "put_us": put})
        bootstrap.barrier()
        if "ours" in args.paths:
            figures = ours(rank, heap, bootstrap, case, profile=args.profile)
            if rank == 0:
                results.add("ours", case, figures)
            bootstrap.barrier()
        if "stock" in args.paths and is_plain(case) and case.tokens in STOCK_TOKENS:
            figures = stock_ops.round_trip(rank, heap, bootstrap.barrier, case, max(5, min(40, 5120 // case.tokens)))
            if rank == 0:
                results.add("stock", case, figures)
            bootstrap.barrier()
    if "nccl" in args.paths and any(map(is_plain, args.cases)):
        bare_nccl.start(rank, bootstrap.store)
        for case in filter(is_plain, args.cases):
            figures = bare_nccl.round_trip(rank, bootstrap.barrier, case, PAIRS, replays(case.tokens))
            if rank == 0:
                results.add("nccl", case, figures)
        bootstrap.barrier()
        bare_nccl.end()
    bootstrap.barrier()
    heap.finalize()


def alone(_: int, args: argparse.Namespace, path: Path) -> None:
    """What runs in one process that has both GPUs."""
    watchdog(args)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"
    results = Results(path)
    if "fan_in" in args.paths:
        for tokens, ranks in itertools.product(FAN_IN[args.set], range(1, 5)):
            case = Case(tokens)
            results.add("ours", case, fan_in.measure(case, ranks, PAIRS, replays(tokens)))
    if "kernels" in args.paths:
        results.content["kernels"] = []
        for tokens, dtype in itertools.product(KERNELS[args.set], (BF16, FP8)):
            case = Case(tokens, dtype=dtype)
            times = kernels.kernels(tokens, case.hidden, dtype, count=64 if tokens <= 1024 else 16)
            results.content["kernels"].append(case.row | {f"{name}_us": us for name, us in times.items()})
            results.save()


def one_run(library: Path, args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Both kinds of process, fresh; forked, since nothing here has touched a GPU, and importing torch takes seconds."""
    begun = time.monotonic()
    failures = []
    starts: list[tuple[Any, int, tuple[Any, ...]]] = []
    if {"floor", "ours", "stock", "nccl"} & args.paths:
        starts.append((pair, 2, (common.free_address(), library, args, path)))
    if {"fan_in", "kernels"} & args.paths:
        starts.append((alone, 1, (args, path)))
    for function, count, arguments in starts:
        try:
            mp.start_processes(function, args=arguments, nprocs=count, start_method="fork")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            failures.append(f"{function.__name__}: {error}")
            print(failures[-1], flush=True)
    found = Results(path).content
    return found | {"failures": failures, "seconds": round(time.monotonic() - begun, 1)}


# What came out.


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    columns = ("hidden", "dtype", "topk", "tokens", "capacity", "attention_ranks", "heap")
    return tuple(row.get(column) for column in columns)


def label(row: dict[str, Any]) -> str:
    found = f"T={row['tokens']:5d} H={row['hidden']} {row['dtype']:13s} top-{row['topk']} cap={row['capacity']:5d}"
    return found + f" {row['attention_ranks']}A1F"


def by_size(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, dict[str, Any]]]:
    """Rows by path by size."""
    found: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(key_of(row), {})[row["path"]] = row
    return found


def worst(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every size the rows of the run with our longest period; void runs count only if there are no others."""
    valid = [run for run in runs if not run.get("void")] or runs
    sizes = [by_size(run["rows"]) for run in valid]
    rows = []
    for key in dict.fromkeys(key for size in sizes for key in size):
        found = [size[key] for size in sizes if key in size]
        rows += max(found, key=lambda paths: paths.get("ours", {}).get("period_us", 0.0)).values()
    return rows


Judgement = tuple[str, float, float]
"""A target: what is compared, the figure, and the most it may be."""


def targets(paths: dict[str, dict[str, Any]], sizes: dict[tuple[Any, ...], Any]) -> list[Judgement]:
    """Of one size. Set for bf16, top-8, one attention rank over NVSHMEM."""
    row = paths.get("ours")
    if row is None or (row["dtype"], row["topk"], row.get("heap")) != ("bfloat16", 8, None):
        return []
    tokens, period = row["tokens"], row["period_us"]
    if row["capacity"] != tokens:
        small = sizes.get(key_of(row | {"capacity": 128}), {}).get("ours")
        return [("capacity 128", period / small["period_us"], 1.05)] if small and row["capacity"] == 8192 else []
    found: list[Judgement] = []
    if row["hidden"] == 7168 and tokens in (1, 16):
        found.append(("us", period, {1: 16.0, 16: 20.0}[tokens]))
    if tokens in (128, 1024, 4096) and "floor" in paths:
        found.append(("floor", period / paths["floor"]["period_us"], 1.3 if tokens == 128 else 1.25))
    if tokens in (1, 16, 128) and "nccl" in paths:
        found.append(("nccl", period / paths["nccl"]["period_us"], 1.0))
    if (tokens <= 128 or tokens == 4096) and "stock" in paths:
        found.append(("stock", period / paths["stock"]["period_us"], 1 / 12 if tokens <= 128 else 1 / 5))
    return found


def verdict(judgement: Judgement) -> str:
    what, figure, most = judgement
    met = "met" if figure <= most else "MISSED"
    if what == "us":
        return f"<= {most:g} us {met}"
    if what == "stock":
        return f"stock >= {1 / most:g} x {met}"
    return f"<= {most:g} x {what} {met}"


def print_table(rows: list[dict[str, Any]]) -> None:
    sizes = by_size(rows)
    widths = {"T": 5, "hidden": 6, "dtype": 13, "topk": 4, "cap": 5, "A": 2, "ours us": 8, "drained": 8, "floor": 8}
    widths |= {"x floor": 7, "nccl": 8, "x nccl": 6, "stock": 8, "stock x": 7, "error": 8}
    print("\n" + " ".join(f"{head:>{width}}" for head, width in widths.items()) + "  targets")
    for paths in sizes.values():
        row = next(iter(paths.values()))
        period = {path: found["period_us"] for path, found in paths.items()}
        mine, drained = period.get("ours"), paths.get("ours", {}).get("drained_us")
        cells = [cell(mine, 8), cell(drained, 8)]
        for path, width in (("floor", 7), ("nccl", 6)):
            other = period.get(path)
            cells += [cell(other, 8), cell(mine / other if mine and other else None, width, 2)]
        other = period.get("stock")
        cells += [cell(other, 8), cell(other / mine if mine and other else None, 7)]
        error = paths.get("ours", {}).get("error")
        said = [verdict(judgement) for judgement in targets(paths, sizes)]
        if row.get("heap") == "local":
            said = [f"one process, {row['slots_per_item']} slots an item"]
        print(
            f"{row['tokens']:5d} {row['hidden']:6d} {row['dtype']:>13s} {row['topk']:4d} {row['capacity']:5d} "
            f"{row['attention_ranks']:2d} {' '.join(cells)} {'-' if error is None else f'{error:.1e}':>8}  "
            f"{'; '.join(said) or '-'}"
        )


def cell(value: float | None, width: int, digits: int = 1) -> str:
    return f"{'-' if value is None else format(value, f'.{digits}f'):>{width}}"


def print_kernels(rows: list[dict[str, Any]]) -> None:
    """The dispatch kernel alone, by payload."""
    times = {(row["tokens"], row["dtype"]): row["dispatch_us"] for row in rows if "dispatch_us" in row}
    for tokens in dict.fromkeys(tokens for tokens, _ in times):
        wide, narrow = times.get((tokens, workload.name(BF16))), times.get((tokens, workload.name(FP8)))
        if wide and narrow:
            most = 0.65 if tokens >= 1024 else 1.0 if tokens == 1 else None
            said = f"  {verdict(('bf16', narrow / wide, most))}" if most else ""
            print(f"dispatch kernel, T={tokens:5d}: bf16 {wide:.1f} us, fp8 {narrow:.1f}, {narrow / wide:.2f} x{said}")


def worst_kernels(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every size the row of the run with the longest dispatch."""
    rows = [row for run in runs for row in run.get("kernels", ())]
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.get("dispatch_us", 0.0)):
        found[row["tokens"], row["dtype"]] = row
    return sorted(found.values(), key=lambda row: (row["tokens"], row["dtype"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", dest="set", action="store_const", const="quick", help="about a minute; the default")
    kind.add_argument("--full", dest="set", action="store_const", const="full", help="about three")
    kind.add_argument("--tokens", help="these sizes instead of a set, with the lists of the next four options")
    parser.add_argument("--hidden", default="7168")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--topk", default="8")
    parser.add_argument("--capacity", default="0", help="tokens of the window; 0 = as many as are sent")
    parser.add_argument("--paths", help=f"some of {','.join(PATHS)}; with --tokens all but the last two by default")
    parser.add_argument("--repeat", type=int, default=1, help="runs, each in fresh processes")
    parser.add_argument("--profile", action="store_true", help="print the kernels of both ranks of `ours`")
    parser.add_argument("--out", type=Path, help="result file; with --tokens none by default")
    args = parser.parse_args()
    args.paths = set(args.paths.split(",") if args.paths else PATHS[:4] if args.tokens else PATHS)
    if not args.paths <= set(PATHS):
        parser.error(f"--paths has {', '.join(args.paths - set(PATHS))}, expected some of {', '.join(PATHS)}")
    if args.tokens is None:
        args.set = args.set or "quick"
        args.cases = FULL if args.set == "full" else QUICK
        args.out = args.out or common.HERE / "results" / "round_trip.2xH200.json"
    else:
        args.set = "quick"
        lists = [[int(n) for n in text.split(",")] for text in (args.tokens, args.hidden, args.topk, args.capacity)]
        dtypes = [getattr(torch, dtype) for dtype in args.dtype.split(",")]
        args.cases = [
            Case(tokens, hidden, dtype, topk, capacity)
            for hidden, dtype, topk, capacity, tokens in itertools.product(
                lists[1], dtypes, lists[2], lists[3], lists[0]
            )
        ]
    return args


def main() -> int:
    args = arguments()
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "8G")  # for heaps that cannot grow: a window's memory stays taken
    # NVLink multicast is not used by any path.
    os.environ |= {"NVSHMEM_DISABLE_NVLS": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        library = floor.build(folder) if "floor" in args.paths else Path()
        runs = [one_run(library, args, Path(folder) / f"run{n}.json") for n in range(args.repeat)]
    rows, dispatch = worst(runs), worst_kernels(runs)
    if args.out:
        sizes = by_size(rows)
        judged = [
            {"size": label(next(iter(paths.values()))), "target": verdict(judgement), "figure": round(judgement[1], 3)}
            for paths in sizes.values()
            for judgement in targets(paths, sizes)
        ]
        common.write(
            args.out, rows, versions={"cuda": str(torch.version.cuda)}, kernels=dispatch, targets=judged, runs=runs
        )
    print_table(rows)
    print_kernels(dispatch)
    for number, run in enumerate(runs):
        rate = run.get("copy_bytes_per_us", 0.0)
        print(f"run {number}: {run['seconds']} s, copy {rate / 1e6:.2f} TB/s read plus written")
        for reason in run.get("void", []):
            print(f"run {number} is VOID: {reason}")
        for failure in run["failures"]:
            print(f"run {number} FAILED in {failure.splitlines()[-1]}")
    return 1 if any(run["failures"] for run in runs) else 0


if __name__ == "__main__":
    raise SystemExit(main())
