"""How a window lives and ends: deadlines, poison, close. Ranks are threads of this process.

What ends a wait is tested on every device; flights.py says where an error is raised there.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
import subprocess
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import harness
import pytest
import torch
from flights import AT_ONCE, PAIR, SLACK, ask, construct, hear, poisoned, raises, server_of, within
from harness import random_step, together
from torch import Tensor

import afd_ops
from afd_ops import _C, ExpertServer, LocalHeap, RemoteExperts, ShmHeap, Topology, Window
from afd_ops.watch import ProcessWatch

pytestmark = pytest.mark.usefixtures("seed")
on_every_device = pytest.mark.usefixtures("device")

# Deadlines.


@on_every_device
@pytest.mark.parametrize("late", [0, 1])
def test_a_peer_that_does_not_answer_is_named_within_the_deadline(late: int) -> None:
    topology = Topology(1, 2, 4)
    with harness.windows(topology, deadline=0.5, stages=2) as (attention, *ffn):
        ask(attention, layer=5, stage=1)
        flight = ask(attention, layer=6, stage=1)
        other = server_of(ffn[1 - late])
        assert [other.step(), other.step()] == [1, 1]
        text = f"rank {1 + late} (ffn {late}) did not answer within 0.5 s"
        with within(0.5, 0.5 + SLACK), raises(attention, afd_ops.PeerTimeoutError, text) as caught:
            flight.combine()
        e = caught.value
        assert (e.op, e.peer, e.layer, e.stage, e.ring, e.sequence, e.generation) == ("combine", late, 6, 1, 1, 1, 0)

        with within(0.0, 0.5):  # from now on every op of this window, whatever its lane
            with raises(attention, afd_ops.PeerTimeoutError, text):
                ask(attention)
            with raises(attention, afd_ops.PeerTimeoutError, text):
                flight.combine()
            with pytest.raises(afd_ops.PeerTimeoutError, match=re.escape(text)):
                attention.check()
        for window in ffn:  # and the F ranks stop working for it
            assert poisoned(window) == [True]
            assert server_of(window).step() == 0
            assert _C.regions(window.id) == (_C.POISONED,)
            assert [(error["kind"], error["peer"]) for error in window.errors()] == [("PeerFailed", 0)]


@on_every_device
def test_an_ffn_rank_that_is_too_slow_closes_the_region_and_says_so() -> None:
    with harness.windows(Topology(2, 1, 2), deadline=0.5) as (slow, other, ffn):
        flight, server = ask(slow, layer=4), server_of(ffn)
        item, layer, bucket = harness.take(server)
        time.sleep(0.55)
        rows, scales, offsets = torch.ops.afd.receive(item, server.port, ffn.id, bucket)
        torch.ops.afd.reply(server.experts(rows, scales, offsets, layer), item, server.port, ffn.id)
        harness.synchronize()
        (error,) = ffn.errors()
        assert (error["kind"], error["op"], error["peer"], error["layer"]) == ("Timeout", "reply", 0, 4)
        assert "rank 0 (attention 0) was not answered within 0.5 s" in error["message"]
        with within(0.0, AT_ONCE), raises(slow, afd_ops.PeerFailedError, "rank 2 (ffn 0)"):
            flight.combine()
        flight = ask(other)
        assert server.step() == 1
        flight.assert_answered()


@on_every_device
def test_idle_is_not_a_fault() -> None:
    with harness.windows(PAIR, deadline=0.4, poll_interval=0.05) as (attention, ffn):
        server = server_of(ffn)
        with within(0.5, 0.5 + SLACK):
            for _ in range(10):
                assert server.step() == 0
        empty = torch.ops.afd.arrive(server.port, ffn.id)
        assert server._read(empty, ffn.generation)[0] == 0
        rows, _, offsets = torch.ops.afd.receive(empty, server.port, ffn.id, 0)
        assert rows.shape == (0, 16) and offsets.tolist() == [0, 0]
        torch.ops.afd.reply(rows, empty, server.port, ffn.id)
        assert ffn.errors() == attention.errors() == []
        flight = ask(attention)
        assert server.step() == 1
        flight.assert_answered()


@on_every_device
def test_check_never_waits() -> None:
    with harness.windows(PAIR) as (attention, ffn):
        ask(attention)  # a reply is outstanding, and will not come
        with within(0.0, AT_ONCE):
            attention.check()
        ffn.poison()
        with within(0.0, AT_ONCE), pytest.raises(afd_ops.PeerFailedError, match=re.escape("rank 1 (ffn 0) failed")):
            hear(attention)


# Peers that fail, and peers that leave.


@on_every_device
def test_poison_ends_every_wait_of_the_window() -> None:
    """fault: two lanes wait, one learns that the window has stopped, and the other waits for its own deadline."""
    with harness.windows(Topology(1, 2, 2), stages=2) as (attention, *_):
        lanes = [ask(attention, stage=stage) for stage in (0, 1)]
        threading.Timer(0.1, attention.poison).start()
        with within(0.1, 0.1 + SLACK):
            outcomes = together(*(lane.combine for lane in lanes))
        for outcome in outcomes:
            with raises(attention, afd_ops.RankFailedError, "rank 0 (attention 0) gave up on this window"):
                raise outcome


@on_every_device
def test_a_failed_region_is_closed_and_the_others_are_served_on() -> None:
    with harness.windows(Topology(3, 1, 2)) as (*attention, ffn):
        run, outcome = harness.runner(server_of(ffn)), list[Any]()
        thread = threading.Thread(target=lambda: outcome.extend(together(run)))
        thread.start()
        for turn in range(3):
            for flight in [ask(window, layer=turn) for window in attention]:
                flight.assert_answered()
        attention[1].poison()
        with raises(attention[1], afd_ops.RankFailedError, "rank 1 (attention 1) gave up on this window"):
            ask(attention[1])
        for turn in range(3):
            for flight in [ask(window, layer=turn) for window in (attention[0], attention[2])]:
                flight.assert_answered()
        attention[0].close()
        attention[2].close()
        thread.join(5)
        (error,) = outcome  # served to the end, then raised
        assert isinstance(error, afd_ops.PeerFailedError) and error.peer == 1
        assert "rank 1 (attention 1) failed and poisoned this window" in str(error)


@on_every_device
def test_poison_survives_the_reset_of_a_flag_and_a_late_flag() -> None:
    """fault: poison kept in a flag is erased by the in-band reset of that flag, or overwritten by a late READY."""
    with harness.windows(PAIR) as (attention, ffn):
        flight, server = ask(attention), server_of(ffn)
        assert server.step() == 1
        harness.synchronize()
        ffn.poison()
        flight.assert_answered()  # the answer was there before; taking it puts the flag back
        harness.word(attention, attention.geometry.layout["flags"]).fill_(_C.READY)
        assert poisoned(attention) == [True]
        with pytest.raises(afd_ops.PeerFailedError):
            hear(attention)
        with raises(attention, afd_ops.PeerFailedError):
            ask(attention)


@on_every_device
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_of_the_experts_reaches_everyone_at_once(kind: type[BaseException]) -> None:
    """fault: the server loop dies, and the attention ranks learn of it by their own deadline."""

    def broken(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        raise kind("no such weights")

    with harness.windows(Topology(2, 1, 2)) as (asking, idle, ffn):
        flight, run = ask(asking), harness.runner(ExpertServer(ffn, broken))
        with within(0.0, AT_ONCE):
            served, combined = together(run, flight.combine)
        assert type(served) is kind, "never swallowed, never replaced"
        with raises(asking, afd_ops.PeerFailedError, "rank 2 (ffn 0) failed and poisoned this window"):
            raise combined
        with pytest.raises(afd_ops.PeerFailedError):
            hear(idle)
        with raises(ffn, afd_ops.RankFailedError):
            torch.ops.afd.arrive(ffn.port(), ffn.id)


@on_every_device
def test_experts_of_the_wrong_shape_fail_the_same_way() -> None:
    with harness.windows(PAIR) as (attention, ffn):
        flight = ask(attention)
        run = harness.runner(ExpertServer(ffn, lambda rows, *_: rows[:1]))
        served, combined = together(run, flight.combine)
        assert isinstance(served, afd_ops.ArgumentError) and "expert_out has 1 rows" in str(served)
        with raises(attention, afd_ops.PeerFailedError):
            raise combined


@on_every_device
def test_a_server_ends_when_every_attention_rank_has_left() -> None:
    with harness.windows(Topology(2, 1, 2)) as (first, second, ffn):
        outcome: list[Any] = []
        run = harness.runner(server_of(ffn))
        thread = threading.Thread(target=lambda: outcome.extend(together(run)))
        thread.start()
        ask(first).assert_answered()
        first.close()
        for _ in range(3):
            ask(second).assert_answered()
        second.close()
        thread.join(5)
        assert outcome == [None]


@on_every_device
def test_stop_ends_a_server() -> None:
    with harness.windows(PAIR) as (_, ffn):
        server = server_of(ffn)
        threading.Timer(0.05, server.stop).start()
        assert together(server.run) == [None]


@on_every_device
def test_an_ffn_rank_that_leaves_early_is_named() -> None:
    with harness.windows(Topology(1, 2, 2)) as (attention, _, leaver):
        flight = ask(attention)
        threading.Timer(0.05, leaver.close).start()
        with (
            within(0.0, AT_ONCE),
            raises(attention, afd_ops.PeerLeftError, "rank 2 (ffn 1) closed its window") as caught,
        ):
            flight.combine()
        assert caught.value.peer == 1
    with harness.windows(Topology(1, 2, 2)) as (attention, leaver, _):
        leaver.close()
        with raises(attention, afd_ops.PeerLeftError, "rank 1 (ffn 0) closed its window") as caught:
            ask(attention)
        assert caught.value.op == "dispatch"


def test_a_watch_may_be_closed_by_what_it_calls() -> None:
    """fault: the thread goes on with descriptors that are closed, and ends with a KeyError."""
    raised: list[object] = []
    with subprocess.Popen(["sleep", "60"]) as first, subprocess.Popen(["sleep", "60"]) as second:
        watch = ProcessWatch({0: first.pid, 1: second.pid}, lambda peer: watch.close())
        thread, threading.excepthook = watch._thread, lambda args: raised.append(args.exc_value)
        try:
            first.kill()
            assert thread is not None
            thread.join(10)
        finally:
            second.kill()
            threading.excepthook = threading.__excepthook__
    assert not thread.is_alive() and raised == [] and watch.ended == (0,)


# Lanes, rings and tickets.


@pytest.mark.parametrize("depth", [1, 3])
def test_more_in_flight_than_rings_is_an_error_that_loses_nothing(depth: int) -> None:
    """fault: the oldest request is overwritten, or the writer waits for ever for a ring."""
    with harness.windows(PAIR, depth=depth, stages=2) as (attention, ffn):
        flights = [ask(attention, layer) for layer in range(depth)]
        for _ in range(2):
            with raises(attention, afd_ops.RingBusyError, f"stage 0 has {depth} dispatches in flight (depth {depth})"):
                ask(attention, 9)
        flights.append(ask(attention, 7, stage=1))  # another lane is not concerned
        server = server_of(ffn)
        assert sum(server.step() for _ in range(depth + 1)) == depth + 1
        for flight in flights:
            flight.assert_answered()
        flights = [ask(attention, layer) for layer in range(depth)]
        assert sum(server.step() for _ in range(depth)) == depth
        for flight in flights:
            flight.assert_answered()
        attention.check()


def test_a_ticket_is_good_for_one_combine_of_its_own_lane_and_layer() -> None:
    with harness.serving(PAIR, stages=2) as (attention,):
        used, flight = ask(attention), ask(attention, layer=3, stage=1)
        used.assert_answered()
        with raises(attention, afd_ops.StaleError, "ticket with sequence 0 of stage 0 is not in flight"):
            used.combine()
        with raises(attention, afd_ops.ArgumentError, "ticket is of stage 1, but port is of stage 0"):
            RemoteExperts(3, stage=0).attach(attention).combine(flight.ticket, flight.step[3])
        with raises(attention, afd_ops.ArgumentError, "ticket is of layer 3, but port is of layer 2"):
            RemoteExperts(2, stage=1).attach(attention).combine(flight.ticket, flight.step[3])
        with raises(attention, afd_ops.ArgumentError, "base has size 3 in dimension 0, expected 4"):
            flight.module.combine(flight.ticket, flight.step[3][:3])
        flight.assert_answered()  # nothing was lost
        attention.check()


@on_every_device
@pytest.mark.parametrize("sequence", [-1, 1, 2**32])
def test_a_ticket_that_was_never_issued_is_refused(sequence: int) -> None:
    """A damaged ticket must not wait for an answer that was never asked for; -1 is how an idle ring is marked."""
    with harness.windows(PAIR, deadline=1.0) as (attention, ffn):
        flight = ask(attention)
        assert server_of(ffn).step() == 1
        flight.assert_answered()
        flight.ticket[0, 3:5] = torch.tensor([sequence]).view(torch.int32)
        with raises(attention, afd_ops.StaleError, f"sequence {sequence}"):
            flight.combine()


def test_an_item_is_good_for_one_reply() -> None:
    with harness.windows(PAIR) as (attention, ffn):
        flight, server = ask(attention), server_of(ffn)
        item = torch.ops.afd.arrive(server.port, ffn.id)
        rows, scales, offsets = torch.ops.afd.receive(item, server.port, ffn.id, 8)
        out = server.experts(rows, scales, offsets, 0)
        torch.ops.afd.reply(out, item, server.port, ffn.id)
        for again in (
            lambda: torch.ops.afd.reply(out, item, server.port, ffn.id),
            lambda: torch.ops.afd.receive(item, server.port, ffn.id, 8),
        ):
            with raises(ffn, afd_ops.StaleError, "item with sequence 0 of region 0 was answered before"):
                again()
        flight.assert_answered()


def test_a_port_without_a_layer_is_refused_before_anything_is_sent() -> None:
    """fault: the F rank finds layer -1 in the header and closes the region of a rank that only forgot an argument."""
    with harness.windows(PAIR) as (attention, ffn):
        x, ids, weights, _ = random_step(PAIR, 4)
        with raises(attention, afd_ops.ArgumentError, "layer"):
            torch.ops.afd.dispatch(x, ids, weights, attention.port(), attention.order, attention.id)
        assert server_of(ffn).step() == 0 and ffn.errors() == []


# close().


@on_every_device
def test_close_may_be_called_twice_and_ops_say_closed() -> None:
    with harness.windows(PAIR) as (attention, ffn):
        flight, server = ask(attention), server_of(ffn)
        item, _, _ = harness.take(server)
        for _ in range(2):
            attention.close()
            ffn.close()
        ops: list[tuple[Window, Callable[[], Any]]] = [
            (attention, flight.combine),
            (attention, lambda: flight.module.dispatch(*flight.step[:3])),
            (attention, lambda: harness.remote(attention)),
            (ffn, lambda: torch.ops.afd.arrive(server.port, ffn.id)),
            (ffn, lambda: torch.ops.afd.receive(item, server.port, ffn.id, 64)),
            (ffn, lambda: torch.ops.afd.reply(torch.zeros(64, 16), item, server.port, ffn.id)),
        ]
        for window, op in ops:
            with within(0.0, AT_ONCE), raises(window, afd_ops.ClosedError, f"window {window.id} is closed"):
                op()


@on_every_device
def test_close_ends_a_wait_in_another_thread() -> None:
    with harness.windows(PAIR) as (attention, _):
        flight = ask(attention)
        threading.Timer(0.1, attention.close).start()
        kind = afd_ops.AbortedError if harness.host_reads() else afd_ops.ClosedError  # by check()
        with within(0.1, 0.1 + SLACK), raises(attention, kind, "closed"):
            flight.combine()


@on_every_device
def test_a_server_whose_own_window_is_closed_ends_with_a_typed_error() -> None:
    with harness.windows(PAIR) as (_, ffn):
        run = harness.runner(server_of(ffn))
        threading.Timer(0.1, ffn.close).start()
        (outcome,) = together(run)
        assert isinstance(outcome, (afd_ops.AbortedError, afd_ops.ClosedError)), repr(outcome)


@on_every_device
def test_an_op_of_the_other_role_is_refused() -> None:
    with harness.windows(PAIR) as (attention, ffn):
        flight, item = ask(attention), torch.zeros(3, 8, dtype=torch.int32)
        wrong: list[tuple[Window, str, Callable[[], Any]]] = [
            (
                attention,
                "rank 0 (attention 0)",
                lambda: torch.ops.afd.arrive(attention.port(), attention.id),
            ),
            (attention, "rank 0 (attention 0)", lambda: torch.ops.afd.receive(item, attention.port(), attention.id, 0)),
            (
                attention,
                "rank 0 (attention 0)",
                lambda: torch.ops.afd.reply(torch.zeros(0, 16), item, attention.port(), attention.id),
            ),
            (ffn, "rank 1 (ffn 0)", lambda: torch.ops.afd.dispatch(*flight.step[:3], ffn.port(0), ffn.order, ffn.id)),
            (
                ffn,
                "rank 1 (ffn 0)",
                lambda: torch.ops.afd.combine(flight.ticket, flight.step[3], ffn.port(0), ffn.order, ffn.id),
            ),
        ]
        for window, who, op in wrong:
            with raises(window, afd_ops.ArgumentError, f"window {window.id} belongs to {who}, but this op is for"):
                op()
        with pytest.raises(ValueError, match=re.escape("rank 1 (ffn 0), expected an attention rank")):
            RemoteExperts(0).attach(ffn)
        with pytest.raises(ValueError, match=re.escape("rank 0 (attention 0), expected an ffn rank")):
            server_of(attention)
        assert server_of(ffn).step() == 1
        flight.assert_answered()


@on_every_device
@pytest.mark.parametrize("unknown", [-1, 0, 2**16 - 1, 2**16, 2**40])
def test_a_window_that_never_existed_is_named(unknown: int) -> None:
    with harness.windows(PAIR) as (attention, _), raises(attention, afd_ops.ClosedError, f"window {unknown} does not"):
        torch.ops.afd.arrive(attention.port(), unknown)


# Memory that is gone. In a process of its own, because what fails here takes the process along.


def _open_shared() -> list[Window]:
    windows = construct(PAIR)
    assert all(isinstance(window, Window) for window in windows), windows
    return windows


def _check_after_close() -> None:
    for window in _open_shared():
        window.close()
        window.errors()
        window.stats()
        with suppress(afd_ops.ClosedError):
            window.check()


def _module_after_close() -> None:
    attention, ffn = _open_shared()
    module = RemoteExperts(0).attach(attention)
    attention.close()
    ffn.close()
    with pytest.raises(afd_ops.ClosedError):
        module(*random_step(PAIR, 4))
    with pytest.raises(afd_ops.ClosedError):
        server_of(ffn).run()


def _poison_after_close() -> None:
    for window in _open_shared():
        window.close()
        with suppress(afd_ops.ClosedError):
            window.poison()


def _reset_after_close() -> None:
    windows = _open_shared()
    for window in windows:
        window.close()
    outcomes = together(*(window.reset for window in windows))
    assert [type(outcome) for outcome in outcomes] == [afd_ops.ClosedError] * 2, outcomes


def _op_after_collection(heap: Callable[[int], Any]) -> None:
    windows = construct(PAIR, heap=heap)
    window, port, step = windows[0].id, windows[0].port(0), random_step(PAIR, 4)
    memory = [weakref.ref(tensor) for tensor in getattr(windows[0].heap, "segments", [])]
    del windows, heap
    gc.collect()
    with suppress(RuntimeError):  # refused, or served from memory that is still there: both will do
        torch.ops.afd.dispatch(*step[:3], port, torch.zeros(1, dtype=torch.int32), window)
        assert all(tensor() is not None for tensor in memory), "wrote to memory that was freed"


def _shared_op_after_collection() -> None:
    _op_after_collection(lambda rank: ShmHeap())


def _local_op_after_collection() -> None:
    heaps = dict.fromkeys((0, 1), LocalHeap())  # pop keeps no reference
    _op_after_collection(heaps.pop)


def _peer_after_close() -> None:
    """The survivor's ops and close() after its peer has given its memory back."""
    attention, ffn = _open_shared()
    flight = ask(attention)
    ffn.close()
    with raises(attention, afd_ops.PeerLeftError):
        flight.combine()
    attention.close()


@pytest.mark.parametrize(
    "body",
    [
        _check_after_close,
        _module_after_close,
        _poison_after_close,
        _reset_after_close,
        _shared_op_after_collection,
        _local_op_after_collection,
        _peer_after_close,
    ],
    ids=lambda body: body.__name__.strip("_"),
)
def test_nothing_touches_memory_that_was_given_back(body: Callable[[], None]) -> None:
    """faults: a call on a closed window, or an op after its window was garbage collected, touches unmapped memory and
    ends the process with SIGSEGV."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "afd_ops", "harness", "flights", "test_window"])
    child = context.Process(target=body, daemon=True)
    child.start()
    child.join(30)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0, "-11 is SIGSEGV"
