"""How windows begin: all ranks together, or none and every one says why. Ranks are threads of this process."""

from __future__ import annotations

import gc
import itertools
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
import torch.distributed as dist
from flights import PAIR, SIZES, SLACK, ask, construct, within
from harness import together

import afd_ops
from afd_ops import _C, Bootstrap, LocalHeap, ShmHeap, Topology, Window

pytestmark = pytest.mark.usefixtures("seed")
on_every_device = pytest.mark.usefixtures("device")


def resources() -> tuple[int, int]:
    """Open files, and mappings of shared memory, of this process."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("memfd:afd_ops" in line for line in maps)


def assert_no_more(before: tuple[int, int], after: tuple[int, int]) -> None:
    assert after[0] <= before[0] and after[1] <= before[1], (before, after)  # less: another test's, closed meanwhile


@pytest.mark.parametrize(
    ("field", "other", "seen", "first"),
    [
        ("hidden", dict(hidden=32), 32, 16),
        ("topk", dict(topk=3), 3, 2),
        ("tokens", dict(tokens=9), 9, 8),
        ("dtype", dict(dtype=torch.bfloat16), "bfloat16", "float32"),
        ("stages", dict(stages=2), 2, 1),
        ("depth", dict(depth=3), 3, 2),
    ],
)
@pytest.mark.parametrize("odd", [1, 2])
def test_a_size_that_differs_is_named_on_every_rank(
    field: str, other: dict[str, Any], seen: object, first: object, odd: int
) -> None:
    """fault: ranks started with different capacities write past each other's fields."""
    outcomes = construct(
        Topology(2, 1, 4),
        sizes_of=lambda rank: other if rank == odd else {},
        heap=lambda rank: FailingHeap("allocate"),  # never reached: refused before anything is allocated
    )
    assert [type(outcome) for outcome in outcomes] == [afd_ops.GeometryError] * 3
    who = {1: "rank 1 (attention 1)", 2: "rank 2 (ffn 0)"}[odd]
    assert {str(outcome) for outcome in outcomes} == {
        f"{who} has {field}={seen}, rank 0 (attention 0) has {field}={first}; "
        "every rank must be started with the same model"
    }


def test_ranks_that_do_not_all_quantise_refuse_each_other() -> None:
    """fault: x is bfloat16 on both, so only the geometry tells them apart."""
    dtypes = [torch.bfloat16, torch.float8_e4m3fn]
    outcomes = construct(Topology(1, 1, 4), sizes_of=lambda rank: dict(hidden=128, dtype=dtypes[rank]))
    assert {str(outcome) for outcome in outcomes} == {
        "rank 1 (ffn 0) has dtype=float8_e4m3fn, rank 0 (attention 0) has dtype=bfloat16; "
        "every rank must be started with the same model"
    }


@pytest.mark.parametrize(
    ("field", "other", "seen", "first"),
    [
        ("num_experts", Topology(1, 2, 3), 3, 4),
        ("local_experts", Topology(1, 2, 4, ((0, 0), (0, 1), (0, 2), (1, 0))), 3, 2),
        ("expert_map[1]", Topology(1, 2, 4, ((0, 0), (1, 1), (1, 0), (0, 1))), [1, 1], [0, 1]),
        ("attention_size", Topology(2, 1, 4), 2, 1),
    ],
)
def test_a_topology_that_differs_is_named_on_every_rank(
    field: str, other: Topology, seen: object, first: object
) -> None:
    """fault: tokens go to ranks that do not own the expert."""
    outcomes = construct(Topology(1, 2, 4), topology_of=lambda rank: other if rank == 1 else Topology(1, 2, 4))
    assert [type(outcome) for outcome in outcomes] == [afd_ops.GeometryError] * 3
    texts = {str(outcome) for outcome in outcomes}
    for text in texts:
        assert re.search(
            rf"rank 1 .* has {re.escape(f'{field}={seen}')}, rank 0 .* has {re.escape(f'{field}={first}')}", text
        )
    assert len(texts) == 1, "every rank says the same"


