"""Going on after a fault: reset, a new window, degraded mode."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from harness import expected, random_step
from puppets import (
    ARRIVE,
    AT_ONCE,
    BETWEEN,
    HELD,
    PATIENCE,
    Cluster,
    Puppet,
    Rank,
    Seen,
)
from test_failures import LAYER, STAGE, WARM, serving
from torch import Tensor

import afd_ops
from afd_ops import ExpertServer, RemoteExperts, Topology, Window

pytestmark = pytest.mark.usefixtures("seed")
on_every_device = pytest.mark.usefixtures("device")

# reset(), all ranks alive.


def ask(puppet: Puppet, stage: int) -> None:
    """A dispatch whose ticket is kept."""
    module = RemoteExperts(LAYER, stage).attach(puppet.window)
    step = random_step(puppet.window.topology, 6)
    puppet.kept = [*(puppet.kept or []), (module, module.dispatch(*step[:3]), step)]


def combine_kept(puppet: Puppet) -> list[Seen | None]:
    """How the kept tickets fare; None: exact."""
    seen: list[Seen | None] = []
    for module, ticket, step in puppet.kept:
        try:
            with puppet.window.step():
                out = module.combine(ticket, step[3])
            assert torch.equal(out, expected(puppet.window.topology, *step)), "not exact"
            seen.append(None)
        except afd_ops.AfdError as error:
            seen.append(Seen.of(error))
    return seen


def assert_refused(rank: Rank, generation: int) -> None:
    for seen in rank.do("call", combine_kept):
        assert seen is not None and seen.kind == "StaleError", seen
        assert f"ticket is of generation 0, but the window is at {generation}" in seen.text


def time_out(cluster: Cluster) -> None:
    (asking, _), (late, _) = cluster.attention, cluster.ffn
    late.do("hold", ARRIVE)
    late.arrived(ARRIVE)
    asking.tell("step", LAYER, STAGE)
    assert asking.error("step")[0].kind == "PeerTimeoutError"
    late.do("hold")


def interrupt_attention(cluster: Cluster) -> None:
    victim = cluster.attention[1]
    victim.tell("step", LAYER, STAGE, BETWEEN)
    victim.arrived(BETWEEN)
    victim.tell("exception")
    assert victim.error("step")[0].kind == "Boom"


def interrupt_experts(cluster: Cluster) -> None:
    (asking, _), (victim, _) = cluster.attention, cluster.ffn
    victim.do("hold", HELD)
    asking.tell("step", LAYER, STAGE)
    victim.arrived(HELD)
    victim.tell("exception")
    assert asking.error("step")[0].kind == "PeerFailedError"
    victim.do("hold")


def give_up(cluster: Cluster) -> None:
    cluster.attention[0].do("poison")


def nothing(cluster: Cluster) -> None:
    pass


@pytest.mark.parametrize("fault", [nothing, time_out, interrupt_attention, interrupt_experts, give_up])
def test_reset_makes_every_rank_go_on_and_nothing_of_before_is_paired(fault: Callable[[Cluster], None]) -> None:
    """fault: a late reply of before pairs with the next request of that ring and looks plausible."""
    with serving(deadline=0.6) as cluster:
        ids = [rank.do("call", window_id) for rank in cluster.ranks]
        for rank in cluster.attention:
            for _ in range(2):
                rank.do("call", ask, 0)  # answered, and never combined: its replies are in the slots at the reset
        fault(cluster)
        for turn in (1, 2):
            for rank in cluster.ffn:
                rank.tell("stop")
            for rank in cluster.ffn:
                rank.hear("stop")
                rank.hear("serve")
            cluster.all("reset")
            assert cluster.all("generation") == [turn] * 4
            assert [rank.do("call", window_id) for rank in cluster.ranks] == ids
            assert cluster.all("errors") == [[]] * 4
            for rank in cluster.ffn:
                rank.tell("serve")
            for rank in cluster.attention:
                assert_refused(rank, turn)
            for stage in (0, 1):
                cluster.all("steps", 3, LAYER, stage, among=cluster.attention)
            for rank in cluster.attention:
                assert_refused(rank, turn)
            cluster.all("check")
        cluster.end(cluster.attention)
        for rank in cluster.ffn:
            rank.value("serve")
        cluster.end(cluster.ffn)


def window_id(puppet: Puppet) -> int:
    return puppet.window.id


# After a death: a new window.


@pytest.mark.parametrize("meet", ["on the store of before", "at a new address"])
@pytest.mark.parametrize("victim", [0, 1, 3])
def test_survivors_and_a_restarted_rank_are_at_work_again_within_two_seconds(victim: int, meet: str) -> None:
    with serving() as cluster:
        dead = cluster.ranks[victim]
        survivors = [rank for rank in cluster.ranks if rank is not dead]
        cluster.all("hold", BETWEEN, among=cluster.attention)
        for rank in cluster.attention:
            rank.tell("step", LAYER, STAGE, BETWEEN)
        for rank in cluster.attention:
            rank.arrived(BETWEEN)
        dead.signal(signal.SIGKILL)
        begin = time.monotonic()

        for rank in survivors:  # each as soon as it knows, without a word to the others
            if rank.role == "attention":
                if dead.role == "ffn":
                    rank.do("hold")
                    rank.hear("step")  # exact if the answer was there, else typed: test_failures has it
                else:
                    rank.do("hold")
                    rank.value("step")
                asked = time.monotonic()
                rank.do("close")
                assert time.monotonic() - asked < AT_ONCE
        for rank in survivors:
            if rank.role == "ffn":
                rank.hear("serve")
                rank.do("close")
        assert cluster.all("leftovers", among=survivors) == [0, 0, 0]

        again = cluster.start(victim)
        cluster.ranks[victim] = again
        address = f"127.0.0.1:{harness.free_port()}" if meet == "at a new address" else ""
        cluster.all("open", "again", None, None, address)
        for rank in cluster.ffn:
            rank.tell("serve")
        cluster.all("steps", WARM, LAYER, STAGE, among=cluster.attention)
        took = time.monotonic() - begin
        print(f"{took:.2f} s from SIGKILL to {WARM} exact steps on every attention rank")
        assert took < 2.0
        cluster.end(cluster.attention)
        for rank in cluster.ffn:
            rank.value("serve")
        cluster.end(cluster.ffn)


def test_reset_with_a_dead_rank_names_it_and_close_still_works() -> None:
    with serving() as cluster:
        survivors, dead = cluster.ranks[:3], cluster.ranks[3]
        cluster.ffn[0].do("stop")
        cluster.ffn[0].value("serve")
        dead.signal(signal.SIGKILL)
        dead.process.join(PATIENCE)
        cluster.all("call", shorten, 0.5, among=survivors)
        for rank in survivors:
            rank.tell("reset")
        for rank in survivors:
            error, _ = rank.error("reset")
            assert error.kind == "BootstrapError" and "waited 0.5 s for rank 3 " in error.text
        cluster.end(survivors)


def shorten(puppet: Puppet, seconds: float) -> None:
    puppet.window.bootstrap.timeout = seconds


@pytest.mark.parametrize("exchange", [1, 2, 3, 4])
def test_a_rank_killed_during_construction_is_named_and_leaves_nothing(exchange: int) -> None:
    """1 validate, 2 allocate, 3 map, 4 the last barrier: killed before it says its word."""
    with Cluster() as cluster:
        survivors, victim = cluster.ranks[:3], cluster.ranks[3]
        cluster.all("call", loaded)
        for rank in cluster.ranks:
            rank.tell("call", open_halted, exchange, False, rank is victim)
        for rank in cluster.ranks:
            rank.arrived("exchange")
        victim.signal(signal.SIGKILL)
        for rank in survivors:
            error, _ = rank.error("call")
            assert error.kind == "BootstrapError" and "waited 1.0 s for rank 3 " in error.text
        assert cluster.all("leftovers", among=survivors) == [0] * 3
        cluster.ranks[3] = cluster.start(3)
        cluster.all("open", "again")
        cluster.end(cluster.ranks)


def test_a_rank_killed_before_its_memory_is_mapped_is_named_and_leaves_nothing() -> None:
    """fault: the error speaks of a process and of containers, and nobody knows which rank has died."""
    with Cluster() as cluster:
        survivors, victim = cluster.ranks[:3], cluster.ranks[3]
        cluster.all("call", loaded)
        for rank in cluster.ranks:
            rank.tell("call", open_halted, 2, True, True)
        for rank in cluster.ranks:
            rank.arrived("exchange")
        victim.signal(signal.SIGKILL)
        victim.process.join(PATIENCE)
        cluster.all("hold", among=survivors)
        for rank in survivors:
            error, _ = rank.error("call")
            assert error.kind == "BootstrapError" and "rank 3" in error.text, error
        assert cluster.all("leftovers", among=survivors) == [0] * 3


def loaded(puppet: Puppet) -> None:
    """Nothing, but now this file is loaded there."""


def open_halted(puppet: Puppet, halt: int, after: bool, stay: bool) -> None:
    """Opens a window; says when it comes to (or from) this exchange, and may stay there."""
    bootstrap = afd_ops.Bootstrap(puppet.store, puppet.rank, puppet.topology.world_size, name="first", timeout=1.0)
    gather, count = bootstrap.all_gather, 0

    def halted(payload: str = "") -> list[str]:
        nonlocal count
        count += 1
        answers = gather(payload) if after else []
        if count == halt and stay:
            puppet.stops = {"exchange"}
            puppet.reach("exchange")
        elif count == halt:
            puppet.connection.send(("at exchange", None))
        return answers if after else gather(payload)

    bootstrap.all_gather = halted  # type: ignore[method-assign]
    Window(puppet.topology, bootstrap, **puppet.sizes)


# Degraded mode.


def without(topology: Topology, ids: Tensor, *ranks: int) -> Tensor:
    """The ids, less those whose experts live on these FFN ranks."""
    owners = torch.tensor([owner for owner, _ in topology.expert_map] + [-1], device=ids.device)
    return torch.where(torch.isin(owners[ids], torch.tensor(ranks, device=ids.device)), -1, ids)


def affected(topology: Topology, ids: Tensor, *ranks: int) -> Tensor:
    return (without(topology, ids, *ranks) != ids).any(dim=1)


@contextlib.contextmanager
def served(topology: Topology, *ffn: int, **sizes: Any) -> Any:
    """All windows of this process; only these FFN ranks are served."""
    with harness.windows(topology, **sizes) as windows:
        servers = [ExpertServer(windows[topology.attention_size + f], harness.experts_of(topology, f)) for f in ffn]
        with harness.answering(servers):
            yield windows


def assert_degraded(window: Window, *masked: int, stage: int = 0, tokens: int = 8) -> None:
    """A step of which only the masked ranks' contributions are missing, and whose ticket says from which tokens."""
    topology, module = window.topology, harness.remote(window, LAYER, stage)
    x, ids, weights, base = random_step(topology, tokens)
    begin = time.monotonic()
    with window.step():
        ticket = module.dispatch(x, ids, weights)
        out = module.combine(ticket, base)
        harness.synchronize()
    assert time.monotonic() - begin < AT_ONCE
    assert torch.equal(window.affected(ticket), affected(topology, ids, *masked))
    assert torch.equal(out, expected(topology, x, without(topology, ids, *masked), weights, base))


