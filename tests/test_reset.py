"""What becomes of requests in flight: exceptions between dispatch and combine, and reset(). Ranks are threads of this
process.

What ends a wait is tested on every device; flights.py says where an error is raised there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import harness
import pytest
import torch
from flights import AT_ONCE, PAIR, SLACK, Flight, ask, poisoned, raises, server_of, within
from harness import random_step, reset, together
from torch import Tensor

import afd_ops
from afd_ops import _C, ExpertServer, RemoteExperts, Topology

pytestmark = pytest.mark.usefixtures("seed")
on_every_device = pytest.mark.usefixtures("device")

# An exception between dispatch and combine.


@on_every_device
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_exception_between_dispatch_and_combine_stops_the_window_until_reset(kind: type[BaseException]) -> None:
    """fault: the reply that is on its way pairs with the next request and looks plausible."""
    with harness.windows(PAIR) as windows:
        attention, ffn = windows
        with pytest.raises(kind, match="in the shared expert"), attention.step():
            flight = ask(attention)
            raise kind("in the shared expert")
        assert poisoned(ffn) == [True]
        for op in (flight.combine, lambda: ask(attention)):
            with raises(attention, afd_ops.RankFailedError, "rank 0 (attention 0) gave up on this window"):
                op()
        reset(windows)
        with raises(attention, afd_ops.StaleError):
            flight.combine()
        if not harness.host_reads():
            reset(windows)  # a kernel cannot raise: it stops the window
        flight = ask(attention)
        assert server_of(ffn).step() == 1
        flight.assert_answered()


@on_every_device
def test_an_exception_with_nothing_in_flight_stops_nothing() -> None:
    with harness.serving(PAIR) as (attention,):
        for _ in range(2):
            with pytest.raises(ValueError, match="elsewhere"), attention.step():
                ask(attention).assert_answered()
                raise ValueError("elsewhere")
        with pytest.raises(afd_ops.ArgumentError, match="topk_ids"), attention.step():
            x, ids, weights, _ = random_step(PAIR, 3)
            harness.remote(attention).dispatch(x[:2], ids, weights[:2])
        with attention.step():
            ask(attention).assert_answered()


@on_every_device
def test_a_step_that_has_combined_an_older_ticket_still_stops_the_window() -> None:
    """fault: as many are in flight as before the step, and nobody is told of the one that will not be combined."""
    with harness.windows(PAIR) as (attention, ffn):
        old = ask(attention)
        assert server_of(ffn).step() == 1
        with pytest.raises(ValueError), attention.step():
            old.assert_answered()
            ask(attention)
            raise ValueError
        assert poisoned(ffn) == [True]


@on_every_device
@pytest.mark.parametrize("mine", [True, False])
def test_a_step_answers_for_its_own_thread_only(mine: bool) -> None:
    """faults: another lane combines meanwhile, and the lane that raises is not noticed; or it dispatches meanwhile, and
    a lane that raises with nothing in flight stops both."""
    with harness.windows(PAIR, stages=2) as (attention, ffn):
        server, elsewhere = server_of(ffn), list[Flight]()

        def other(work: Callable[[], Any]) -> None:
            (outcome,) = together(work)
            assert not isinstance(outcome, BaseException), outcome

        if mine:
            other(lambda: elsewhere.append(ask(attention, stage=1)))
            assert server.step() == 1
        with pytest.raises(ValueError), attention.step():
            if mine:
                ask(attention)
                other(elsewhere[0].assert_answered)
            else:
                other(lambda: elsewhere.append(ask(attention, stage=1)))
            raise ValueError
        assert poisoned(ffn) == [mine]
        if not mine:
            assert server.step() == 1
            other(elsewhere[0].assert_answered)


def test_a_step_that_raises_does_not_hide_the_peer_that_failed() -> None:
    """fault: the window's own poison comes first, and check() names this rank instead of the peer."""
    with harness.windows(PAIR) as (attention, ffn):
        with pytest.raises(ValueError), attention.step():
            ask(attention)
            ffn.poison()
            raise ValueError
        with pytest.raises(afd_ops.PeerFailedError):
            attention.check()
        assert [record["peer"] for record in attention.errors()] == [0]


