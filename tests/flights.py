"""Dispatches that wait for their combine, and the windows they are made on; for tests that take time.

An error that a kernel finds is raised by check(), not by the op: `ask` and `Flight.combine` end with it there. Its host
learns of a peer's end from its own kernels, so from its next op.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import harness
import pytest
import torch
import torch.distributed as dist
from harness import expected, random_step, together
from torch import Tensor

from afd_ops import _C, Bootstrap, ExpertServer, RemoteExperts, ShmHeap, Topology, Window

SLACK = 3.0  # seconds: what a busy machine may add to a wait that should have ended
AT_ONCE = 2.0  # seconds, far below the deadline that would have ended the wait instead
SIZES: dict[str, Any] = {**harness.SIZES, "tokens": 8}
PAIR = Topology(1, 1, 2)


@contextmanager
def within(least: float, most: float) -> Iterator[None]:
    begin = time.monotonic()
    yield
    assert 0.95 * least <= time.monotonic() - begin < most  # 5 %: a wait may round its clock down


@contextmanager
def raises(window: Window, kind: type[Exception], text: str = "") -> Iterator[Any]:
    """The op inside raises what becomes `kind`, and says `text`."""
    with pytest.raises(kind, match=re.escape(text) or None) as caught:
        try:
            yield caught
        except RuntimeError as error:
            window.raise_typed(error)


class Flight(NamedTuple):
    """A dispatch that waits for its combine."""

    window: Window
    module: RemoteExperts
    ticket: Tensor
    step: tuple[Tensor, Tensor, Tensor, Tensor]

    def combine(self) -> Tensor:
        out = self.module.combine(self.ticket, self.step[3])
        harness.settle(self.window)
        return out

    def assert_answered(self) -> None:
        assert torch.equal(self.combine(), expected(self.window.topology, *self.step))


def ask(window: Window, layer: int = 0, stage: int = 0) -> Flight:
    module, step = harness.remote(window, layer, stage), random_step(window.topology, 4)
    step[1][0] = torch.tensor([0, 1])  # at least one row for each of two experts
    flight = Flight(window, module, module.dispatch(*step[:3]), step)
    harness.settle(window)
    return flight


def hear(window: Window) -> None:
    """check(), once the window has had a chance to learn how its peers are."""
    if not harness.host_reads():
        ask(window)
    window.check()


def server_of(window: Window) -> ExpertServer:
    return ExpertServer(window, harness.experts_of(window.topology, window.role_rank))


def poisoned(window: Window) -> list[bool]:
    """Per peer: whether it told this rank that it gave up."""
    count, sticky = len(window.topology.peers(window.bootstrap.rank)), window.geometry.layout["sticky"]
    return [int(harness.word(window, sticky + i * _C.WORD_STRIDE)) == _C.POISONED for i in range(count)]


def construct(
    topology: Topology,
    *,
    ranks: list[int] | None = None,
    timeout: float = 10.0,
    heap: Callable[[int], Any] = lambda rank: ShmHeap(),
    store: Callable[[int, Any], Any] = lambda rank, store: store,
    topology_of: Callable[[int], Topology] | None = None,
    sizes_of: Callable[[int], dict[str, Any]] = lambda rank: {},
) -> list[Any]:
    """A window per rank, each in a thread of its own; of those that failed, the exception."""
    shared = dist.HashStore()

    def build(rank: int) -> Window:
        bootstrap = Bootstrap(store(rank, shared), rank, topology.world_size, timeout=timeout)
        return Window(
            topology_of(rank) if topology_of else topology,
            bootstrap,
            heap=heap(rank),
            **{**SIZES, **sizes_of(rank)},
        )

    present = range(topology.world_size) if ranks is None else ranks
    return together(*((lambda rank=rank: build(rank)) for rank in present))