@on_every_device
@pytest.mark.parametrize("masked", [(1,), (0, 2), (0, 1, 2)])
def test_a_masked_rank_gets_nothing_and_nobody_waits_for_it(masked: tuple[int, ...]) -> None:
    topology = Topology(2, 3, 7)
    with served(topology, *({0, 1, 2} - set(masked))) as windows:
        window = windows[0]
        for rank in masked:
            window.mask(rank)
        for turn in range(6):
            assert_degraded(window, *masked, tokens=(8, 0, 1, 16, 3, 8)[turn])
        assert [window.stats()["bytes_sent"][rank] for rank in masked] == [0] * len(masked)
        for rank in masked:
            server = ExpertServer(windows[2 + rank], harness.experts_of(topology, rank))
            assert server.step() == 0 and windows[2 + rank].errors() == []


@on_every_device
def test_a_mask_is_one_ranks_own_and_ends_with_reset() -> None:
    topology = Topology(2, 2, 4)
    with harness.windows(topology) as windows:
        windows[0].mask(1)
        for turn in range(2):
            servers = [ExpertServer(w, harness.experts_of(topology, w.role_rank)) for w in windows[2:]]
            with harness.answering(servers):
                assert_degraded(windows[0], *((1,) if turn == 0 else ()))
                assert_degraded(windows[1])
            if turn == 0:
                harness.reset(windows)


