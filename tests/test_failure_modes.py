"""docs/failure_modes.md: its table has the texts that are raised, and the tests that it names exist."""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import together
from puppets import PATIENCE, TOPOLOGY
from test_failures import LAYER
from torch import Tensor
from torch.distributed import HashStore

import afd_ops
from afd_ops import _C, ExpertServer, RemoteExperts, Topology, Window

PAGE = (Path(__file__).parent.parent / "docs" / "failure_modes.md").read_text()

pytestmark = pytest.mark.usefixtures("seed")


def note(seen: set[tuple[str, str]], window: Window | None, act: Callable[[], Any]) -> None:
    """Adds the class and text of what `act` raises; ids of windows and processes differ from run to run."""
    with pytest.raises(afd_ops.AfdError) as caught:
        try:
            act()
        except RuntimeError as error:
            if window is None:
                raise
            window.raise_typed(error)
    text = re.sub(r"process \d+", "process 4711", re.sub(r"window \d+", "window 1", str(caught.value)))
    seen.add((type(caught.value).__name__, text))


def real_texts() -> set[tuple[str, str]]:
    """What the exceptions of the table say when they are raised."""
    seen: set[tuple[str, str]] = set()
    ones = (torch.ones(2, 16), torch.tensor([[0, 3], [0, 3]]), torch.ones(2, 2), torch.zeros(2, 16))

    def ask(window: Window) -> Callable[[], Tensor]:
        module = RemoteExperts(LAYER).attach(window)
        ticket = module.dispatch(*ones[:3])
        return lambda: module.combine(ticket, ones[3])

    with harness.windows(TOPOLOGY, deadline=0.1) as (attention, other, ffn, _):
        ask(other)
        server = ExpertServer(ffn, lambda rows, *_: (time.sleep(0.15), rows)[1])
        server.step()
        attention.close()
        note(seen, ffn, server.run)
    with harness.windows(TOPOLOGY, deadline=0.1) as (attention, *_):
        note(seen, attention, ask(attention))
    with harness.windows(TOPOLOGY) as (attention, _, ffn, _):
        combine = ask(attention)
        _C.peer_gone(attention.id, 0)
        note(seen, attention, combine)
    with harness.windows(TOPOLOGY) as (attention, other, ffn, _):
        combine = ask(attention)
        ffn.poison()
        note(seen, attention, combine)
        note(seen, None, other.check)
    with harness.windows(TOPOLOGY) as (attention, *_, ffn):
        ffn.close()
        note(seen, attention, lambda: ask(attention))
    with harness.windows(TOPOLOGY) as (attention, *ranks):
        combine = ask(attention)
        for ffn in ranks[1:]:
            ExpertServer(ffn, harness.experts_of(TOPOLOGY, ffn.role_rank)).step()
        at = _C.addresses(attention.id)["window"] + attention.geometry.layout["slots"]
        ctypes.c_int64.from_address(at + 24).value = 5
        note(seen, attention, combine)
    with harness.windows(TOPOLOGY) as windows:
        attention = windows[0]
        combine = ask(attention)
        ask(attention)
        note(seen, attention, lambda: ask(attention))
        note(seen, attention, lambda: RemoteExperts(LAYER).attach(attention).dispatch(ones[0], ones[1] + 1, ones[2]))
        _C.set_abort(attention.id)
        note(seen, attention, combine)
        together(*(window.reset for window in windows))
        note(seen, attention, combine)
        attention.poison()
        note(seen, attention, lambda: ask(attention))
        attention.close()
        note(seen, attention, combine)
    with harness.serving(TOPOLOGY) as (attention, _):
        combine = ask(attention)
        combine()
        note(seen, attention, combine)
    alone = afd_ops.Bootstrap(HashStore(), 0, 4, timeout=0.1)
    note(seen, None, lambda: Window(TOPOLOGY, alone, **harness.SIZES))
    store = HashStore()

    def build(rank: int, **sizes: Any) -> Window:
        bootstrap = afd_ops.Bootstrap(store, rank, 2, name=str(sizes), timeout=PATIENCE)
        return Window(Topology(1, 1, 2), bootstrap, **{**harness.SIZES, **(sizes if rank else {})})

    for sizes in ({"hidden": 32}, {"hidden": 3}):
        other_rank = threading.Thread(target=lambda sizes=sizes: together(lambda: build(1, **sizes)))
        other_rank.start()
        note(seen, None, lambda sizes=sizes: build_first(store, sizes))
        other_rank.join(PATIENCE)
    return seen


def build_first(store: HashStore, sizes: dict[str, Any]) -> Window:
    return Window(Topology(1, 1, 2), afd_ops.Bootstrap(store, 0, 2, name=str(sizes), timeout=PATIENCE), **harness.SIZES)


def test_the_documented_texts_are_the_real_ones() -> None:
    documented = set(re.findall(r"^\| `(\w+Error)` \| `([^`]+)` \|", PAGE, re.MULTILINE))
    assert documented == real_texts()


def test_the_documented_tests_exist() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    assert named and [name for name in sorted(named) if f"def {name}(" not in tests] == []
