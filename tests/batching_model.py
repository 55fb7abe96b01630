"""The batching cursor: which ready slots an arrive takes together, and who is served next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from model_checker import Kind, Model, Step


@dataclass(frozen=True)
class Batching:
    """How an arrive chooses: the first ready slot from the cursor on heads the item, others of its layer join while
    their rows fit.

    The next scan begins at the region behind the head's. The cursor counts regions on through the rounds, and in round
    n a region's scan begins at its slot n. A region that has something ready then waits for at most one item per other
    region, ``region_patience``, and a slot for at most one per other slot, ``patience``.
    """

    regions_take_turns: bool = True
    """False: every scan begins at region 0."""
    slots_take_turns: bool = True
    """False: within a region every scan begins at its slot 0."""
    rounds_are_counted_on: bool = True
    """False: a scan that goes round keeps the round that it began in."""
    behind_the_head: bool = True
    """False: the next scan begins behind the last region taken."""
    regions: int = 2
    each: int = 2
    patience: int = 3
    region_patience: int = 1
    capacity: int = 4
    rows: tuple[int, ...] = (1, 4)
    layers: tuple[int, ...] = (0, 1)

    @property
    def slots(self) -> int:
        return self.regions * self.each


class Arrival(NamedTuple):
    """What is in a ready slot; ``passed_over`` counts the items that left without it."""

    layer: int
    rows: int
    passed_over: int = 0


class BatchingState(NamedTuple):
    """Where the next scan begins, what is ready, and how many items left without each region that had something."""

    cursor: int
    slots: tuple[Arrival | None, ...]
    passed_over: tuple[int, ...]


class BatchingModel(Model[BatchingState]):
    """An empty slot becomes ready at any moment, with any layer and rows; arrive takes item after item."""

    def __init__(self, batching: Batching) -> None:
        self.batching = batching

    def initial(self) -> BatchingState:
        return BatchingState(0, (None,) * self.batching.slots, (0,) * self.batching.regions)

    def steps(self, state: BatchingState) -> Iterator[Step[BatchingState]]:
        for slot, arrival in enumerate(state.slots):
            if arrival is None:
                for layer, rows in product(self.batching.layers, self.batching.rows):
                    slots = (*state.slots[:slot], Arrival(layer, rows), *state.slots[slot + 1 :])
                    yield f"slot {slot} is ready: layer {layer}, {rows} rows", state._replace(slots=slots), None
        if any(state.slots):
            yield self._arrive(state)

    def _arrive(self, state: BatchingState) -> Step[BatchingState]:
        batching = self.batching
        chosen, cursor = self.choose(state)
        slots = tuple(
            arrival._replace(passed_over=arrival.passed_over + 1) if arrival and slot not in chosen else None
            for slot, arrival in enumerate(state.slots)
        )
        served = {slot // batching.each for slot in chosen}
        passed_over = tuple(
            count + 1 if any(slots[r * batching.each : (r + 1) * batching.each]) and r not in served else 0
            for r, count in enumerate(state.passed_over)
        )
        label = f"arrive takes slots {chosen}, the next scan begins at {cursor}"
        starved = any(arrival is not None and arrival.passed_over > batching.patience for arrival in slots)
        if starved or max(passed_over) > batching.region_patience:
            return label, None, Kind.STARVED
        return label, BatchingState(cursor, slots, passed_over), None

    def choose(self, state: BatchingState) -> tuple[list[int], int]:
        """The slots of the next item, and where the scan after it begins."""
        batching = self.batching
        chosen: list[int] = []
        turns: list[int] = []
        layer, room = -1, batching.capacity
        for distance in range(batching.slots):
            turn = state.cursor + distance // batching.each
            region, round_ = turn % batching.regions, turn // batching.regions
            if not batching.slots_take_turns:
                round_ = 0
            elif not batching.rounds_are_counted_on:
                round_ = state.cursor // batching.regions
            slot = region * batching.each + (round_ + distance) % batching.each
            arrival = state.slots[slot]
            if arrival is not None and (not chosen or arrival.layer == layer) and arrival.rows <= room:
                chosen.append(slot)
                turns.append(turn)
                layer, room = arrival.layer, room - arrival.rows
        cursor = turns[0 if batching.behind_the_head else -1] + 1
        return chosen, cursor % batching.slots if batching.regions_take_turns else 0

    def finished(self, state: BatchingState) -> bool:
        return False

    def verdict(self, state: BatchingState) -> Kind | None:
        raise AssertionError("a slot can always become ready, or be taken")
