"""What a server says about itself: histograms, a line per interval, Prometheus."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

import torch

if TYPE_CHECKING:
    from afd_ops.ffn import ExpertServer

PHASES = ("wait", "compute", "reply")
"""wait: from calling arrive until the item's rows stand in order; compute: until the experts are done, on a GPU with
the way to the host and back; reply: until it is sent."""


class Histogram:
    """Durations by powers of two of a microsecond.

    Attributes:
        counts: counts[i] are those up to 2**i us, and above that of i - 1; the last holds all that are longer.
        total: their sum in us.
    """

    BUCKETS = 26

    def __init__(self) -> None:
        self.counts = [0] * self.BUCKETS
        self.total = 0.0

    def add(self, microseconds: float) -> None:
        self.counts[min(self.BUCKETS - 1, max(0, math.ceil(microseconds) - 1).bit_length())] += 1
        self.total += microseconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """An upper bound in us of that share of them; 0 if there are none."""
        left = share * self.count
        for exponent, count in enumerate(self.counts):
            left -= count
            if left <= 0:
                return float(2**exponent) if count else 0.0
        return float(2 ** (self.BUCKETS - 1))

    def as_dict(self) -> dict[str, Any]:
        return {"count": self.count, "total": self.total, "counts": list(self.counts)}


class PhaseTimes:
    """How long the phases of one step in EVERY take; timing all would cost a short item a tenth of its time.

    On a CPU by the host's clock, on a GPU by events on the stream, which are read when a later step finds them done:
    nobody waits for the device.
    """

    EVERY = 16

    def __init__(self, device: torch.device) -> None:
        self.histograms = {phase: Histogram() for phase in PHASES}
        self._device, self._on_device = device, device.type != "cpu"
        self._items = 0
        self._pending: deque[list[Any]] = deque()

    def begin(self) -> list[Any] | None:
        """The marks of a step, the first of them now; None if this step is not timed."""
        while self._pending and self._pending[0][-1].query():
            marks = self._pending.popleft()
            self._add(begin.elapsed_time(end) * 1e3 for begin, end in pairwise(marks))
        if self._items % self.EVERY:
            return None
        marks = []
        self.mark(marks)
        return marks

    def mark(self, marks: list[Any]) -> None:
        """A phase ends here."""
        if self._on_device:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))  # the window's device need not be the current one
            marks.append(event)
        else:
            marks.append(time.perf_counter())

    def end(self, marks: list[Any] | None) -> None:
        """An item was answered; all phases are marked if it was timed."""
        self._items += 1
        if marks is not None and self._on_device:
            self._pending.append(marks)
        elif marks is not None:
            self._add((end - begin) * 1e6 for begin, end in pairwise(marks))

    def _add(self, durations: Iterable[float]) -> None:
        for phase, duration in zip(PHASES, durations, strict=True):
            self.histograms[phase].add(duration)


HEADER = "    items/s     rows/s  slots/item  graphs   wait us  compute us  reply us  regions"


def line(before: dict[str, Any], after: dict[str, Any], seconds: float) -> str:
    """What happened between two `stats()` of a server, under HEADER; times are medians, to a power of two."""
    items = after["items"] - before["items"]
    slots = sum(n * (count - before["batch_sizes"].get(n, 0)) for n, count in after["batch_sizes"].items())
    replayed, eager = (after[name] - before[name] for name in ("replayed", "eager"))
    share = f"{replayed / (replayed + eager):.0%}" if replayed + eager else "-"
    times = []
    for phase in PHASES:
        histogram = Histogram()
        old, new = before[f"{phase}_us"]["counts"], after[f"{phase}_us"]["counts"]
        histogram.counts = [n - m for n, m in zip(new, old, strict=True)]
        times.append(f"{histogram.quantile(0.5):.0f}" if histogram.count else "-")
    regions = " ".join(
        str(new["rows"] - old["rows"]) for old, new in zip(before["regions"], after["regions"], strict=True)
    )
    return (
        f"{items / seconds:11.0f}{(after['rows'] - before['rows']) / seconds:11.0f}"
        f"{slots / items if items else 0:12.2f}{share:>8}{times[0]:>10}{times[1]:>12}{times[2]:>10}  {regions}"
    )


@contextmanager
def printing(server: ExpertServer, file: TextIO, every: float = 1.0) -> Iterator[None]:
    """Meanwhile prints what the server does, a line every so many seconds; `regions` are rows per attention rank."""
    over, before = threading.Event(), server.stats()
    name = f"ffn {server.window.role_rank}"

    def loop() -> None:
        nonlocal before
        turn = 0
        while not over.wait(every):
            now = server.stats()
            if turn % 20 == 0:
                print(" " * len(name) + HEADER, file=file)
            print(name + line(before, now, every), file=file, flush=True)
            before, turn = now, turn + 1

    thread = threading.Thread(target=loop, name="afd_ops metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def serve_prometheus(server: ExpertServer, port: int, address: str = "127.0.0.1") -> Any:
    """Answers GET /metrics with the server's statistics, on a thread; asked for, then read.

    Returns:
        What `prometheus_client.start_http_server` returns: the HTTP server, to shut down, and its thread.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    except ImportError as error:
        raise ImportError("metrics for Prometheus need its client: pip install 'afd_ops[metrics]'") from error

    class Collector:
        def collect(self) -> Iterator[Any]:
            stats = server.stats()
            for name, says in (
                ("items", "items answered"),
                ("rows", "rows of (token, choice) computed"),
                ("replayed", "items whose experts were a graph"),
                ("eager", "items whose experts were not"),
            ):
                yield CounterMetricFamily(f"afd_ffn_{name}", says, value=stats[name])
            sizes = CounterMetricFamily("afd_ffn_batches", "items by the slots they held", labels=["slots"])
            for slots, count in sorted(stats["batch_sizes"].items()):
                sizes.add_metric([str(slots)], count)
            yield sizes
            for name in ("slots", "rows", "bytes_sent"):
                family = CounterMetricFamily(f"afd_ffn_region_{name}", f"{name} by attention rank", labels=["region"])
                for region, counts in enumerate(stats["regions"]):
                    family.add_metric([str(region)], counts[name])
                yield family
            for phase in PHASES:
                histogram, below = stats[f"{phase}_us"], 0
                buckets = []
                for exponent, count in enumerate(histogram["counts"][:-1]):
                    below += count
                    buckets.append((str(2**exponent * 1e-6), below))
                buckets.append(("+Inf", histogram["count"]))
                yield HistogramMetricFamily(
                    f"afd_ffn_{phase}_seconds",
                    f"{phase} of an item",
                    buckets=buckets,
                    sum_value=histogram["total"] * 1e-6,
                )
            for name in ("graphs", "graph_bytes", "padding"):
                if name in stats:
                    yield GaugeMetricFamily(f"afd_ffn_{name}", f"{name} of captured experts", value=stats[name])

    registry = CollectorRegistry()
    registry.register(Collector())
    return start_http_server(port, addr=address, registry=registry)