def test_another_wire_version_is_refused_on_every_rank() -> None:
    """fault: two builds of the library that lay out a slot differently exchange garbage."""

    class Newer:
        """A store that makes its rank look like a later build."""

        def __init__(self, store: Any) -> None:
            self.store = store

        def set(self, key: str, value: str) -> None:
            current = f'"wire_version\\": {_C.WIRE_VERSION}'
            self.store.set(key, value.replace(current, f'"wire_version\\": {_C.WIRE_VERSION + 1}'))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

    outcomes = construct(PAIR, store=lambda rank, store: Newer(store) if rank == 1 else store)
    assert [type(outcome) for outcome in outcomes] == [afd_ops.GeometryError] * 2
    assert f"rank 1 (ffn 0) has wire_version={_C.WIRE_VERSION + 1}" in str(outcomes[0])


@pytest.mark.parametrize("missing", [0, 2])
def test_a_missing_rank_is_named_within_the_timeout(missing: int) -> None:
    """fault: the others wait for ever for a rank that never came."""
    before = resources()
    with within(0.3, 0.3 + SLACK):
        outcomes = construct(Topology(1, 2, 4), ranks=[r for r in range(3) if r != missing], timeout=0.3)
    for outcome in outcomes:
        assert isinstance(outcome, afd_ops.BootstrapError)
        assert re.search(rf"waited 0.3 s for rank {missing} ", str(outcome))
    del outcomes
    assert_no_more(before, resources())


def test_all_missing_ranks_are_named() -> None:
    (outcome,) = construct(Topology(2, 2, 4), ranks=[1], timeout=0.2)
    assert "for ranks 0, 2, 3 " in str(outcome)


class FailingHeap(ShmHeap):
    """Fails in one step of construction."""

    def __init__(self, step: str) -> None:
        super().__init__()
        self.step = step

    def fail(self, *_: object) -> Any:
        raise OSError(f"injected in {self.step}")

    def allocate(self, nbytes: int) -> Any:
        if self.step == "allocate":
            self.fail()
        segment: Any = super().allocate(nbytes)
        if self.step == "map":
            segment.peer = self.fail
        if self.step == "map the second peer":
            reach, calls = segment.peer, iter([True, False])
            segment.peer = lambda handle: reach(handle) if next(calls) else self.fail()
        if self.step == "seal":
            segment.seal = self.fail
        return segment


@pytest.mark.parametrize(
    ("step", "named"),
    [("allocate", "allocate"), ("map", "map"), ("map the second peer", "map")],
)
@pytest.mark.parametrize("odd", [0, 3])
def test_one_rank_that_fails_ends_construction_on_all_and_nothing_is_left(step: str, named: str, odd: int) -> None:
    """faults: the others wait for ever; what was allocated before the failure leaks."""
    before = resources()
    with within(0.0, 5.0):
        outcomes = construct(
            Topology(2, 2, 4), heap=lambda rank: FailingHeap(step) if rank == odd else ShmHeap(), timeout=10.0
        )
    for rank, outcome in enumerate(outcomes):
        if rank == odd:
            assert isinstance(outcome, OSError) and f"injected in {step}" in str(outcome)
        else:
            assert isinstance(outcome, afd_ops.BootstrapError)
            assert str(outcome) == f"rank {odd} failed in step {named!r}: OSError: injected in {step}"
    del outcomes, outcome
    assert_no_more(before, resources())


def test_a_rank_that_fails_after_the_last_exchange_is_named_too() -> None:
    outcomes = construct(PAIR, heap=lambda rank: FailingHeap("seal") if rank == 1 else ShmHeap(), timeout=0.5)
    assert isinstance(outcomes[1], OSError)
    assert isinstance(outcomes[0], afd_ops.BootstrapError) and "for rank 1 " in str(outcomes[0])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(hidden=0), "hidden is 0, expected 1 or more"),
        (dict(deadline=0.0), "deadline is 0.0, expected more than 0"),
        (dict(deadline=float("nan")), "deadline is nan, expected more than 0"),
        (dict(deadline=float("inf")), "deadline is inf"),
        (dict(poll_interval=-1.0), "poll_interval is -1.0, expected more than 0"),
        (dict(rows=15), "rows is 15, expected tokens x topk = 16"),
        (dict(rows=2**31), "rows is 2147483648"),
        (dict(rows=16.5), "rows is 16.5, expected tokens x topk = 16"),
        (dict(tokens=8.0), "tokens is 8.0, expected an int"),
        (dict(hidden=None), "hidden is None, expected an int"),
        (dict(deadline=None), "deadline is None, expected more than 0"),
    ],
)
def test_a_rank_with_an_impossible_argument_names_it_and_all_hear(bad: dict[str, Any], message: str) -> None:
    """fault: the rank that was started wrongly raises, and the others wait for it until they time out."""
    outcomes = construct(PAIR, sizes_of=lambda rank: bad if rank == 1 else {})
    assert isinstance(outcomes[1], ValueError) and message in str(outcomes[1])
    assert isinstance(outcomes[0], afd_ops.BootstrapError)
    assert str(outcomes[0]).startswith(f"rank 1 failed in step 'validate': ValueError: {message}")


