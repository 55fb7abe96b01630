"""The host mailbox: how the FFN host learns what a queued arrive chose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from model_checker import Kind, Model, Step


@dataclass(frozen=True)
class Mailbox:
    """``queued`` (N) arrives may be launched and unanswered; each fills a mailbox entry and a rows buffer."""

    enough_entries: bool = True
    """There are N entries. False: N - 1."""
    enough_buffers: bool = True
    """There are N rows buffers. False: N - 1."""
    launched_after_reply: bool = True
    """Arrive n+N is launched after reply n. False: as soon as the host has read entry n."""
    sequence_last: bool = True
    """The device writes the body of an entry before its sequence."""
    queued: int = 2
    arrives: int = 6


class Entry(NamedTuple):
    """Which arrive wrote the body and the sequence of a mailbox entry; -1: none yet."""

    body: int = -1
    sequence: int = -1


class MailboxState(NamedTuple):
    """How many arrives got how far, and what the entries and rows buffers hold."""

    launched: int
    written: int
    half_written: bool
    read: int
    answered: int
    entries: tuple[Entry, ...]
    buffers: tuple[int, ...]


class MailboxModel(Model[MailboxState]):
    """The host launches arrives, polls an entry for the exact sequence, computes on its rows, replies."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox

    def initial(self) -> MailboxState:
        mailbox = self.mailbox
        entries = mailbox.queued if mailbox.enough_entries else mailbox.queued - 1
        buffers = mailbox.queued if mailbox.enough_buffers else mailbox.queued - 1
        return MailboxState(0, 0, False, 0, 0, (Entry(),) * entries, (-1,) * buffers)

    def steps(self, state: MailboxState) -> Iterator[Step[MailboxState]]:
        mailbox = self.mailbox
        released = state.answered if mailbox.launched_after_reply else state.read
        if state.launched < min(released + mailbox.queued, mailbox.arrives):
            launched = state._replace(launched=state.launched + 1)
            yield f"the host launches arrive {state.launched}", launched, None
        if state.written < state.launched:
            yield self._write(state)
        entry = state.entries[state.read % len(state.entries)]
        if state.read < state.launched and entry.sequence == state.read:
            label = f"the host reads entry {state.read}"
            if entry.body == state.read:
                yield label, state._replace(read=state.read + 1), None
            else:
                yield f"{label}, whose body is {entry.body}", None, Kind.ITEM_TORN
        if state.answered < state.read:
            label = f"the experts read the rows of {state.answered}, reply"
            if state.buffers[state.answered % len(state.buffers)] == state.answered:
                yield label, state._replace(answered=state.answered + 1), None
            else:
                yield label, None, Kind.ROWS_OVERWRITTEN

    def _write(self, state: MailboxState) -> Step[MailboxState]:
        """The oldest unwritten arrive writes half of its entry; the rows go with the body."""
        arrive = state.written
        slot, buffer = arrive % len(state.entries), arrive % len(state.buffers)
        entry, buffers = state.entries[slot], state.buffers
        damage: Kind | None = None
        if state.half_written == self.mailbox.sequence_last:
            damage = Kind.ITEM_LOST if entry.sequence >= state.read else None
            what, entry = "sequence", entry._replace(sequence=arrive)
        else:
            what, entry = "body and rows", entry._replace(body=arrive)
            buffers = (*buffers[:buffer], arrive, *buffers[buffer + 1 :])
        changed = state._replace(
            written=arrive + state.half_written,
            half_written=not state.half_written,
            entries=(*state.entries[:slot], entry, *state.entries[slot + 1 :]),
            buffers=buffers,
        )
        return f"arrive {arrive} writes {what}", changed, damage

    def finished(self, state: MailboxState) -> bool:
        return state.answered == self.mailbox.arrives

    def verdict(self, state: MailboxState) -> Kind | None:
        return None if self.finished(state) else Kind.DEADLOCK
