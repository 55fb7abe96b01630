"""Several attention ranks onto one FFN rank, for round_trip.py: the period of the worst.

All in one process on the local heap: the attention ranks on cuda:0 with a stream each, the FFN rank on cuda:1.
Processes that share a GPU would be time-sliced. Set CUDA_DEVICE_MAX_CONNECTIONS=32 before CUDA starts, or streams that
share a hardware queue wait for each other.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from typing import Any

import common
import torch
import workload
from torch import Tensor

import afd_ops

SERVES = 8  # in a graph of the FFN side
AHEAD = 8  # such graphs
POLL = 1e-4  # seconds; what is launched ahead when the last pair is over ends after it


class Attention:
    """One attention rank: its stream, input and captured chain."""

    def __init__(self, window: afd_ops.Window, case: workload.Case, pairs: int) -> None:
        self.window, self.case, self.pairs = window, case, pairs
        self.inputs = workload.inputs(case, seed=1234 + window.role_rank)
        self.base = torch.zeros_like(self.inputs[0])
        self.experts = afd_ops.RemoteExperts(0).to("cuda:0").attach(window)
        self.stream = torch.cuda.Stream("cuda:0")
        self.graph = torch.cuda.CUDAGraph()

    def dispatch(self, x: Tensor) -> Tensor:
        return self.experts.dispatch(x, *self.inputs[1:])

    def capture(self) -> None:
        with torch.cuda.graph(self.graph, stream=self.stream):
            y = self.inputs[0]
            for _ in range(self.pairs):
                y = self.experts.combine(self.dispatch(y), self.base)
        self.out = y

    def replay(self) -> None:
        with torch.cuda.stream(self.stream):
            self.graph.replay()

    def event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def error(self, got: Tensor, pairs: int) -> float:
        self.window.check()
        return workload.difference(
            got, workload.expected(self.case, *self.inputs, pairs, factors=workload.factors(), whole=False)
        )


class Server:
    """The FFN rank: its graph is launched ahead until `stop`, by a thread, since how many slots an item takes is up to
    what has arrived."""

    def __init__(self, window: afd_ops.Window, case: workload.Case, ranks: int) -> None:
        self.window, self.port, self.rows = window, window.port(), ranks * case.tokens * case.topk
        self.stream = torch.cuda.Stream("cuda:1")
        self.graph = torch.cuda.CUDAGraph()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        with torch.cuda.device(1):
            self.experts = workload.Experts(case, self.rows)
        torch.cuda.synchronize(1)

    def serve(self) -> None:
        item = torch.ops.afd.arrive(self.port, self.window.id)
        rows, scales, offsets = torch.ops.afd.receive(item, self.port, self.window.id, self.rows)
        torch.ops.afd.reply(self.experts(rows, scales, offsets), item, self.port, self.window.id)

    def serve_once(self) -> None:
        with torch.cuda.device(1), torch.cuda.stream(self.stream):
            self.serve()
            self.stream.synchronize()

    def capture(self) -> None:
        with torch.cuda.device(1), torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(SERVES):
                self.serve()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(30)
        self.window.check()

    def _run(self) -> None:
        launched: deque[torch.cuda.Event] = deque()
        with torch.cuda.device(1), torch.cuda.stream(self.stream):
            while not self._stopped.is_set():
                self.graph.replay()
                launched.append(self.stream.record_event())
                if len(launched) > AHEAD:
                    launched.popleft().synchronize()
            self.stream.synchronize()


def measure(case: workload.Case, ranks: int, pairs: int, replays: int) -> dict[str, Any]:
    windows = afd_ops.open_local(
        afd_ops.Topology(ranks, 1, workload.EXPERTS),
        devices=["cuda:0"] * ranks + ["cuda:1"],
        rows=ranks * case.tokens * case.topk,
        poll_interval=POLL,
        deadline=20.0,
        **case.window,
    )
    with torch.inference_mode():
        attention = [Attention(window, case, pairs) for window in windows[:ranks]]
        server = Server(windows[ranks], case, ranks)
        tickets = [rank.dispatch(rank.inputs[0]) for rank in attention]
        torch.cuda.synchronize(0)
        server.serve_once()  # all of them, in one item
        outs = [rank.experts.combine(t, rank.base) for rank, t in zip(attention, tickets, strict=True)]
        torch.cuda.synchronize(0)
        errors = [rank.error(out, 1) for rank, out in zip(attention, outs, strict=True)]
        for rank in attention:
            rank.capture()
        server.capture()
        torch.cuda.synchronize(0)
        server.start()
        try:
            periods = _periods(attention, pairs, replays)
        finally:
            server.stop()
        errors += [rank.error(rank.out, pairs) for rank in attention]
    stats = windows[ranks].stats()
    for window in windows:
        window.close()
    return {
        "period_us": max(periods),
        "drained_us": None,
        "error": max(errors),
        "attention_ranks": ranks,
        "heap": "local",
        "slots_per_item": round(stats["replies"] / max(stats["items"], 1), 2),
    }


def _periods(attention: list[Attention], pairs: int, replays: int) -> list[float]:
    """Of each rank, in microseconds; all run at the same time."""
    for rank in attention:
        rank.replay()
    torch.cuda.synchronize(0)
    times: list[list[float]] = [[] for _ in attention]
    for _ in range(common.TRIALS):
        begins = [rank.event() for rank in attention]
        for _ in range(replays):
            for rank in attention:
                rank.replay()
        ends = [rank.event() for rank in attention]
        torch.cuda.synchronize(0)
        for found, begin, end in zip(times, begins, ends, strict=True):
            found.append(begin.elapsed_time(end) * 1e3 / (replays * pairs))
    return [statistics.median(found) for found in times]
