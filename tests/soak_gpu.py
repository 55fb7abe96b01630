"""The half of soak.py that runs on GPUs: `python tests/soak.py --device cuda`.

Inputs are drawn, and outputs compared with ==, on the GPU, PAIRS round trips at a time; the host reads one number per
lane every AHEAD turns. Phases over NVSHMEM have a process and a GPU per rank, and are left out where there is one GPU;
local ones have all ranks in one process, attention on the first GPU and FFN on the last, by peer access.
An eager server is an ExpertServer; else arrive, receive, experts and reply are captured. What a phase found is on disk
when it ends.
"""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor

import afd_ops
from afd_ops import _C

EXPERTS, TOPK = 7, 4
HEAD = 64  # columns of a row that the experts change; the others pass through
LAYERS = 4  # experts of layers that differ by this many are alike
PAIRS = 16  # round trips of a graph
SERVED = 8  # items of a graph on the FFN side
AHEAD = 8  # turns launched before the host looks
SETTLED = 1000  # turns after which memory is flat
DEADLINE = 5.0  # seconds
MOST_TOKENS = 1024
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# Of preparations: while one thread captures, no other may draw random numbers or synchronise the device.
LOCK = threading.Lock()


@dataclass(frozen=True)
class Phase:
    """One window, used in one way."""

    name: str
    local: bool
    attention: int = 1
    ffn: int = 1
    share: float = 0.0  # of the seconds
    dtype: torch.dtype = BF16
    hidden: int = 256
    depth: int = 2
    eager: float = 0.2  # how much of what an attention rank does is no replay
    replayed_server: bool = True
    sends: tuple[int, ...] = ()  # tokens of each attention rank, of every step; else random
    pairs: int = 0  # of the first rank, instead of a share of the seconds

    @property
    def topology(self) -> afd_ops.Topology:
        return afd_ops.Topology(self.attention, self.ffn, EXPERTS)

    @property
    def window(self) -> dict[str, Any]:
        return dict(
            hidden=self.hidden, topk=TOPK, tokens=MOST_TOKENS, dtype=self.dtype, stages=2, depth=self.depth,
            deadline=DEADLINE, poll_interval=0.002,
        )  # fmt: skip


PHASES = (
    # One rank sends, the other sends nothing: what showed missing fences elsewhere.
    *(Phase(f"one sends {n}", True, 2, sends=(n, 0), hidden=2048, eager=0.0, pairs=100_000) for n in (256, 1024)),
    Phase("2A2F", True, 2, 2, 0.15),
    Phase("2A2F float8", True, 2, 2, 0.1, dtype=FP8),
    Phase("2A2F, eager server", True, 2, 2, 0.1, replayed_server=False),
    Phase("between processes", False, share=0.25),
    Phase("between processes, float8", False, share=0.15, dtype=FP8),
    Phase("between processes, depth 1, long rows", False, share=0.15, hidden=2048, depth=1),
    Phase("between processes, eager server", False, share=0.1, eager=0.5, replayed_server=False),
)
# For planted mistakes: a short way through what differs.
BRIEF = (
    Phase("one sends 1024", True, 2, share=0.3, sends=(1024, 0), hidden=2048, eager=0.0),
    Phase("2A2F", True, 2, 2, 0.3),
    Phase("2A2F, eager server", True, 2, 2, 0.2, replayed_server=False),
    Phase("2A2F, depth 1, long rows", True, 2, 2, 0.2, hidden=2048, depth=1),
)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        yield


# The attention side.