def test_a_bootstrap_of_another_size_is_refused() -> None:
    outcomes = construct(PAIR, topology_of=lambda rank: Topology(1, 2, 2) if rank == 1 else PAIR)
    assert isinstance(outcomes[1], ValueError) and isinstance(outcomes[0], afd_ops.BootstrapError)
    assert "bootstrap has 2 ranks, but the topology has attention_size + ffn_size = 3" in str(outcomes[0])


def test_too_little_memory_raises_with_both_numbers_on_all_ranks() -> None:
    """fault: the window is larger than the memory, and the first store is a SIGBUS."""

    class Full(ShmHeap):
        def free_bytes(self) -> int:
            return 1000

    outcomes = construct(PAIR, heap=lambda rank: Full() if rank == 1 else ShmHeap())
    assert isinstance(outcomes[1], MemoryError)
    assert re.search(r"the window takes \d+ bytes, but 1000 are free", str(outcomes[1]))
    assert "rank 1 failed in step 'allocate': MemoryError: the window takes" in str(outcomes[0])


def test_ranks_that_cannot_see_each_other_s_processes_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """fault: a process number of another container is watched here, and a stranger's end is taken for the peer's."""
    calls = itertools.count()
    monkeypatch.setattr(afd_ops.window, "process_namespace", lambda: f"boot {next(calls)}, pid:[1]")
    for outcome in construct(PAIR):
        assert isinstance(outcome, afd_ops.BootstrapError)
        assert re.search(r"process \d+ of boot \d, pid:\[1\], this one runs in boot \d", str(outcome)), outcome


def test_a_process_that_has_ended_before_it_is_watched_is_a_bootstrap_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """fault: a bare error of the system, which names nobody."""

    def watch(*_: object) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(afd_ops.window, "ProcessWatch", watch)
    for rank, outcome in enumerate(construct(PAIR)):
        assert isinstance(outcome, afd_ops.BootstrapError)
        peer = ("rank 1 (ffn 0)", "rank 0 (attention 0)")[rank]
        assert str(outcome) == f"a process has ended already, one of {peer} (process {os.getpid()})"


def test_no_descriptor_of_the_memory_stays_open() -> None:
    """fault: another process of this user opens it through /proc, and every peer costs a descriptor for good."""

    def memory_files() -> int:
        descriptors = [fd for fd in list(Path("/proc/self/fd").iterdir()) if fd.is_symlink()]
        return sum("memfd:afd_ops" in str(fd.readlink()) for fd in descriptors)

    before = memory_files()
    windows = construct(PAIR)
    assert memory_files() == before
    for window in windows:
        window.close()


def test_both_host_heaps_count_memory_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """fault: page cache counts as used, and a window is refused after a checkpoint was copied."""
    monkeypatch.setattr(os, "sysconf", lambda name: 0)  # what is free without being given up for it
    counts = [heap.free_bytes() for heap in (ShmHeap(), LocalHeap())]
    assert counts[1] > 0 and abs(counts[0] - counts[1]) < 0.1 * counts[0]


def test_building_and_closing_many_times_leaves_nothing_behind() -> None:
    """Files, mappings and ids: descriptors and shared memory are given back, an id is never used again."""
    topology, ids, after = Topology(1, 2, 2), list[int](), list[tuple[int, int]]()
    for _ in range(20):
        windows = construct(topology)
        ids += [window.id for window in windows]
        for window in windows:
            window.close()
        del windows, window
        after.append(resources())
    assert_no_more(after[1], after[-1])
    assert len(set(ids)) == len(ids) == 60