def test_a_step_may_combine_its_lanes_in_any_order_and_leave_to_another_thread_what_it_sends() -> None:
    """fault: a lane of an earlier step is in flight, this step's has come back, and an exception stops both."""
    with harness.windows(PAIR, stages=2) as (attention, ffn):
        old, server = ask(attention), server_of(ffn)
        assert server.step() == 1
        with pytest.raises(ValueError), attention.step():
            new = ask(attention, stage=1)
            assert server.step() == 1
            assert together(new.assert_answered) == [None]
            raise ValueError
        attention.check()
        old.assert_answered()


@pytest.mark.parametrize("refused", ["argument", "ring"])
def test_a_refused_call_does_not_stop_what_is_in_flight(refused: str) -> None:
    """fault: an error that sent nothing poisons the window, because other lanes of it happen to be in flight."""
    with harness.windows(PAIR, stages=2, depth=1) as (attention, ffn):
        flight, module = ask(attention), RemoteExperts(0, stage=int(refused == "argument")).attach(attention)
        kind = {"argument": afd_ops.ArgumentError, "ring": afd_ops.RingBusyError}[refused]
        x, ids, weights, base = random_step(PAIR, 4)
        with pytest.raises(kind):
            module(x, ids if refused == "ring" else ids + 9, weights, base)
        attention.check()
        assert server_of(ffn).step() == 1
        flight.assert_answered()


def test_a_step_ends_with_a_check() -> None:
    with harness.windows(PAIR) as (attention, ffn), pytest.raises(afd_ops.PeerFailedError), attention.step():
        ffn.poison()  # nothing inside the step waits for it


# reset().


def test_reset_drops_what_is_in_flight_and_refuses_it_afterwards() -> None:
    """faults: a ticket or item of before is honoured; a late reply pairs with the next request."""
    with harness.windows(PAIR, stages=2) as windows:
        attention, ffn = windows
        ids, server = [window.id for window in windows], server_of(ffn)
        old = [ask(attention), ask(attention), ask(attention, 1, stage=1)]
        item = torch.ops.afd.arrive(server.port, ffn.id)
        rows, _, _ = torch.ops.afd.receive(item, server.port, ffn.id, 64)
        assert _C.in_flight(attention.id) == 3
        reset(windows)
        assert [window.id for window in windows] == ids
        assert [window.generation for window in windows] == [1, 1]
        assert _C.in_flight(attention.id) == 0
        assert server.step() == 0, "no slot of before is left"

        with raises(ffn, afd_ops.StaleError, "item is of generation 0, but the window is at 1"):
            torch.ops.afd.receive(item, server.port, ffn.id, 64)
        new = [old[0].module, old[0].module, old[2].module]  # ports and rings as before
        flights = [
            Flight(attention, module, module.dispatch(*step[:3]), step)
            for module, step in ((module, random_step(PAIR, 5)) for module in new)
        ]
        with raises(ffn, afd_ops.StaleError, "item is of generation 0, but the window is at 1"):
            torch.ops.afd.reply(rows, item, server.port, ffn.id)
        for flight in old:
            with raises(attention, afd_ops.StaleError, "ticket is of generation 0, but the window is at 1"):
                flight.combine()
        while server.step():
            pass
        for flight in flights:
            flight.assert_answered()
        attention.check()


