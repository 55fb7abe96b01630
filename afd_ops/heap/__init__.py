"""Where symmetric memory comes from. Nothing here knows what a token is.

A heap gives a rank one `Segment`; its `handle` is text that another rank's segment of the same heap turns into an
address.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Segment(Protocol):
    """One rank's memory, and its view of the others'."""

    @property
    def handle(self) -> str:
        """What another rank needs to reach this memory."""

    @property
    def address(self) -> int:
        """Where this rank's own memory lies, 256-byte aligned and zeroed."""

    def peer(self, handle: str) -> int:
        """The address at which this rank reaches the memory behind another rank's handle."""

    def seal(self) -> None:
        """Every rank has mapped what it needs: nothing by which a stranger could reach the memory stays behind."""

    def close(self) -> None:
        """Gives back what this rank holds; never collective, may be called twice."""


class Heap(Protocol):
    """A provider of symmetric memory.

    Attributes:
        device: where the memory lies; ops run on tensors of this device.
        capturable: whether ops on it can be captured in a CUDA graph.
        per_role: whether ranks may allocate different sizes.
        reach: "process" or "host": how far apart ranks may be.
    """

    device: torch.device
    capturable: bool
    per_role: bool
    reach: str

    def free_bytes(self) -> int:
        """How much could be allocated now."""

    def allocate(self, nbytes: int) -> Segment: ...