@on_every_device
def test_two_windows_of_one_process_do_not_mix() -> None:
    first, second = Topology(1, 2, 4), Topology(2, 1, 3)
    with harness.serving(first) as one, harness.serving(second, hidden=16, depth=1) as two:
        for turn in range(5):
            flights = [ask(window, layer=turn) for window in (*one, *two)]
            for flight in reversed(flights):
                flight.assert_answered()


# The meeting point.


def test_ranks_meet_at_an_address_and_a_missing_one_is_named() -> None:
    address = f"127.0.0.1:{harness.free_port()}"
    bootstraps = [Bootstrap.connect(address, rank, 3, timeout=5.0) for rank in (0, 1)]
    for bootstrap in bootstraps:
        bootstrap.timeout = 0.3
    with within(0.3, 0.3 + SLACK):
        outcomes = together(*(lambda b=b: Window(Topology(1, 2, 4), b, **SIZES) for b in bootstraps))
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, afd_ops.BootstrapError)
        assert str(outcome) == f"rank {rank} waited 0.3 s for rank 2 (group 'afd', exchange 1)"


def test_rank_0_listens_on_the_given_address_only() -> None:
    """fault: the store listens on every interface of the host, open to strangers."""
    port = harness.free_port()
    bootstrap = Bootstrap.connect(f"127.0.0.1:{port}", 0, 1)
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, state = line.split()[1], line.split()[3]
            if state == "0A" and int(local.split(":")[1], 16) == port:
                listening.append(local.split(":")[0])
    assert listening == ["0100007F"]
    assert bootstrap.all_gather("x") == ["x"]


def test_an_address_that_nobody_opened_is_named_within_the_timeout() -> None:
    address = f"127.0.0.1:{harness.free_port()}"
    with within(0.0, 0.2 + 3.0), pytest.raises(afd_ops.BootstrapError, match=f"could not meet rank 0 at {address}"):
        Bootstrap.connect(address, 1, 2, timeout=0.2)


def test_an_address_that_is_taken_is_named() -> None:
    address = f"127.0.0.1:{harness.free_port()}"
    holder = Bootstrap.connect(address, 0, 1)
    with pytest.raises(afd_ops.BootstrapError, match=f"{address}.*in use"):
        Bootstrap.connect(address, 0, 1, timeout=0.5)
    assert holder.all_gather("still here") == ["still here"]


@pytest.mark.parametrize("address", ["", "localhost", ":29500", "localhost:", "localhost:x"])
def test_an_address_without_host_or_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        Bootstrap.connect(address, 0, 1)


def test_a_store_whose_host_is_gone_is_a_bootstrap_error() -> None:
    """fault: rank 0 dies while the others wait, and they see an exception of the store's, not one of ours."""
    address = f"127.0.0.1:{harness.free_port()}"
    host, guest = Bootstrap.connect(address, 0, 2, timeout=5.0), Bootstrap.connect(address, 1, 2, timeout=5.0)
    waiting = threading.Event()

    def wait() -> Any:
        waiting.set()
        return guest.all_gather()

    def leave() -> None:
        nonlocal host
        waiting.wait()
        time.sleep(0.1)
        del host

    outcome = together(wait, leave)[0]
    assert isinstance(outcome, afd_ops.BootstrapError), repr(outcome)[:200]
    with pytest.raises(afd_ops.BootstrapError):
        guest.all_gather()


def test_a_group_that_meets_again_does_not_read_what_the_first_one_left() -> None:
    """fault: survivors build a new window over the store of the old one, take its last keys for fresh ones, and run
    through a barrier that nobody else has reached."""
    store = dist.HashStore()
    first = [Bootstrap(store, rank, 2, timeout=5.0) for rank in (0, 1)]
    assert together(*(lambda b=b: b.all_gather(f"old {b.rank}") for b in first)) == [["old 0", "old 1"]] * 2
    with pytest.raises(afd_ops.BootstrapError):  # rank 1 is missing, or the name is refused: either will do
        assert Bootstrap(store, 0, 2, timeout=0.2).all_gather("new 0") == [], "read what an earlier group had left"
