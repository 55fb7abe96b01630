"""Every test has a watchdog: when it is late, all stacks are dumped and the process ends."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import TextIO

import harness
import pytest
import torch
from op_trips import cluster, clusters  # noqa: F401, fixtures

STDERR = pytest.StashKey[TextIO]()
WATCHDOG_SECONDS = float(os.environ.get("AFD_WATCHDOG", "150"))


@pytest.fixture(autouse=True)
def watchdog(request: pytest.FixtureRequest) -> Iterator[None]:
    faulthandler.dump_traceback_later(WATCHDOG_SECONDS, exit=True, file=request.config.stash[STDERR])
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """No gradients, and nothing compiled before or left behind."""
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every device in turn; harness makes windows and steps there."""
    monkeypatch.setattr(harness, "DEVICE", request.param)
    return str(request.param)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """harness makes windows and steps on the first GPU."""
    monkeypatch.setattr(harness, "DEVICE", "cuda:0")


@pytest.fixture
def seed() -> int:
    """AFD_SEED, or a fresh one; printed, so that a failure can be repeated."""
    value = int(os.environ.get("AFD_SEED", int.from_bytes(os.urandom(4), "little")))
    print(f"AFD_SEED={value}")
    torch.manual_seed(value)
    return value


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if torch.cuda.is_available() else "needs a CUDA device; torch.cuda.is_available() is False"
    for item in items:
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_configure(config: pytest.Config) -> None:
    config.stash[STDERR] = os.fdopen(os.dup(2), "w")  # while a test runs, 2 is pytest's own file
    torch.set_num_threads(1)  # several ranks share the cores
