"""What an engine does beside ordinary steps: cancel one, drain and stop a server, dummy steps."""

from __future__ import annotations

import contextlib
import re
import threading
import time

import harness
import pytest
import torch
from harness import expected, random_step
from puppets import AT_ONCE, PATIENCE, SLACK
from test_failures import LAYER, until
from torch import Tensor

import afd_ops
from afd_ops import _C, ExpertServer, RemoteExperts, Topology

pytestmark = pytest.mark.usefixtures("seed")
on_every_device = pytest.mark.usefixtures("device")


# Cancel.


@on_every_device
@pytest.mark.parametrize("depth", [1, 2])
def test_a_cancelled_step_frees_its_ring_and_the_next_is_exact(depth: int) -> None:
    topology = Topology(1, 2, 4)
    with harness.serving(topology, depth=depth) as (window,):
        module = harness.remote(window, LAYER)
        for turn in range(5):
            tickets = []
            for tokens in range(depth):
                tickets.append(module.dispatch(*random_step(topology, 8 * tokens)[:3]))
            for ticket in tickets[:: 1 if turn % 2 else -1]:
                with window.step():
                    module.cancel(ticket)
            assert _C.in_flight(window.id) == 0
            for ticket in tickets if harness.host_reads() else ():  # where a kernel finds it, the window stops
                with pytest.raises(afd_ops.StaleError, match="not in flight"), window.step():
                    module.combine(ticket, torch.zeros(ticket.shape[0] - 1, 16))
                with pytest.raises(afd_ops.StaleError, match="not in flight"), window.step():
                    module.cancel(ticket)
            step = random_step(topology, 8)
            assert torch.equal(module(*step), expected(topology, *step))


@on_every_device
def test_a_cancelled_step_between_two_others_disturbs_neither() -> None:
    topology = Topology(2, 2, 4)
    with harness.serving(topology, depth=3) as windows:
        for _ in range(4):
            for window in windows:
                module = harness.remote(window, LAYER)
                steps = [random_step(topology, 8) for _ in range(3)]
                first, dropped, last = [module.dispatch(*step[:3]) for step in steps]
                module.cancel(dropped)
                assert torch.equal(module.combine(last, steps[2][3]), expected(topology, *steps[2]))
                assert torch.equal(module.combine(first, steps[0][3]), expected(topology, *steps[0]))


def test_a_dispatch_abandoned_outside_a_step_keeps_its_ring_until_it_is_cancelled() -> None:
    topology = Topology(1, 2, 4)
    with harness.serving(topology, depth=1) as (window,):
        module, step = RemoteExperts(LAYER).attach(window), random_step(topology, 8)
        with contextlib.suppress(ValueError):
            ticket = module.dispatch(*step[:3])
            raise ValueError("in the shared expert")
        window.check()
        with pytest.raises(afd_ops.RingBusyError):
            module(*step)
        module.cancel(ticket)
        assert torch.equal(module(*step), expected(topology, *step))


@on_every_device
def test_cancel_waits_for_the_answers_no_longer_than_the_deadline() -> None:
    with harness.windows(Topology(1, 1, 2), deadline=0.3) as (window, _):
        module = harness.remote(window, LAYER)
        ticket = module.dispatch(*random_step(window.topology, 4)[:3])
        begin = time.monotonic()
        with pytest.raises(afd_ops.PeerTimeoutError, match=re.escape("rank 1 (ffn 0) did not answer")), window.step():
            module.cancel(ticket)
            harness.synchronize()
        assert 0.28 < time.monotonic() - begin < 0.3 + SLACK


# drain() and stop().


@on_every_device
def test_drain_answers_what_has_arrived_and_stops() -> None:
    """Lanes, rings and layers that do not share an item; what comes later is left for another server."""
    topology = Topology(2, 1, 4)
    with harness.windows(topology, stages=2, depth=2) as (*attention, ffn):
        server, modules = ExpertServer(ffn, harness.experts_of(topology, 0)), []
        for window in attention:
            for layer, stage in ((1, 0), (2, 0), (1, 1), (3, 1)):
                module, step = harness.remote(window, layer, stage), random_step(topology, 6)
                modules.append((module, module.dispatch(*step[:3]), step))
        harness.synchronize()
        server.drain()
        begin = time.monotonic()
        server.run()
        harness.synchronize()
        assert time.monotonic() - begin < AT_ONCE
        assert ffn.stats()["replies"] == 8
        for module, ticket, step in modules:
            assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))

        module, step = harness.remote(attention[0], LAYER), random_step(topology, 6)
        ticket = module.dispatch(*step[:3])
        harness.synchronize()
        assert ffn.stats()["replies"] == 8
        assert ExpertServer(ffn, harness.experts_of(topology, 0)).step() == 1
        assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))


