"""Which sizes get a graph: the ladder on the seeded trace, its promises, and the cache that keeps to a limit."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

import afd_ops
from afd_ops.buckets import ALIGNMENT, Fit, GraphCache, expected_rows, fit, ladder

CAPACITY = 8192 * 6


@pytest.fixture(scope="module")
def trace() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "ffn_trace", Path(__file__).parent.parent / "benchmarks" / "ffn_trace.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sent(trace: ModuleType) -> list[int]:
    """The sizes that an engine would name: decode steps and prefill chunks."""
    return [*trace.DECODE] * 3 + trace.prefill_sizes()


@pytest.mark.parametrize("ffn_size", [1, 2, 4])
@pytest.mark.parametrize("measured", [False, True], ids=["even", "measured"])
def test_the_ladder_fits_the_committed_trace(trace: ModuleType, ffn_size: int, measured: bool) -> None:
    """At least 95 % of items replay a graph and at most 10 % of what graphs compute is padding, before any item was
    seen, whether the popularity of experts is known or not."""
    topology = afd_ops.Topology(trace.ATTENTION, ffn_size, trace.EXPERTS)
    for seed in range(3):
        for rank, share in enumerate(trace.shares(ffn_size, seed)):
            known = share if measured else None
            rows = expected_rows(topology, rank, topk=trace.TOPK, tokens=sent(trace), share=known)
            buckets = ladder(rows, CAPACITY)
            found = fit(buckets, trace.item_rows(ffn_size, rank, items=2000, seed=seed))
            assert found.coverage >= 0.95 and found.padding <= 0.10, (seed, rank, found)
            assert len(buckets) <= 64


def test_a_ladder_of_the_sizes_seen_fits_those_that_follow(trace: ModuleType) -> None:
    for ffn_size in (1, 2, 4):
        rows = trace.item_rows(ffn_size, 0, items=4000, seed=7)
        buckets = ladder(rows[:2000], CAPACITY)
        found = fit(buckets, rows[2000:])
        assert found.coverage >= 0.95 and found.padding <= 0.10, (ffn_size, found)


def test_a_ladder_keeps_its_promise_for_any_sizes(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        top = 10 ** draw.uniform(0, 5)
        rows = [1 + round(top * draw.random() ** draw.choice((1, 4))) for _ in range(draw.randint(1, 300))]
        padding = draw.choice((0.02, 0.08, 0.2))
        buckets = ladder(rows, CAPACITY, padding=padding)
        assert list(buckets) == sorted(set(buckets)) and buckets[-1] <= CAPACITY
        assert all(bucket % ALIGNMENT == 0 or bucket == CAPACITY for bucket in buckets)
        seen = [min(size, CAPACITY) for size in rows]
        slack = ALIGNMENT * len(seen) / max(1, sum(seen))
        found = fit(buckets, seen)
        assert found.coverage == 1.0 and found.padding <= padding + slack


def test_ladders_of_nothing_and_of_one_size() -> None:
    assert ladder([], 100) == () and ladder([0], 100) == ()
    assert ladder([50], 100) == (64,) and ladder({99: 3}, 100) == (100,) and ladder([5000], 100) == (100,)
    assert fit((), [0, 0]) == Fit(1.0, 0.0) and fit((16,), [8, 0, 17]) == Fit(0.5, 0.5)


def test_expected_rows_follow_the_expert_map_and_the_share() -> None:
    topology = afd_ops.Topology(2, 2, 3)  # two experts and one
    for rank, owned in ((0, 2), (1, 1)):
        rows = expected_rows(topology, rank, topk=3, tokens=[100])
        assert {100 * owned, 200 * owned} <= rows.keys() and max(rows) <= 600
    assert expected_rows(topology, 0, topk=3, tokens=[100], share=1.0).keys() == {300, 600}
    none = expected_rows(afd_ops.Topology(1, 4, 5), 3, topk=2, tokens=[8])  # owns no expert
    assert none.keys() == {0} and ladder(none, 16) == ()
    with pytest.raises(ValueError, match=r"share is 1\.5, expected 0 to 1"):
        expected_rows(topology, 0, topk=3, tokens=[1], share=1.5)
    with pytest.raises(ValueError, match=r"padding is 0\.5, expected 0 to less than 0\.5"):
        ladder([1], 10, padding=0.5)


class Graphs:
    """Stands for a device: a graph of bucket b takes b bytes."""

    def __init__(self, limit: int | None) -> None:
        self.alive: list[tuple[int, int]] = []
        self.captured: list[tuple[int, int]] = []
        self.cache: GraphCache[tuple[int, int]] = GraphCache(
            self.capture, self.alive.remove, lambda: sum(bucket for _, bucket in self.alive), limit
        )

    def capture(self, layer: int, bucket: int) -> tuple[int, int]:
        self.captured.append((layer, bucket))
        self.alive.append((layer, bucket))
        return layer, bucket


def test_graphs_are_captured_once_largest_first_and_stand_in_order() -> None:
    graphs = Graphs(None)
    graphs.cache.fill([0, 1], [16, 64, 32])
    assert graphs.captured == [(0, 64), (1, 64), (0, 32), (1, 32), (0, 16), (1, 16)]
    graphs.cache.fill([0, 1], [16, 48])
    assert graphs.captured[6:] == [(0, 48), (1, 48)] and len(graphs.cache) == 8
    assert [entry.graph for entry in graphs.cache] == [(n, b) for n in (0, 1) for b in (16, 32, 48, 64)]


def test_the_limit_is_kept_and_the_least_used_go_first() -> None:
    graphs = Graphs(200)
    graphs.cache.fill([0, 1], [16, 64, 32])  # 224 bytes: one of the largest goes
    assert sorted(graphs.alive) == [(0, 16), (0, 32), (0, 64), (1, 16), (1, 32)]
    for entry, uses in zip(graphs.cache, (5, 1, 3, 0, 2), strict=True):
        entry.uses = uses
    graphs.cache.fill([2], [48])  # 208 bytes: the newest has no uses either, and is the larger
    assert (2, 48) not in graphs.alive
    graphs.cache.fill([2], [40])
    assert (2, 40) in graphs.alive and len(graphs.alive) == 6
    graphs.cache.limit = 120
    graphs.cache.fill([2], [8])
    assert sorted(graphs.alive) == [(0, 16), (0, 64), (1, 32)] or sum(b for _, b in graphs.alive) <= 120
    assert (0, 64) in graphs.alive


def test_a_bucket_that_alone_exceeds_the_limit_is_left_to_eager() -> None:
    graphs = Graphs(50)
    graphs.cache.fill([0, 1], [64, 16])
    assert graphs.captured == [(0, 64), (0, 16), (1, 16)] and graphs.alive == [(0, 16), (1, 16)]
