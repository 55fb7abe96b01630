"""The round trip of one attention and one FFN process over shared memory, beside what the bytes alone cost.

    python benchmarks/round_trip_cpu.py [--tokens T ...] [--cpus A F] [--quick] [--out FILE]

Every trial measures these one after the other, so that a noisy neighbour meets all of them:

ours, period    a free-running chain dispatch -> arrive -> receive -> reply -> combine: one dispatch in flight, each
                pair's input is the output of the pair before, the first 16 pairs are dropped.
ours, drained   one pair on its own, after a pause in which the FFN rank has fallen asleep.
floor           the same put, gather, weighted sum and put in one loop of one thread of this process: floor_cpu.cpp.
two memcpy      two copies of the payload, likewise.
handoff         a cache line from one of the two CPUs to the other and back. The round trip crosses between them, the
                floor does not; CPUs of a virtual machine may share an L3 cache at one time and not at another.

No side of the comparison times an expert: in timed pairs (layer 0) the server hands the rows back untouched, and the
floor has no transform either. Whether rows go to the right expert and come back with the right weight is checked before
and after the timing, in the same windows, by pairs of layer 1, whose experts scale their rows, no two alike, against
float64. The timed pairs are checked too: their weights are multiples of 1/64 that sum to 1, so the rows that return are
bit for bit those that left, however long the chain.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

import afd_ops

HIDDEN, TOPK, EXPERTS, DTYPE = 4096, 8, 32, torch.bfloat16
DROPPED = 16  # pairs before the clock starts
PAUSE = 0.005  # seconds before a drained pair
HANDOFFS = 20_000
TIMED, CHECKED = 0, 1  # layers
TARGET_TOKENS, TARGET_RATIO = 64, 2.0


def expert(index: Tensor | int, rows: Tensor) -> Tensor:
    """What expert `index` does to rows of layer 1: no two agree."""
    return rows * (index / EXPERTS + 1)


def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
    if layer == TIMED:
        return rows
    out, begin = torch.full_like(rows, float("nan")), 0
    for index, end in enumerate(offsets.tolist()):
        out[begin:end] = expert(index, rows[begin:end])
        begin = end
    return out


def open_window(topology: afd_ops.Topology, rank: int, address: str, tokens: int, cpus: list[int]) -> afd_ops.Window:
    torch.set_num_threads(1)
    if cpus:
        os.sched_setaffinity(0, {cpus[rank]})
    bootstrap = afd_ops.Bootstrap.connect(address, rank, topology.world_size)
    return afd_ops.Window(topology, bootstrap, hidden=HIDDEN, topk=TOPK, tokens=tokens, dtype=DTYPE, deadline=60)


def serve(topology: afd_ops.Topology, address: str, tokens: int, cpus: list[int]) -> None:
    with open_window(topology, 1, address, tokens, cpus) as window:
        afd_ops.ExpertServer(window, experts).run()


class Case:
    """One batch: its input and routing, and the buffers of the floor."""

    def __init__(self, window: afd_ops.Window, floor: ctypes.CDLL, tokens: int) -> None:
        self.tokens = tokens
        self.floor = floor
        self.timed, self.checked = (afd_ops.RemoteExperts(layer).attach(window) for layer in (TIMED, CHECKED))
        self.x = torch.randn(tokens, HIDDEN).to(DTYPE)
        self.base = torch.zeros_like(self.x)
        self.ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices
        # Multiples of 1/64 between 1/64 and 15/64, in pairs whose sum is 1/4.
        halves = torch.randint(1, 16, (tokens, TOPK // 2))
        self.weights = torch.cat([halves, 16 - halves], 1) / 64
        self.slots, self.replies = torch.zeros(2, 2, tokens, HIDDEN, dtype=DTYPE)
        self.rows = torch.zeros(tokens * TOPK, HIDDEN, dtype=DTYPE)
        self.position = torch.empty(tokens * TOPK, dtype=torch.int32)
        self.position[self.ids.flatten().argsort(stable=True)] = torch.arange(tokens * TOPK, dtype=torch.int32)

    def pairs(self, count: int) -> Tensor:
        x = self.x
        for _ in range(count):
            x = self.timed.combine(self.timed.dispatch(x, self.ids, self.weights), self.base)
        return x

    def chain_us(self, count: int) -> float:
        x = self.pairs(DROPPED)
        start = time.perf_counter()
        for _ in range(count):
            x = self.timed.combine(self.timed.dispatch(x, self.ids, self.weights), self.base)
        elapsed = time.perf_counter() - start
        self.check_chain("ours", x)
        return elapsed / count * 1e6

    def drained_us(self) -> float:
        time.sleep(PAUSE)
        start = time.perf_counter()
        self.pairs(1)
        return (time.perf_counter() - start) * 1e6

    def floor_us(self, count: int) -> float:
        self._floor(DROPPED)
        elapsed = self._floor(count)
        self.check_chain("floor", self.replies[(count - 1) % 2])
        return elapsed / count / 1e3

    def _floor(self, count: int) -> int:
        tensors = (self.x, self.slots, self.rows, self.replies, self.position, self.weights)
        sizes = (count, self.tokens, HIDDEN, TOPK)
        return int(self.floor.floor_ns(*map(ctypes.c_int64, sizes), *(ctypes.c_void_p(t.data_ptr()) for t in tensors)))

    def memcpy_us(self, count: int) -> float:
        tensors = (self.x, self.slots, self.replies)
        sizes = (count, self.tokens, HIDDEN)
        elapsed = self.floor.two_memcpy_ns(
            *map(ctypes.c_int64, sizes), *(ctypes.c_void_p(t.data_ptr()) for t in tensors)
        )
        return float(elapsed) / count / 1e3

    def handoff_ns(self, cpus: list[int]) -> float:
        return int(self.floor.handoff_ns(ctypes.c_int64(HANDOFFS), *map(ctypes.c_int64, cpus))) / HANDOFFS

    def check_chain(self, path: str, x: Tensor) -> None:
        if not torch.equal(x, self.x):
            raise AssertionError(f"{path}, {self.tokens} tokens: the chain did not return what it was given")

    def error(self) -> float:
        """Largest error of a pair with expert-specific experts, relative to the largest value of the oracle."""
        base = torch.randn_like(self.base)
        got = self.checked.combine(self.checked.dispatch(self.x, self.ids, self.weights), base).double()
        reply = torch.zeros_like(got)
        for ids, weights in zip(self.ids.T, self.weights.T, strict=True):
            reply += weights[:, None].double() * expert(ids[:, None], self.x.double()).to(DTYPE).double()
        want = base.double() + reply
        # Two roundings, the reply's and the result's, of half a unit in the last place each.
        allowed = (reply.abs() + want.abs()) * torch.finfo(DTYPE).eps * 0.51
        error = float((got - want).abs().max() / want.abs().max())
        if not bool(((got - want).abs() <= allowed).all()):
            raise AssertionError(f"{self.tokens} tokens: error {error:.2e} against the oracle")
        return error


def measure(case: Case, cpus: list[int], *, trials: int, seconds: float) -> dict[str, Any]:
    """Figures of one batch; a chain runs for about `seconds` in each trial."""
    errors = [case.error()]
    case.pairs(DROPPED)
    chain = max(8, int(seconds * 1e6 / case.chain_us(8)))
    floor = max(8, int(seconds * 1e6 / case.floor_us(8)))
    drained = max(3, min(16, int(seconds / PAUSE / 4)))
    times: dict[str, list[float]] = {"period": [], "drained": [], "floor": [], "memcpy": [], "handoff": []}
    for _ in range(trials):
        if len(set(cpus)) == 2:
            times["handoff"].append(case.handoff_ns(cpus))
        times["period"].append(case.chain_us(chain))
        times["floor"].append(case.floor_us(floor))
        times["memcpy"].append(case.memcpy_us(4 * floor))
        times["drained"] += [case.drained_us() for _ in range(drained)]
    errors.append(case.error())
    return {"times": times, "error": max(errors)}


def build_floor(folder: str) -> ctypes.CDLL:
    source, target = Path(__file__).with_name("floor_cpu.cpp"), Path(folder) / "floor.so"
    # The flags of setup.py.
    flags = ["-O3", "-std=c++20", "-Wall", "-shared", "-fPIC", "-pthread"]
    subprocess.run(["g++", *flags, source, "-o", target], check=True)
    floor = ctypes.CDLL(str(target))
    floor.floor_ns.restype = floor.two_memcpy_ns.restype = floor.handoff_ns.restype = ctypes.c_int64
    return floor


def rows_of(tokens: int, capacity: int, result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the result file for one batch: ours, floor and memcpy."""
    times = result["times"]
    period, floor = (statistics.median(times[name]) for name in ("period", "floor"))
    rows: list[dict[str, Any]] = [
        {
            "path": path,
            "tokens": tokens,
            "hidden": HIDDEN,
            "dtype": str(DTYPE).removeprefix("torch."),
            "topk": TOPK,
            "capacity": capacity,
            "period_us": round(statistics.median(times[name]), 2),
            "drained_us": None,
            "error": 0.0,  # the chain is compared bit for bit
            "period_min_us": round(min(times[name]), 2),
        }
        for path, name in (("ours", "period"), ("floor", "floor"), ("memcpy", "memcpy"))
    ]
    rows[0] |= {
        "drained_us": round(statistics.median(times["drained"]), 2),
        "handoff_ns": round(statistics.median(times["handoff"])) if times["handoff"] else None,
        "error": result["error"],
        "ratio": round(period / floor, 3),
        "mb_per_s": round(2 * tokens * HIDDEN * DTYPE.itemsize / period),
        "target": ("met" if period <= TARGET_RATIO * floor else "missed") if tokens == TARGET_TOKENS else None,
    }
    return rows


