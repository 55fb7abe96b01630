"""Round trips walked through by hand, for tests of single ops.

`by_hand` walks through a round trip of two attention and two FFN ranks in this process and stops before any op, so that
a test can look at that op's call, misuse it, or repeat it, and then let the round trip end: its result must be exact.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import harness
import pytest
import torch
from harness import SIZES, expected, random_step
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import afd_ops
from afd_ops import _C

TOPOLOGY = afd_ops.Topology(2, 2, 5)  # ffn 0 owns experts 0 to 2, ffn 1 owns 3 and 4
LAYER, STAGE = 3, 1
HIDDEN, TOPK, TOKENS = SIZES["hidden"], SIZES["topk"], SIZES["tokens"]
Call = tuple[Any, ...]


def sizes_of(dtype: torch.dtype) -> dict[str, Any]:
    return {**SIZES, "dtype": dtype, "hidden": 256 if dtype == torch.float8_e4m3fn else HIDDEN}


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[tuple[str, torch.dtype], list[afd_ops.Window]]]:
    """All ranks' windows, per device and payload dtype. Every test leaves them as idle as it found them."""
    opened: dict[tuple[str, torch.dtype], list[afd_ops.Window]] = {}
    yield opened
    for window in itertools.chain(*opened.values()):
        window.close()


@pytest.fixture
def cluster(
    clusters: dict[tuple[str, torch.dtype], list[afd_ops.Window]], device: str, request: pytest.FixtureRequest
) -> Iterator[list[afd_ops.Window]]:
    dtype = request.node.callspec.params.get("dtype", torch.float32)
    if (device, dtype) not in clusters:
        sizes = {**sizes_of(dtype), "stages": 2, "depth": 3}
        clusters[device, dtype] = afd_ops.open_local(TOPOLOGY, devices=harness.devices(TOPOLOGY), **sizes)
        for window in clusters[device, dtype]:
            harness.fill_with_nan(window)
    windows = clusters[device, dtype]
    yield windows
    harness.synchronize()
    if any(_C.in_flight(w.id) for w in windows if w.role == "attention") or any(w.errors() for w in windows):
        harness.reset(windows)  # a test failed half way, or made a kernel stop a window; the next is not to blame


def overload(name: str) -> Any:
    return getattr(torch.ops.afd, name).default


def argument_names(name: str) -> list[str]:
    return [argument.name for argument in overload(name)._schema.arguments]


def rows_apart(t: Tensor) -> Tensor:
    """The same values in every other row of a larger tensor."""
    return torch.stack([t, torch.full_like(t, 9)], dim=1)[:, 0]


def columns_first(t: Tensor) -> Tensor:
    return t.t().contiguous().t()


