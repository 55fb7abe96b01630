"""Which sizes of an item's rows to capture graphs for, and which graphs to keep. Plain Python, no device."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from afd_ops.topology import Topology

ALIGNMENT = 16
"""A bucket is a multiple of it: below that, rows cost less than a graph."""


def expected_rows(
    topology: Topology, ffn_rank: int, *, topk: int, tokens: Iterable[int], share: float | None = None
) -> Counter[int]:
    """How many rows the items of an FFN rank will have, before any was seen: what `ladder` takes.

    Attention ranks that send `tokens` tokens each, one to all of them in one item, make n = ranks x tokens x topk
    choices; each falls to this FFN rank with probability `share`. Counted are the mean of the rows and two standard
    deviations to either side.

    Args:
        topk: choices per token.
        tokens: the sizes that attention ranks send, each as often as it is likely.
        share: of all choices, how many fall to this rank's experts; by default as many as it owns of all experts.
            Measured: rows / (tokens x topk).
    """
    owned = len(topology.experts_of(ffn_rank))  # refuses a rank that there is not, also where share is given
    if share is None:
        share = owned / topology.num_experts
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}, expected 0 to 1")
    rows: Counter[int] = Counter()
    least = 1 if share > 0 else 0
    for count in tokens:
        for ranks in range(1, topology.attention_size + 1):
            choices = ranks * count * topk
            mean, deviation = choices * share, math.sqrt(choices * share * (1 - share))
            for sigmas in (-2, 0, 2):
                rows[min(choices, max(least, round(mean + sigmas * deviation)))] += 1
    return rows


def ladder(rows: Iterable[int] | Mapping[int, int], capacity: int, *, padding: float = 0.08) -> tuple[int, ...]:
    """The buckets to capture, ascending: few of them, and little of what they compute is padding.

    From the largest size down, a bucket takes the next smaller size in as long as its padding, the sum of
    (bucket - rows) over the sum of bucket, stays within `padding`, and that of this size within twice as much; the size
    after that heads the next bucket. Then every size has a bucket, all of them together keep to `padding` on these
    sizes, and no size in between is far from one; but for ALIGNMENT.

    Args:
        rows: sizes of items: `expected_rows`, or those that a server has seen (`stats()["row_counts"]`).
        capacity: the most rows of an item, `Window(rows=)`; larger sizes count as that.
        padding: 0 to 0.5.
    """
    if not 0 <= padding < 0.5:
        raise ValueError(f"padding is {padding}, expected 0 to less than 0.5")
    counts: Counter[int] = Counter()
    for size, count in Counter(rows).items():
        counts[min(size, capacity)] += count
    buckets: list[int] = []
    items = live = 0
    for size in sorted((size for size in counts if size > 0), reverse=True):
        items += counts[size]
        live += counts[size] * size
        wide = not buckets or live < (1 - padding) * items * buckets[-1] or size < (1 - 2 * padding) * buckets[-1]
        if wide:
            bucket = min(capacity, -(-size // ALIGNMENT) * ALIGNMENT)
            if not buckets or bucket < buckets[-1]:
                buckets.append(bucket)
                items, live = counts[size], counts[size] * size
    return tuple(reversed(buckets))


@dataclass(frozen=True)
class Fit:
    """How well buckets fit a sequence of items.

    Attributes:
        coverage: of the items with any rows, how many have a bucket.
        padding: of the rows that those buckets compute, how many are not the items'.
    """

    coverage: float
    padding: float


def fit(buckets: Iterable[int], rows: Iterable[int]) -> Fit:
    """What the buckets would do for items of these sizes."""
    ordered = sorted(buckets)
    items = covered = live = computed = 0
    for size in rows:
        if size == 0:
            continue
        items += 1
        index = bisect_left(ordered, size)
        if index < len(ordered):
            covered += 1
            live += size
            computed += ordered[index]
    return Fit(covered / items if items else 1.0, 1 - live / computed if computed else 0.0)


G = TypeVar("G")


@dataclass
class Entry(Generic[G]):
    """A graph, and how often it was used."""

    layer: int
    bucket: int
    graph: G
    uses: int = 0


class GraphCache(Generic[G]):
    """Graphs by (layer, bucket), as many as a limit of bytes allows; the least used go first, of those the largest.

    Args:
        capture: makes the graph of a layer and a bucket.
        release: ends one that must go.
        taken: bytes that all graphs take now.
        limit: None = no limit.
    """

    def __init__(
        self,
        capture: Callable[[int, int], G],
        release: Callable[[G], None],
        taken: Callable[[], int],
        limit: int | None,
    ) -> None:
        self._capture, self._release, self._taken, self.limit = capture, release, taken, limit
        self._entries: dict[tuple[int, int], Entry[G]] = {}

    def __iter__(self) -> Iterator[Entry[G]]:
        """By layer, then by bucket."""
        return (self._entries[key] for key in sorted(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, layers: Iterable[int], buckets: Iterable[int]) -> None:
        """Captures what is not there yet: the largest bucket first, so that smaller ones reuse its memory."""
        chosen = list(layers)
        for bucket in sorted(set(buckets), reverse=True):
            for layer in chosen:
                if (layer, bucket) in self._entries:
                    continue
                self._entries[layer, bucket] = Entry(layer, bucket, self._capture(layer, bucket))
                if not self._keep_to_limit(self._entries[layer, bucket]):
                    break  # what does not fit for one layer does not for the next

    def _keep_to_limit(self, newest: Entry[G]) -> bool:
        """Evicts until the limit is kept; whether the newest is still there."""
        kept = True
        while self.limit is not None and len(self) > 0 and self._taken() > self.limit:
            victim = min(self, key=lambda entry: (entry.uses, -entry.bucket, -entry.layer))
            del self._entries[victim.layer, victim.bucket]
            self._release(victim.graph)
            kept = kept and victim is not newest
        return kept