@on_every_device
def test_a_rank_masked_in_mid_step_may_answer_late_and_nothing_takes_it() -> None:
    """fault: the reply that nobody waited for is taken for the answer to the ring's next request."""
    topology = Topology(1, 2, 4)
    with served(topology, 0, depth=1) as windows:
        window, late = windows[0], ExpertServer(windows[2], harness.experts_of(topology, 1))
        module, step = harness.remote(window, LAYER), random_step(topology, 8)
        ticket = module.dispatch(*step[:3])
        harness.synchronize()
        window.mask(1)
        out = module.combine(ticket, step[3])
        assert torch.equal(out, expected(topology, step[0], without(topology, step[1], 1), *step[2:]))
        assert torch.equal(window.affected(ticket), affected(topology, step[1], 1))
        assert late.step() == 1  # its reply lands in a ring that has moved on
        for _ in range(3):
            assert_degraded(window, 1)


@on_every_device
def test_masking_from_another_thread_ends_the_wait() -> None:
    topology = Topology(1, 2, 4)
    with served(topology, 0) as windows:
        window = windows[0]
        module, (x, ids, weights, base) = harness.remote(window, LAYER), random_step(topology, 8)
        ticket = module.dispatch(x, ids, weights)
        threading.Timer(0.1, window.mask, [1]).start()
        begin = time.monotonic()
        out = module.combine(ticket, base)
        harness.synchronize()
        assert 0.09 < time.monotonic() - begin < AT_ONCE
        assert torch.equal(out, expected(topology, x, without(topology, ids, 1), weights, base))