class Steps:
    """Inputs of `pairs` steps of `count` tokens, drawn again and again, and what must come back."""

    def __init__(self, window: afd_ops.Window, pairs: int, count: int) -> None:
        g, device = window.geometry, window.heap.device
        self.quantised = window.dtype == FP8
        self.x = torch.empty(pairs, count, g.hidden, device=device, dtype=window.wide_dtype)
        self.base = torch.empty_like(self.x)
        self.ids = torch.empty(pairs, count, TOPK, device=device, dtype=torch.int64)
        self.weights = torch.empty(pairs, count, TOPK, device=device)
        self.places = torch.empty_like(self.ids)

    def draw(self, table: Tensor) -> None:
        """Small integers; ids as they are in `table`."""
        self.x.random_(-3, 4)
        if self.quantised:
            self.x[..., :: _C.SCALE_BLOCK] = 7  # a block whose largest element is 7 is quantised without loss
        self.base.random_(-3, 4)
        self.weights.random_(0, 3)
        self.places.random_(0, table.shape[0])
        self.ids.copy_(table[self.places])

    def want(self, layer: int) -> Tensor:
        """Sums of at most 243: exact in bfloat16."""
        weights, ids = self.weights * (self.ids >= 0), self.ids.clamp(min=0)

        def total(factor: Tensor | int) -> Tensor:
            return (weights * factor).sum(-1, keepdim=True).to(self.x.dtype)

        want = torch.addcmul(self.base, self.x, total(1))
        head = torch.addcmul(self.base[..., :HEAD], self.x[..., :HEAD], total(ids % 3 + 1))
        want[..., :HEAD] = head + total(ids + layer % LAYERS)
        return want