def by_hand(
    windows: list[afd_ops.Window], tokens: int, dtype: torch.dtype = torch.float32, *, strided: bool = False
) -> Iterator[tuple[str, Call]]:
    """One round trip; yields each op's name and arguments before it is called, and checks the results at the end."""
    attention, ffn = windows[: TOPOLOGY.attention_size], windows[TOPOLOGY.attention_size :]
    apart, across = (rows_apart, columns_first) if strided else (torch.Tensor.contiguous, torch.Tensor.contiguous)
    steps = [random_step(TOPOLOGY, tokens, **sizes_of(dtype)) for _ in attention]
    args: Call = (across(steps[0][1]), torch.tensor(TOPOLOGY.expert_map, dtype=torch.int32).to(harness.DEVICE), 2, 3)
    yield "plan", args
    tickets = []
    for window, (x, ids, weights, _) in zip(attention, steps, strict=True):
        args = (apart(x), across(ids), across(weights), window.port(LAYER, STAGE), window.order, window.id)
        yield "dispatch", args
        tickets.append(torch.ops.afd.dispatch(*args))
    harness.synchronize()
    for window in ffn:
        taken = 0
        while taken < len(attention):  # one item holds them all only if its rows fit
            args = (window.port(), window.id)
            yield "arrive", args
            item = torch.ops.afd.arrive(*args)
            count, layer, rows = item[0, _C.ITEM_COUNT :].tolist()[:3]
            assert (layer, count > 0) == (LAYER, True)
            taken += count
            args = (item, window.port(), window.id, rows)
            yield "receive", args
            x, scales, offsets = torch.ops.afd.receive(*args)
            facts = _C.facts(window.id)
            buffers = (
                torch.zeros(rows + 3, facts["hidden"], dtype=dtype, device=x.device),
                torch.zeros((rows + 3, *scales.shape[1:]) if scales.dim() > 1 else 0, device=x.device),
                torch.zeros(facts["owned_experts"], dtype=torch.int32, device=x.device),
            )
            args = (item, *buffers, window.port(), window.id)
            yield "receive_into", args
            torch.ops.afd.receive_into(*args)
            assert torch.equal(buffers[0][:rows].float(), x.float()) and torch.equal(buffers[2], offsets)
            assert torch.equal(buffers[1][:rows], scales)
            out = harness.experts_of(TOPOLOGY, window.role_rank)(buffers[0][:rows], buffers[1][:rows], offsets, layer)
            args = (apart(out), item, window.port(), window.id)
            yield "reply", args
            torch.ops.afd.reply(*args)
    for window, ticket, step in zip(attention, tickets, steps, strict=True):
        args = (ticket, apart(step[3]), window.port(LAYER, STAGE), window.order, window.id)
        yield "combine", args
        assert torch.equal(torch.ops.afd.combine(*args), expected(TOPOLOGY, *step, dtype))
    harness.synchronize()
    for window in windows:
        window.check()
        assert window.errors() == []


def stop_before(name: str, trip: Iterator[tuple[str, Call]]) -> Call:
    return next(args for op, args in trip if op == name)


def finish(trip: Iterator[tuple[str, Call]]) -> None:
    for _ in trip:
        pass


class State:
    """Every byte of the protocol on all ranks: window memory, sequences, rings, what is taken, the cursor."""

    TAKEN_BYTES = 32  # struct Taken of csrc/control.h

    def __init__(self, windows: list[afd_ops.Window]) -> None:
        harness.synchronize()
        self.memory: list[Tensor] = []
        for window in windows:
            g, at, slots = window.geometry, _C.addresses(window.id), _C.facts(window.id)["slots"]
            sizes = {
                "window": g.layout["slots"] + slots * g.layout["slot_bytes"],
                "next": 8 * g.stages,
                "ring": 8 * g.stages * g.depth,
                "taken": self.TAKEN_BYTES * slots,
                "cursor": 4,
            }
            if window.device_half:
                at |= window.device_half.addresses(window.id)
            self.memory += [harness.memory(window.heap.device, at[name], size) for name, size in sizes.items()]
        self.content = [part.clone() for part in self.memory]
        harness.synchronize()

    def restore(self) -> None:
        harness.synchronize()
        with _disable_current_modes():  # of opcheck, which would take these copies for the op's
            for part, content in zip(self.memory, self.content, strict=True):
                part.copy_(content)
        harness.synchronize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, State) and all(map(torch.equal, self.content, other.content))

    __hash__ = None  # type: ignore[assignment]


@contextmanager
def refused(
    windows: list[afd_ops.Window], window: afd_ops.Window, kind: type[afd_ops.AfdError], says: str
) -> Iterator[None]:
    """The op inside, of `window`, is refused for the content of an argument: it raises `says` and leaves every rank as
    it was; where its kernel finds it, check() raises `kind`, and only a reset makes the ranks go on."""
    state = State(windows)
    if harness.host_reads():
        with pytest.raises(RuntimeError, match=says) as raised:
            yield
        assert type(afd_ops.errors.typed(raised.value)) is kind
        assert State(windows) == state
    else:
        yield
        harness.synchronize()
        with pytest.raises(kind):
            window.check()