def print_table(results: list[list[dict[str, Any]]]) -> None:
    print(f"{'tokens':>6} {'period us':>10} {'drained us':>10} {'floor us':>9} {'2 memcpy us':>11} ", end="")
    print(f"{'ratio':>6} {'MB/s':>7} {'handoff ns':>10} {'error':>8}  ", end="")
    print(f"T = {TARGET_TOKENS}: period <= {TARGET_RATIO:g} x floor")
    for ours, floor, memcpy in results:
        print(
            f"{ours['tokens']:6d} {ours['period_us']:10.1f} {ours['drained_us']:10.1f} {floor['period_us']:9.1f} "
            f"{memcpy['period_us']:11.1f} {ours['ratio']:6.2f} {ours['mb_per_s']:7d} "
            f"{ours['handoff_ns'] or '-':>10} {ours['error']:8.1e}  {ours['target'] or '-'}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--cpus", type=int, nargs=2, default=[], help="pin the attention and the FFN process")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter trials; the figures are noisier")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--out", type=Path, default=common.HERE / "results" / "round_trip_cpu.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"seed {args.seed}; load before the start {load:.2f} (two cores should be idle)", flush=True)
    torch.manual_seed(args.seed)
    trials, seconds = (5, 0.03) if args.quick else (21, 0.2)
    cpus = args.cpus or sorted(os.sched_getaffinity(0))  # known where the processes run if these are two

    topology, capacity, address = afd_ops.Topology(1, 1, EXPERTS), max(args.tokens), common.free_address()
    server_args = (topology, address, capacity, args.cpus)
    server = multiprocessing.get_context("spawn").Process(target=serve, args=server_args, daemon=True)
    server.start()
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        open_window(topology, 0, address, capacity, args.cpus) as window,
        torch.inference_mode(),
    ):
        floor = build_floor(folder)
        for tokens in args.tokens:
            result = measure(Case(window, floor, tokens), cpus, trials=trials, seconds=seconds)
            results.append(rows_of(tokens, capacity, result))
    server.join(30)
    if server.exitcode != 0:
        raise RuntimeError(f"the FFN process ended with exit code {server.exitcode}")

    gxx = subprocess.check_output(["g++", "-dumpfullversion"], text=True).strip()
    facts = dict(seed=args.seed, trials=trials, cpus=args.cpus, load=round(load, 2))
    common.write(args.out, [row for rows in results for row in rows], versions={"g++": gxx}, **facts)
    print_table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