def tables(device: torch.device) -> list[Tensor]:
    """Routings to draw from: uniform with some of no expert, by Zipf's law, all to one expert."""
    zipf = [e for e in range(EXPERTS) for _ in range(2520 // (e + 1))]
    kinds = [list(range(-1, EXPERTS)), zipf, [0], [EXPERTS - 1]]
    return [torch.tensor(kind, device=device) for kind in kinds]


class Lane:
    """One stage of an attention rank on a stream of its own."""

    def __init__(self, window: afd_ops.Window, stage: int, rng: random.Random, sends: int | None) -> None:
        self.window, self.stage, self.rng, self.sends = window, stage, rng, sends
        self.device = window.heap.device
        self.stream = torch.cuda.Stream(self.device)
        self.tables = tables(self.device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=self.device)
        self.eager_module = harness.remote(window, 3, stage)
        self.modules: list[afd_ops.RemoteExperts] = []  # a graph reads the port of its module
        sizes = [1, rng.randint(2, 64), rng.randint(65, 256), rng.randint(257, MOST_TOKENS), MOST_TOKENS, 0]
        self.graphs: list[tuple[torch.cuda.CUDAGraph, Steps, Tensor, int]] = []
        with torch.cuda.stream(self.stream):
            self.load_kernels()
            for count in sizes if sends is None else [sends]:
                for ahead in {False, window.geometry.depth > 1}:
                    self.graphs.append(self.capture(count, ahead, slow=rng.random() < 0.5))

    def capture(self, count: int, ahead: bool, slow: bool) -> tuple[torch.cuda.CUDAGraph, Steps, Tensor, int]:
        """PAIRS steps one after the other, or each dispatched before its predecessor is combined."""
        layer, steps, graph = self.rng.randrange(60), Steps(self.window, PAIRS, count), torch.cuda.CUDAGraph()
        module = harness.remote(self.window, layer, self.stage)
        self.modules.append(module)
        steps.draw(self.tables[0])
        (steps.x != steps.want(layer)).flatten(1).any(1).sum()  # nothing is loaded for the first time behind a wait
        outs: list[Tensor] = []
        tickets: list[Tensor] = []
        with capturing(graph, self.stream):
            for pair in range(PAIRS + ahead):
                if pair < PAIRS:
                    tickets.append(module.dispatch(steps.x[pair], steps.ids[pair], steps.weights[pair]))
                if slow and self.rng.random() < 0.3:
                    torch.cuda._sleep(self.rng.choice((2_000, 20_000, 200_000)))
                if pair >= ahead:
                    outs.append(module.combine(tickets[pair - ahead], steps.base[pair - ahead]))
            stacked = torch.stack(outs)
        return graph, steps, stacked, layer

    def replay(self) -> int:
        """One graph; how many of its steps had tokens."""
        graph, steps, outs, layer = self.rng.choice(self.graphs)
        steps.draw(self.rng.choice(self.tables))
        want = steps.want(layer)
        graph.replay()
        self.wrong += (outs != want).flatten(1).any(1).sum()
        return PAIRS if steps.x.shape[1] else 0

    def load_kernels(self) -> None:
        """What `eager` launches besides our own: a kernel's first launch behind one that waits is a deadlock."""
        torch.cuda._sleep(1)
        for count in (0, 1, 2, 3, 64, 65, 500, MOST_TOKENS):
            steps = Steps(self.window, 1, count)
            steps.draw(self.tables[0])
            self.wrong += (steps.x[0] != steps.want(3)[0]).any()
        self.wrong.zero_()

    def eager(self) -> int:
        """A few steps of any size; how many had tokens."""
        many = 0
        for _ in range(self.rng.randint(1, 4)):
            steps = Steps(self.window, 1, self.rng.choice((0, 1, self.rng.randint(0, MOST_TOKENS))))
            steps.draw(self.rng.choice(self.tables))
            want = steps.want(3)
            many += steps.x.shape[1] > 0
            ticket = self.eager_module.dispatch(steps.x[0], steps.ids[0], steps.weights[0])
            if self.rng.random() < 0.3:
                torch.cuda._sleep(self.rng.choice((2_000, 20_000, 200_000)))
            out = self.eager_module.combine(ticket, steps.base[0])
            self.wrong += (out != want[0]).any()
        return many


def memory_mb(device: torch.device) -> dict[str, float]:
    used = torch.cuda.mem_get_info(device)
    return {"allocated": torch.cuda.memory_allocated(device) / 1e6, "driver": (used[1] - used[0]) / 1e6}


def attend(
    window: afd_ops.Window, phase: Phase, seed: int, seconds: float, ready: Callable[[], object], stop: threading.Event
) -> dict[str, Any]:
    """Until the time is over, or the pairs are done, or another rank's are.

    Raises:
        AssertionError: a row differs.
        afd_ops.PeerError: the window has stopped.
    """
    rng = random.Random(repr((seed, phase.name, window.role_rank)))
    torch.cuda.set_device(window.heap.device)
    sends = phase.sends[window.role_rank] if phase.sends else None
    with LOCK:
        torch.cuda.manual_seed(rng.getrandbits(32))
        lanes = [Lane(window, stage, rng, sends) for stage in range(window.geometry.stages)]
        torch.cuda.synchronize()
    ready()
    begin, pairs, eager_pairs, turn = time.monotonic(), 0, 0, 0
    before: dict[str, float] = {}
    while not stop.is_set() and time.monotonic() - begin < seconds:
        if phase.pairs and pairs >= phase.pairs and window.role_rank == 0:
            break
        for lane in rng.sample(lanes, len(lanes)):
            with torch.cuda.stream(lane.stream):
                if rng.random() < phase.eager:
                    eager_pairs += (many := lane.eager())
                else:
                    many = lane.replay()
                pairs += many
        turn += 1
        if turn % AHEAD == 0:
            for lane in lanes:
                lane.stream.synchronize()
            window.check()
            wrong = sum(int(lane.wrong) for lane in lanes)
            if wrong:
                raise AssertionError(f"{wrong} of the last {AHEAD} turns' pairs differ, {pairs} pairs in (seed {seed})")
            if not before and turn >= SETTLED:
                before = memory_mb(window.heap.device)
    for lane in lanes:
        lane.stream.synchronize()
    took = time.monotonic() - begin
    if window.role_rank == 0:
        stop.set()
    window.check()
    assert sum(int(lane.wrong) for lane in lanes) == 0, f"the last pairs differ (seed {seed})"
    after = memory_mb(window.heap.device)
    grown = {name: round(after[name] - mb, 1) for name, mb in before.items()}
    return {"pairs": pairs, "eager_pairs": eager_pairs, "seconds": round(took, 2), "grown_mb": grown}


# The FFN side.


def experts_on_device(window: afd_ops.Window) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor]:
    """No two experts agree, and no two layers of LAYERS; without a word to the host. layer: an int or a tensor."""
    device = window.heap.device
    owned = torch.tensor([*window.topology.experts_of(window.role_rank), 0], device=device)
    place = torch.arange(MOST_TOKENS * TOPK, dtype=torch.int32, device=device)

    def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: Any) -> Tensor:
        if rows.dtype == FP8:
            rows = afd_ops.dequantize(rows, scales)
        index = owned[torch.searchsorted(offsets, place[: rows.shape[0]], right=True)].unsqueeze(1)
        head = rows[:, :HEAD]
        head.copy_(head * (index % 3 + 1) + (index + layer % LAYERS))
        return rows

    offsets = place[: owned.shape[0] - 1]
    for layer in (1, place[1]):
        for count in (1, 7, 300, MOST_TOKENS * TOPK):
            rows = torch.zeros(count, window.geometry.hidden, device=device).to(window.dtype)
            scales = torch.ones(count, window.geometry.hidden // _C.SCALE_BLOCK, device=device)
            experts(rows, scales, offsets, layer)
    return experts


def serve(window: afd_ops.Window, phase: Phase, seed: int, ready: Callable[[], object]) -> dict[str, Any]:
    """Until every attention rank has left."""
    rng = random.Random(repr((seed, phase.name, "ffn", window.role_rank)))
    device = window.heap.device
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device)

    def pause(chance: float) -> None:
        if rng.random() < chance:
            torch.cuda._sleep(rng.choice((2_000, 20_000, 200_000)))

    def slow(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        pause(0.1)
        return experts(rows, scales, offsets, layer)

    def capture(chance: float) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream):
            for _ in range(SERVED):
                item = torch.ops.afd.arrive(port, window.id)
                pause(chance)
                received = torch.ops.afd.receive(item, port, window.id, MOST_TOKENS * TOPK)
                pause(chance)
                torch.ops.afd.reply(experts(*received, item[0, _C.ITEM_LAYER]), item, port, window.id)
                pause(chance)
        return graph

    with torch.cuda.stream(stream), torch.inference_mode():
        with LOCK:
            experts, port = experts_on_device(window), window.port()
            graphs = [capture(chance) for chance in (0.0, 0.0, 0.3)] if phase.replayed_server else []
            torch.cuda.synchronize()
        ready()
        if not graphs:
            afd_ops.ExpertServer(window, slow).run()
            return window.stats()
        launched: list[torch.cuda.Event] = []
        while _C.ALIVE in _C.regions(window.id):
            rng.choice(graphs).replay()
            launched.append(stream.record_event())
            if len(launched) > 2:
                launched.pop(0).synchronize()
        stream.synchronize()
    for record in window.errors():
        raise afd_ops.errors.from_record(record)
    return window.stats()


