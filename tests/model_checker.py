"""An explicit-state model checker, and the kinds of violation that the models of this folder know.

A model is a start state and a function that lists every step possible in a state. ``explore`` visits all reachable
states breadth first, so the counterexample it keeps of a violation is a shortest one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar


class Kind(Enum):
    """What went wrong; the value says what that means."""

    LOST_FLAG = "READY landed on READY: one of the two publishes will never be seen"
    UNREAD_OVERWRITTEN = "a header or payload landed on one that nobody had read yet"
    TORN_READ = "a slot was read whose header is valid and whose payload is not the header's"
    READ_TWICE = "an FFN rank took a dispatch that it had already answered"
    MISPAIRED = "a ticket was given the answer to another request"
    FALSE_PROTOCOL_ERROR = "a header check refused a slot, which it never has to while nothing fails"
    FALSE_BUSY = "a dispatch was refused although its stage had fewer than depth in flight"
    POISON_ERASED = "the in-band reset of a flag erased poison"
    POISON_OVERWRITTEN = "a late READY overwrote poison"
    DEADLOCK = "a rank waits for ever although nothing failed"
    NOT_TOLD = "something failed and a survivor is not told: only its own deadline ends its wait"
    COLLATERAL = "only an attention rank died, and another attention rank was stopped by it"
    NOT_CLEAN = "all work is done, and a flag, a taken mark, poison or an unread slot is left over"
    ITEM_LOST = "a mailbox entry was overwritten before the host had read it"
    ITEM_TORN = "the host read a mailbox entry whose body is not that of the sequence it polled for"
    ITEM_OF_ANOTHER = "a receive read an item that is not its arrive's"
    STATE_OLD = "an arrive began before the one before it had written where the next scan begins"
    ROWS_OVERWRITTEN = "a rows buffer was overwritten before its item was answered"
    STARVED = "a ready slot was passed over by more items than it has to put up with"


StateT = TypeVar("StateT")
Step = tuple[str, StateT | None, Kind | None]
"""What happens; the state it leads to (None: this path ends here); what it violates (None: nothing)."""


class Model(ABC, Generic[StateT]):
    """What ``explore`` needs to know."""

    @abstractmethod
    def initial(self) -> StateT:
        """Where it starts."""

    @abstractmethod
    def steps(self, state: StateT) -> Iterator[Step[StateT]]:
        """Every step possible in ``state``."""

    @abstractmethod
    def finished(self, state: StateT) -> bool:
        """Whether all work is done in ``state``, from which no step is possible."""

    @abstractmethod
    def verdict(self, state: StateT) -> Kind | None:
        """What is wrong with ``state``, from which no step is possible."""


@dataclass(frozen=True)
class Violation:
    """A kind of violation, and a shortest list of steps that leads to it."""

    kind: Kind
    steps: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What exploring every reachable state found. ``finished`` counts the final states with all work done."""

    states: int
    finished: int
    seconds: float
    violations: tuple[Violation, ...]

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(violation.kind for violation in self.violations)


def explore(model: Model[StateT], limit: int = 1_000_000) -> Result:
    """Visit every reachable state, breadth first. RuntimeError if there are more than ``limit``."""
    began = time.perf_counter()
    start = model.initial()
    came_from: dict[StateT, tuple[StateT, str] | None] = {start: None}
    queue = deque([start])
    found: dict[Kind, tuple[str, ...]] = {}
    finished = 0

    def path_to(state: StateT) -> tuple[str, ...]:
        labels: list[str] = []
        link = came_from[state]
        while link is not None:
            state, label = link
            labels.append(label)
            link = came_from[state]
        return tuple(reversed(labels))

    while queue:
        state = queue.popleft()
        is_final = True
        for label, successor, kind in model.steps(state):
            is_final = False
            if kind is not None and kind not in found:
                found[kind] = (*path_to(state), label)
            if successor is not None and successor not in came_from:
                came_from[successor] = (state, label)
                queue.append(successor)
        if is_final:
            finished += model.finished(state)
            kind = model.verdict(state)
            if kind is not None and kind not in found:
                found[kind] = path_to(state)
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} states: choose a smaller configuration")
    violations = tuple(Violation(kind, found[kind]) for kind in Kind if kind in found)
    return Result(len(came_from), finished, time.perf_counter() - began, violations)