@on_every_device
def test_a_reply_of_before_a_reset_is_a_protocol_error_not_a_result() -> None:
    """What a store that lands late would leave in the slot: a complete reply, of the generation before."""
    with harness.windows(PAIR) as windows:
        attention, ffn = windows
        flight = ask(attention)
        assert server_of(ffn).step() == 1
        harness.synchronize()
        late = harness.slots_of(attention)[0].clone()
        reset(windows)
        flight = ask(attention)
        harness.slots_of(attention)[0] = late
        harness.word(attention, attention.geometry.layout["flags"]).fill_(_C.READY)
        harness.synchronize()
        with raises(attention, afd_ops.ProtocolError, "generation is 0, expected 1"):
            flight.combine()


@on_every_device
@pytest.mark.parametrize("stopped_by", ["timeout", "attention", "ffn", "garbage"])
def test_reset_makes_a_stopped_window_work_again(stopped_by: str) -> None:
    with harness.windows(Topology(2, 2, 4), deadline=0.5) as windows:
        attention, ffn = windows[:2], windows[2:]
        flight = ask(attention[0])
        if stopped_by == "timeout":
            with raises(attention[0], afd_ops.PeerTimeoutError):
                flight.combine()
        elif stopped_by == "garbage":
            harness.poke(ffn[0], 0, "magic", 7)
            assert server_of(ffn[0]).step() == 0
        else:
            {"attention": attention, "ffn": ffn}[stopped_by][1].poison()
        for window in ffn:
            with suppress(RuntimeError):
                server_of(window).step()
        reset(windows)
        for window in windows:
            window.check()
            assert window.errors() == [] and True not in poisoned(window)
        flights = [ask(window) for window in attention]
        assert [server_of(window).step() for window in ffn] == [2, 2]
        for flight in flights:
            flight.assert_answered()


def test_reset_ends_ops_and_server_loops_that_wait() -> None:
    with harness.windows(Topology(1, 2, 2)) as windows:
        attention, served, _ = windows
        flight = ask(attention)
        delayed = [lambda window=window: (time.sleep(0.1), window.reset())[1] for window in windows]
        with within(0.1, 0.1 + SLACK):
            combined, ran, *resets = together(flight.combine, server_of(served).run, *delayed)
        assert resets == [None] * 3
        assert isinstance(ran, afd_ops.AbortedError)
        with raises(attention, afd_ops.AbortedError):
            raise combined
        for window in windows:
            window.check()