# Where a phase runs.


def run_local(phase: Phase, seed: int, seconds: float) -> list[dict[str, Any]]:
    """A thread per rank. The first failure stops all."""
    devices = ["cuda:0"] * phase.attention + [f"cuda:{torch.cuda.device_count() - 1}"] * phase.ffn
    windows = afd_ops.open_local(phase.topology, devices=devices, **phase.window)
    barrier, stop = threading.Barrier(len(windows), timeout=120), threading.Event()
    results: list[dict[str, Any]] = [{} for _ in windows]
    failures: list[BaseException] = []

    def run(index: int, window: afd_ops.Window) -> None:
        try:
            if window.role == "attention":
                results[index] = attend(window, phase, seed, seconds, barrier.wait, stop)
            else:
                results[index] = serve(window, phase, seed, barrier.wait)
        except BaseException as error:
            failures.append(error)
            stop.set()
            barrier.abort()
        finally:
            window.close()

    for window in windows:
        harness.fill_with_nan(window)
    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(windows)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + seconds + 120
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if failures:
        raise next((e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0])
    if any(thread.is_alive() for thread in threads):
        raise TimeoutError("a rank did not end")
    return results


def row_of(phase: Phase, found: list[dict[str, Any]], error: str | None) -> dict[str, Any]:
    return {
        "phase": phase.name,
        "heap": "local" if phase.local else "nvshmem",
        "ranks": f"{phase.attention}A{phase.ffn}F",
        "dtype": str(phase.dtype).removeprefix("torch."),
        "hidden": phase.hidden,
        "depth": phase.depth,
        "sends": list(phase.sends),
        "replayed_server": phase.replayed_server,
        "pairs": sum(one["pairs"] for one in found),  # that had tokens
        "by_rank": found,
        "error": error,
    }


