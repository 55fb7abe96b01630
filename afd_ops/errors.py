"""Typed exceptions.

An op raises a plain ``RuntimeError`` (that is all torch lets a C++ op raise) whose text starts with its kind,
``"RingBusy in afd::dispatch: ..."``. `typed` turns it into one of the classes below; the modules, the server loop and
``Window.step()`` do so, and ``Window.check()`` raises them from the error record.
"""

from __future__ import annotations

import re
from typing import Any


class AfdError(RuntimeError):
    """Base of everything this package raises on purpose."""


class BootstrapError(AfdError):
    """A rank did not come, or failed while the window was being built; the text names it."""


class GeometryError(AfdError):
    """Ranks were started with different sizes; the text names the field and both values."""


class ArgumentError(AfdError, ValueError):
    """An argument breaks an op's contract; the text names it and both values. Nothing was sent."""


class RingBusyError(AfdError):
    """More dispatches in flight than the window's depth. Nothing was sent."""


class StaleError(AfdError):
    """A ticket or item was used before, or is from before a reset()."""


class ClosedError(AfdError):
    """The window is closed, or never existed in this process."""


class AbortedError(AfdError):
    """The op was waiting while the window was reset or closed."""


class PeerError(AfdError):
    """A peer's fault stopped this window (or, on an FFN rank, that peer's region).

    Attributes:
        op, peer, layer, stage, ring, sequence, generation: where the protocol stood; peer is the role rank of the
            other side, -1 for this rank itself. None where the error was not read from a record.
    """

    def __init__(self, message: str, record: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        record = record or {}
        self.op: str | None = record.get("op")
        self.peer: int | None = record.get("peer")
        self.layer: int | None = record.get("layer")
        self.stage: int | None = record.get("stage")
        self.ring: int | None = record.get("ring")
        self.sequence: int | None = record.get("sequence")
        self.generation: int | None = record.get("generation")


class PeerTimeoutError(PeerError):
    """A peer did not answer within the deadline."""


class PeerFailedError(PeerError):
    """A peer entered its error state and poisoned this window."""


class PeerLeftError(PeerError):
    """A peer closed its window while it was still needed."""


class ProtocolError(PeerError):
    """A peer wrote something the protocol does not allow."""


class RankFailedError(PeerError):
    """This rank itself gave up on the window (an exception between dispatch and combine, or in the server loop)."""


# By the kinds of csrc/wire.h.
BY_KIND: dict[str, type[AfdError]] = {
    "Argument": ArgumentError,
    "RingBusy": RingBusyError,
    "Stale": StaleError,
    "Closed": ClosedError,
    "Aborted": AbortedError,
    "Failed": RankFailedError,
    "Timeout": PeerTimeoutError,
    "PeerFailed": PeerFailedError,
    "PeerLeft": PeerLeftError,
    "Protocol": ProtocolError,
}

_PREFIX = re.compile(r"\b(\w+) in afd::\w+: ")


def typed(error: RuntimeError, record: dict[str, Any] | None = None) -> RuntimeError:
    """The typed form of an op's RuntimeError; any other RuntimeError comes back as it is.

    Args:
        error: what an op raised, eagerly or inside a compiled graph.
        record: the window's error record, for the attributes of a PeerError.
    """
    match = None if isinstance(error, AfdError) else _PREFIX.search(str(error))
    kind = BY_KIND.get(match.group(1)) if match else None
    if match is None or kind is None:
        return error
    message = str(error)[match.start() :].splitlines()[0]
    return kind(message, record) if issubclass(kind, PeerError) else kind(message)


def from_record(record: dict[str, Any]) -> AfdError:
    """The exception of an error record."""
    kind = BY_KIND[record["kind"]]
    return kind(record["message"], record) if issubclass(kind, PeerError) else kind(record["message"])