def test_a_server_that_computes_during_a_reset_does_not_stop_the_next_generation() -> None:
    """fault: experts that were at work while everybody reset answer with an old item; that is refused, and the server
    loop, seeing an error, poisons the generation that has just begun."""
    started, go_on = threading.Event(), threading.Event()

    def slow(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        started.set()
        assert go_on.wait(10)
        return rows

    with harness.windows(PAIR) as windows:
        attention, ffn = windows
        outcome: list[Any] = []
        thread = threading.Thread(target=lambda: outcome.extend(together(ExpertServer(ffn, slow).run)))
        ask(attention)
        thread.start()
        assert started.wait(10)
        reset(windows)
        go_on.set()
        thread.join(10)
        attention.check()
        ffn.check()
        assert isinstance(outcome[0], (afd_ops.AbortedError, afd_ops.StaleError))
        flight = ask(attention)
        assert server_of(ffn).step() == 1
        flight.assert_answered()


@pytest.mark.parametrize("then", ["reset", "closed"])
def test_an_interrupt_stays_one_whatever_became_of_the_window(then: str) -> None:
    """fault: Ctrl-C while experts were at work in a window that another thread had reset or closed came out of run() as
    AbortedError or ClosedError, after which an engine opens the next window and goes on."""
    with harness.windows(PAIR) as windows:
        attention, ffn = windows

        def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
            if then == "reset":
                reset(windows)
            else:
                ffn.close()
            raise KeyboardInterrupt

        flight = ask(attention)
        with pytest.raises(KeyboardInterrupt):
            ExpertServer(ffn, experts).run()
        if then == "reset":
            attention.check()
            again = ask(attention)
            assert server_of(ffn).step() == 1
            again.assert_answered()
        else:
            with raises(attention, afd_ops.PeerLeftError):
                flight.combine()


def test_a_step_that_spans_a_reset_does_not_stop_the_next_generation() -> None:
    """fault: one lane is refused its old ticket, and that exception poisons what another lane has since sent."""
    with harness.windows(PAIR, stages=2) as windows:
        attention, ffn = windows
        with pytest.raises(afd_ops.StaleError), attention.step():
            old = ask(attention)
            reset(windows)
            flight = ask(attention, stage=1)
            old.combine()
        attention.check()
        assert server_of(ffn).step() == 1
        flight.assert_answered()


@on_every_device
def test_what_a_reset_has_dropped_is_nobody_s_any_more() -> None:
    """fault: a request of before counts as in flight, and a step that raises with nothing of its own stops both."""
    with harness.windows(PAIR) as windows:
        attention, ffn = windows
        module, step, server = harness.remote(attention), random_step(PAIR, 4), server_of(ffn)
        module.dispatch(*step[:3])
        harness.synchronize()
        reset(windows)
        with pytest.raises(ValueError), attention.step():
            flight = Flight(attention, module, module.dispatch(*step[:3]), step)
            assert server.step() == 1
            flight.assert_answered()
            raise ValueError
        attention.check()


@on_every_device
def test_a_poison_that_a_reset_has_overtaken_is_dropped() -> None:
    """fault: a step that a reset has ended poisons the window, and the next generation begins stopped."""
    with harness.windows(PAIR) as windows:
        attention, ffn = windows
        reset(windows)
        attention.poison(0)
        attention.check()
        assert poisoned(ffn) == [False]
        attention.poison(1)
        with pytest.raises(afd_ops.RankFailedError):
            attention.check()


def test_after_a_reset_that_failed_check_still_names_the_dead() -> None:
    """fault: a window that refuses every op for good is called healthy."""
    with harness.windows(PAIR) as (attention, _):
        _C.peer_gone(attention.id, 0)
        _C.set_abort(attention.id)
        with pytest.raises(afd_ops.PeerFailedError, match="process ended"):
            attention.check()
        assert attention.errors() == []


@on_every_device
def test_during_a_reset_nobody_is_poisoned() -> None:
    """fault: as above; the peer has cleared its words already when they are written."""
    with harness.windows(PAIR) as (attention, ffn):
        _C.set_abort(attention.id)
        attention.poison()
        assert attention.errors() == [] and poisoned(ffn) == [False]


def test_reset_keeps_the_news_that_a_process_has_ended() -> None:
    """fault: a peer dies between the barriers, the word that says so is cleared with the others, and combine waits out
    its deadline."""
    with harness.windows(PAIR) as windows:
        attention, _ = windows
        assert attention._watch is not None
        attention._watch.ended = (0,)
        reset(windows)
        with pytest.raises(afd_ops.PeerFailedError, match="process ended"):
            attention.check()


@on_every_device
def test_reset_with_a_rank_missing_raises_within_the_timeout() -> None:
    with harness.windows(Topology(1, 2, 2)) as (attention, ffn, _):
        for window in (attention, ffn):
            window.bootstrap.timeout = 0.3
        with within(0.3, 0.3 + SLACK):
            outcomes = together(attention.reset, ffn.reset)
        for outcome in outcomes:
            assert isinstance(outcome, afd_ops.BootstrapError) and "for rank 2 " in str(outcome)
        with within(0.0, AT_ONCE):
            with raises(attention, afd_ops.AbortedError):
                ask(attention)
            attention.close()


@on_every_device
def test_reset_many_times() -> None:
    with harness.windows(Topology(2, 1, 2)) as windows:
        for turn in range(1, 11):
            flights = [ask(window) for window in windows[:2]]
            assert server_of(windows[2]).step() == 2
            flights[turn % 2].assert_answered()  # the other stays in flight
            reset(windows)
            assert {window.generation for window in windows} == {turn}