@on_every_device
def test_affected_knows_more_than_32_ffn_ranks() -> None:
    topology = Topology(1, 66, 66)
    with harness.windows(topology, tokens=66, topk=1) as (window, *_):
        ids = torch.arange(66, device=harness.DEVICE).flip(0).reshape(66, 1)
        for rank in (0, 31, 32, 63, 65):
            window.mask(rank)
        x, weights = torch.ones(66, 16, device=harness.DEVICE), torch.ones(66, 1, device=harness.DEVICE)
        ticket = harness.remote(window, LAYER).dispatch(x, ids, weights)
        assert torch.equal(window.affected(ticket), affected(topology, ids, 0, 31, 32, 63, 65))
        assert window.affected(ticket).sum() == 5


@on_every_device
def test_only_an_attention_rank_masks_and_only_a_rank_that_exists() -> None:
    with harness.windows(Topology(1, 2, 4)) as (attention, ffn, _):
        with pytest.raises(ValueError, match=re.escape("rank 1 (ffn 0), expected an attention rank")):
            ffn.mask(0)
        for rank in (-1, 2):
            with pytest.raises(ValueError, match=f"ffn rank is {rank}, expected 0 to 1"):
                attention.mask(rank)


def test_a_mask_does_not_revive_a_window_that_has_stopped() -> None:
    """The limit of degraded mode: mask() comes before the window notices, or else a new window does."""
    with harness.windows(Topology(1, 2, 4)) as (attention, _, ffn):
        ffn.poison()
        with pytest.raises(afd_ops.PeerFailedError):
            attention.check()
        attention.mask(1)
        with pytest.raises(afd_ops.PeerFailedError):
            attention.check()


def mask(puppet: Puppet, ffn_rank: int) -> None:
    puppet.window.mask(ffn_rank)


def degraded(puppet: Puppet, *masked: int) -> None:
    for _ in range(3):
        assert_degraded(puppet.window, *masked)
    puppet.window.check()


def dispatch_then_mask(puppet: Puppet, masked: int) -> None:
    """A dispatch that the masked rank was sent, and never answers."""
    window = puppet.window
    module, (x, ids, weights, base) = RemoteExperts(LAYER).attach(window), random_step(window.topology, 6)
    with window.step():
        ticket = module.dispatch(x, ids, weights)
        puppet.stops = {BETWEEN}
        puppet.reach(BETWEEN)
        window.mask(masked)
        out = module.combine(ticket, base)
    assert torch.equal(out, expected(window.topology, x, without(window.topology, ids, masked), weights, base))
    assert torch.equal(window.affected(ticket), affected(window.topology, ids, masked))


@pytest.mark.parametrize("when", ["masked, then dead", "dead, then masked", "dead in mid-step, then masked"])
def test_attention_goes_on_without_a_masked_rank_that_died(when: str) -> None:
    with serving() as cluster:
        victim, other = cluster.ffn[1], cluster.ffn[0]
        if when == "masked, then dead":
            cluster.all("call", mask, 1, among=cluster.attention)
            cluster.all("call", degraded, 1, among=cluster.attention)
        if when == "dead in mid-step, then masked":
            victim.do("hold", ARRIVE)
            victim.arrived(ARRIVE)
            for rank in cluster.attention:
                rank.tell("call", dispatch_then_mask, 1)
            for rank in cluster.attention:
                rank.arrived(BETWEEN)
        victim.signal(signal.SIGKILL)
        victim.process.join(PATIENCE)
        time.sleep(0.05)  # the attention ranks have heard of it
        if when == "dead in mid-step, then masked":
            for rank in cluster.attention:
                rank.do("hold")
                rank.value("call")
        elif when == "dead, then masked":
            cluster.all("call", mask, 1, among=cluster.attention)
        cluster.all("call", degraded, 1, among=cluster.attention)
        assert other.do("errors") == []
        cluster.end(cluster.attention)
        other.value("serve")
        cluster.end([other])