@on_every_device
@pytest.mark.parametrize(("how", "answered"), [("stop", 1), ("drain", 2)])
def test_stop_ends_a_server_after_its_item_and_drain_after_all_that_came(how: str, answered: int) -> None:
    topology, inside, go_on = Topology(1, 1, 2), threading.Event(), threading.Event()

    def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        inside.set()
        assert go_on.wait(PATIENCE)
        return harness.experts_of(topology, 0)(rows, scales, offsets, layer)

    with harness.windows(topology, stages=2) as (window, ffn):
        server = ExpertServer(ffn, experts)
        thread = threading.Thread(target=server.run, daemon=True)
        step = [torch.ones(4, 16), torch.zeros(4, 2).int(), torch.ones(4, 2), torch.zeros(4, 16)]
        step = [t.to(harness.DEVICE) for t in step]
        modules = [harness.remote(window, layer, layer) for layer in (0, 1)]
        tickets = [modules[0].dispatch(*step[:3])]
        harness.synchronize()
        thread.start()
        assert inside.wait(PATIENCE)
        tickets.append(modules[1].dispatch(*step[:3]))
        harness.synchronize()
        getattr(server, how)()
        go_on.set()
        thread.join(PATIENCE)
        harness.synchronize()
        assert not thread.is_alive() and ffn.stats()["replies"] == answered
        server.run()  # stays stopped
        assert ffn.stats()["replies"] == answered
        if how == "stop":
            assert ExpertServer(ffn, experts).step() == 1
        for module, ticket in zip(modules, tickets, strict=True):
            assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))


def test_drain_does_not_end_while_requests_keep_coming() -> None:
    """The limit of drain(): an engine stops its senders first."""
    topology, more = Topology(1, 1, 2), True
    with harness.windows(topology, poll_interval=0.5) as (window, ffn):
        server = ExpertServer(ffn, harness.experts_of(topology, 0))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        module, step = RemoteExperts(LAYER).attach(window), random_step(topology, 4)

        def send() -> None:
            while more:
                assert torch.equal(module.combine(module.dispatch(*step[:3]), step[3]), expected(topology, *step))

        sender = threading.Thread(target=send, daemon=True)
        sender.start()
        server.drain()
        replies = ffn.stats()["replies"]
        until(lambda: ffn.stats()["replies"] > replies + 20)
        more = False
        thread.join(PATIENCE)
        sender.join(PATIENCE)
        assert not thread.is_alive() and not sender.is_alive()


# Dummy steps.


def test_dummy_steps_cost_an_ffn_rank_nothing_but_the_flag() -> None:
    """An idle attention rank keeps step with T = 0, or with padding alone: no rows, no experts, only headers cross."""
    topology = Topology(2, 2, 4)

    def never(*_: object) -> Tensor:
        raise AssertionError("the experts were called for nothing")

    with harness.serving(topology, lambda *_: never) as windows:
        header = _C.HEADER_BYTES + 4 * windows[0].geometry.local_experts
        for window in windows:
            module = RemoteExperts(LAYER).attach(window)
            for turn in range(10):
                tokens = 4 * (turn % 2)
                x, _, weights, base = random_step(topology, tokens)
                out = module(x, torch.full((tokens, 2), -1), weights, base)
                assert torch.equal(out, base)
            assert window.stats()["bytes_sent"] == (10 * header, 10 * header)


@on_every_device
def test_dummy_steps_beside_real_ones_change_nothing() -> None:
    topology, batches = Topology(2, 1, 4), list[int]()

    def counting(topology: Topology, rank: int) -> afd_ops.Experts:
        inner = harness.experts_of(topology, rank)

        def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
            batches.append(len(rows))
            return inner(rows, scales, offsets, layer)

        return experts

    with harness.windows(topology) as (busy, idle, ffn):
        server = ExpertServer(ffn, counting(topology, 0))
        modules = [harness.remote(window, LAYER) for window in (busy, idle)]
        for _ in range(5):
            steps = [random_step(topology, tokens) for tokens in (8, 0)]
            steps[0][1][0, 0] = 1
            tickets = [module.dispatch(*step[:3]) for module, step in zip(modules, steps, strict=True)]
            harness.synchronize()
            assert server.step() == 2, "both in one item"
            for module, ticket, step in zip(modules, tickets, steps, strict=True):
                assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))
        harness.synchronize()
        stats = ffn.stats()
        assert (stats["items"], stats["replies"], stats["rows"]) == (5, 10, sum(batches))
        assert stats["bytes_sent"][1] == 5 * _C.HEADER_BYTES