def add(path: Path, row: dict[str, Any]) -> None:
    rows = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*rows, row]))
    pairs, seconds = row["pairs"], max((one["seconds"] for one in row["by_rank"]), default=0.0)
    rate = f", {pairs / seconds:.0f} a second" if seconds else ""
    print(f"{row['error'] or 'exact'}: {row['phase']} ({row['heap']}): {pairs} pairs in {seconds} s{rate}", flush=True)


def seconds_of(phase: Phase, seconds: float) -> float:
    return 90.0 if phase.pairs else phase.share * seconds


def local_part(phases: tuple[Phase, ...], seed: int, seconds: float, path: Path) -> None:
    faulthandler.dump_traceback_later(
        60 + sum(60 + seconds_of(p, seconds) for p in phases), exit=True, file=sys.__stderr__
    )
    for phase in phases:
        try:
            found = run_local(phase, seed, seconds_of(phase, seconds))
        except BaseException as error:
            add(path, row_of(phase, [], f"{type(error).__name__}: {error}"))
            raise
        done = found[0]["pairs"]
        short = f"no more than {done} pairs in {found[0]['seconds']} s" if done < phase.pairs else None
        add(path, row_of(phase, found[: phase.attention], short))


def process_part(
    topology: afd_ops.Topology,
    bootstrap: afd_ops.Bootstrap,
    _: dict[str, Any],
    phases: tuple[Phase, ...],
    seed: int,
    seconds: float,
    path: Path,
) -> None:
    from afd_ops.heap.nvshmem import NvshmemHeap

    torch.cuda.set_device(harness.DEVICE)
    heap = NvshmemHeap(bootstrap, harness.DEVICE)
    for phase in phases:
        group = afd_ops.Bootstrap(bootstrap.store, bootstrap.rank, 2, name=phase.name, timeout=30)
        with afd_ops.Window(topology, group, heap=heap, **phase.window) as window:
            harness.fill_with_nan(window)
            if window.role == "ffn":
                serve(window, phase, seed, group.barrier)
                continue
            try:
                found = attend(window, phase, seed, seconds_of(phase, seconds), group.barrier, threading.Event())
            except BaseException as error:
                add(path, row_of(phase, [], f"{type(error).__name__}: {error}"))
                raise
            add(path, row_of(phase, [found], None))
    heap.finalize()


def soak(phases: tuple[Phase, ...], seed: int, seconds: float, path: Path) -> list[dict[str, Any]]:
    """Runs the phases, the local ones first; every row that there is, also if some ended badly."""
    local, apart = (tuple(p for p in phases if p.local is which) for which in (True, False))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "afd_ops", "harness"])
    rows: list[dict[str, Any]] = []
    for part in filter(None, (local, apart)):
        try:
            if part is local:
                with ProcessPoolExecutor(1, context) as pool:
                    pool.submit(local_part, local, seed, seconds, path).result()
            else:
                harness.DEVICE = "cuda"
                limit = 60 + sum(40 + seconds_of(p, seconds) for p in apart)
                harness.run_processes(apart[0].topology, process_part, apart, seed, seconds, path, timeout=limit)
        except BaseException as error:
            traceback.print_exc()
            found = json.loads(path.read_text())[len(rows) :] if path.exists() else []
            if not any(row["error"] for row in found):  # ended without a word
                add(path, row_of(part[min(len(found), len(part) - 1)], [], f"{type(error).__name__}, see above"))
        rows = json.loads(path.read_text())
    return rows


def summary(rows: list[dict[str, Any]], phases: tuple[Phase, ...], seed: int) -> dict[str, Any]:
    """The result file. A corruption rate below `rate_below` is what so many pairs without one say with 95 %."""
    pairs, held = sum(row["pairs"] for row in rows), len(rows) == len(phases) and not any(row["error"] for row in rows)
    grown = [mb for row in rows for one in row["by_rank"] for mb in one["grown_mb"].values()]
    return {
        "seed": seed,
        "csrc": _C.SOURCE_DIGEST,
        "torch": torch.__version__,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "pairs": pairs,
        "seconds": round(sum(max((one["seconds"] for one in row["by_rank"]), default=0.0) for row in rows), 1),
        "rate_below": 3 / pairs if pairs and held else None,
        "memory_grown_mb": max(grown, default=None),
        "held": held and max(grown, default=0.0) < 64,
        "rows": rows,
    }
