"""A server's receive that is on the device before its arrive has ended: arrive and receive in turn on one stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from model_checker import Kind, Model, Step


@dataclass(frozen=True)
class EarlyReceive:
    """``launches`` pairs of arrive and receive. Arrive finds something, writes the item, releases its tag, writes its
    own state.

    A store lands at any moment after it was issued; when a kernel has ended its stores have landed. A receive may begin
    once its arrive has found something, and an arrive once the receive before it has ended.
    """

    tag_of_its_own: bool = True
    """False: all launches have the same tag."""
    tag_released: bool = True
    """The tag lands behind the item. False: in any order."""
    receive_waits_for_tag: bool = True
    """False: it reads the item at once."""
    receive_ends_behind_arrive: bool = True
    """False: it ends when it has read the item."""
    no_receive_without_arrive: bool = True
    """False: a receive is launched also if the launch of its arrive failed."""
    launches: int = 3


class Phase(IntEnum):
    """How far a kernel is; a receive knows WAITING, BEGUN, READ and ENDED only."""

    WAITING = 0
    BEGUN = 1
    FOUND = 2
    ITEM_ISSUED = 3
    TAG_ISSUED = 4
    STATE_ISSUED = 5
    READ = 6
    ENDED = 7
    FAILED = 8


class Memory(NamedTuple):
    """Which arrive wrote the item last, its tag, and how many arrives have written their state."""

    item: int = -1
    tag: int = 0
    state: int = 0


class EarlyState(NamedTuple):
    """The phases of all kernels, what has landed, and which stores of whom (arrive, field of `Memory`) have not."""

    arrives: tuple[Phase, ...]
    receives: tuple[Phase, ...]
    memory: Memory
    pending: frozenset[tuple[int, str]]


ISSUES = {
    Phase.FOUND: ("item", Phase.ITEM_ISSUED),
    Phase.ITEM_ISSUED: ("tag", Phase.TAG_ISSUED),
    Phase.TAG_ISSUED: ("state", Phase.STATE_ISSUED),
}


class EarlyModel(Model[EarlyState]):
    """The kernels and the memory take their steps in any order that the launches allow."""

    def __init__(self, early: EarlyReceive) -> None:
        self.early = early

    def initial(self) -> EarlyState:
        waiting = (Phase.WAITING,) * self.early.launches
        return EarlyState(waiting, waiting, Memory(), frozenset())

    def steps(self, state: EarlyState) -> Iterator[Step[EarlyState]]:
        for n in range(self.early.launches):
            yield from self._arrive(state, n)
            yield from self._receive(state, n)
        for n, field in sorted(state.pending):
            if field == "tag" and self.early.tag_released and (n, "item") in state.pending:
                continue
            value = {"item": n, "tag": self._tag(n), "state": n + 1}[field]
            memory = state.memory._replace(**{field: value})
            yield (
                f"the {field} of arrive {n} lands",
                state._replace(memory=memory, pending=state.pending - {(n, field)}),
                None,
            )

    def _tag(self, n: int) -> int:
        return n + 1 if self.early.tag_of_its_own else 1

    def _arrive(self, state: EarlyState, n: int) -> Iterator[Step[EarlyState]]:
        def to(phase: Phase) -> EarlyState:
            return state._replace(arrives=(*state.arrives[:n], phase, *state.arrives[n + 1 :]))

        phase = state.arrives[n]
        if phase == Phase.WAITING and (n == 0 or state.receives[n - 1] == Phase.ENDED):
            yield f"the launch of arrive {n} fails", to(Phase.FAILED), None
            old = state.memory.state != n
            yield f"arrive {n} begins", None if old else to(Phase.BEGUN), Kind.STATE_OLD if old else None
        elif phase == Phase.BEGUN:
            yield f"arrive {n} finds something", to(Phase.FOUND), None
        elif phase in ISSUES:
            field, then = ISSUES[phase]
            yield f"arrive {n} writes its {field}", to(then)._replace(pending=state.pending | {(n, field)}), None
        elif phase == Phase.STATE_ISSUED and not any(writer == n for writer, _ in state.pending):
            yield f"arrive {n} ends", to(Phase.ENDED), None

    def _receive(self, state: EarlyState, n: int) -> Iterator[Step[EarlyState]]:
        def to(phase: Phase) -> EarlyState:
            return state._replace(receives=(*state.receives[:n], phase, *state.receives[n + 1 :]))

        early, phase, arrive = self.early, state.receives[n], state.arrives[n]
        if phase == Phase.WAITING:
            if arrive >= Phase.FOUND and not (arrive == Phase.FAILED and early.no_receive_without_arrive):
                yield f"receive {n} begins", to(Phase.BEGUN), None
        elif phase == Phase.BEGUN:
            if not early.receive_waits_for_tag or state.memory.tag >= self._tag(n):
                other = state.memory.item != n
                yield (
                    f"receive {n} reads its item",
                    None if other else to(Phase.READ),
                    Kind.ITEM_OF_ANOTHER if other else None,
                )
        elif phase == Phase.READ and (arrive == Phase.ENDED or not early.receive_ends_behind_arrive):
            yield f"receive {n} ends", to(Phase.ENDED), None

    def finished(self, state: EarlyState) -> bool:
        """All have ended, or the server has, because a launch failed."""
        ended = list(zip(state.arrives, state.receives, strict=True)).count((Phase.ENDED, Phase.ENDED))
        if ended == self.early.launches:
            return True
        return (state.arrives[ended], state.receives[ended]) == (Phase.FAILED, Phase.WAITING)

    def verdict(self, state: EarlyState) -> Kind | None:
        return None if self.finished(state) else Kind.DEADLOCK
