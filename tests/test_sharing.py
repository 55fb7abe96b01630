"""Who shares what: several windows in a process, forks, threads in one window."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import harness
import pytest
import torch
from harness import expected, random_step, together
from puppets import PATIENCE, SLACK, Cluster, Puppet, Seen
from test_failures import LAYER, STAGE, WARM, serving, until
from torch import Tensor

import afd_ops
from afd_ops import ExpertServer, RemoteExperts, Topology

pytestmark = pytest.mark.usefixtures("seed")

AT_ONCE = 1.5  # seconds, far below the deadlines of these tests


# Several windows.


def serve_in_thread(puppet: Puppet, name: str) -> None:
    """Another server loop in this process; how it ends is kept."""
    if puppet.kept is None:
        puppet.kept = {}
    window, ends = puppet.windows[name], puppet.kept
    server = ExpertServer(window, harness.experts_of(window.topology, window.role_rank))

    def run() -> None:
        try:
            server.run()
            ends[name] = None
        except Exception as error:
            ends[name] = Seen.of(error)

    ends.pop(name, None)
    threading.Thread(target=run, daemon=True).start()


def end_of(puppet: Puppet, name: str) -> Seen | None:
    until(lambda: name in puppet.kept)
    seen: Seen | None = puppet.kept[name]
    return seen


def test_two_windows_of_the_same_processes_fail_and_recover_apart() -> None:
    with Cluster(Topology(1, 1, 2)) as cluster:
        attention, ffn = cluster.ranks
        for name in ("one", "two"):
            cluster.all("open", name)
            ffn.do("call", serve_in_thread, name)
        for name in ("one", "two", "one"):
            attention.do("use", name)
            attention.do("steps", 3, LAYER, STAGE)
        attention.do("poison")  # "one"
        assert ffn.do("call", end_of, "one").kind == "PeerFailedError"
        attention.do("use", "two")
        attention.do("steps", 3, LAYER, STAGE)
        for rank in (attention, ffn):
            rank.do("use", "one")
        cluster.all("reset")
        ffn.do("call", serve_in_thread, "one")
        for name in ("one", "two"):
            attention.do("use", name)
            attention.do("steps", 3, LAYER, STAGE)
        assert attention.do("call", generations) == [1, 0]
        cluster.end([attention])
        assert [ffn.do("call", end_of, name) for name in ("one", "two")] == [None, None]
        cluster.end([ffn])


def generations(puppet: Puppet) -> list[int]:
    return [window.generation for window in puppet.windows.values()]


def test_a_window_on_some_of_the_processes_then_on_all() -> None:
    with Cluster() as cluster:
        pair = [cluster.ranks[1], cluster.ranks[2]]
        for rank, process in enumerate(pair):
            process.tell("open", "pair", Topology(1, 1, 3), rank)
        for process in pair:
            process.value("open")
        pair[1].do("call", serve_in_thread, "pair")
        pair[0].do("steps", 3, LAYER, STAGE)
        cluster.all("open", "all")
        for rank in cluster.ffn:
            rank.do("call", serve_in_thread, "all")
        cluster.all("steps", 3, LAYER, STAGE, among=cluster.attention)
        pair[0].do("use", "pair")
        pair[0].do("steps", 3, LAYER, STAGE)
        cluster.ranks[0].signal(signal.SIGKILL)  # not one of the pair
        until(lambda: len(pair[1].do("call", records_of, "all")) == 1)
        pair[0].do("steps", 3, LAYER, STAGE)
        pair[0].do("use", "all")
        pair[0].do("steps", 3, LAYER, STAGE)
        assert pair[1].do("call", records_of, "pair") == []
        cluster.end([pair[0]])
        assert pair[1].do("call", end_of, "pair") is None
        for rank in cluster.ffn:
            assert rank.do("call", end_of, "all").kind == "PeerFailedError"
        cluster.end(cluster.ffn)


def records_of(puppet: Puppet, name: str) -> list[dict[str, Any]]:
    return puppet.windows[name].errors()


def drop(puppet: Puppet) -> int:
    """The window is forgotten without close()."""
    puppet.windows.clear()
    gc.collect()
    return puppet.leftovers()


def test_a_window_that_is_dropped_is_given_back_and_its_peer_is_told() -> None:
    """fault: the thread that watches the peers keeps the window alive; its memory stays, and peers wait for it."""
    with Cluster(Topology(1, 1, 2)) as cluster:
        attention, ffn = cluster.ranks
        cluster.all("open", "afd")
        assert ffn.do("call", drop) == 0
        attention.tell("step", LAYER, STAGE)
        assert attention.error("step")[0].kind == "PeerLeftError"
        cluster.end([attention])


# Forks.

FORKED = "a forked process must open its own"


def in_fork(act: Callable[[], Any]) -> Any:
    """What `act` returned or raised in a forked copy of this process."""
    source, sink = os.pipe()
    process = os.fork()
    if process == 0:
        answer: list[str] = ["nothing", ""]
        try:
            answer = ["value", repr(act())]
        except BaseException as error:
            answer = [type(error).__name__, str(error)]
        finally:
            os.write(sink, json.dumps(answer).encode())
            os._exit(0)
    os.close(sink)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
    signal.alarm(int(PATIENCE / 2))
    with os.fdopen(source, "rb") as pipe:
        answered = pipe.read()
    os.waitpid(process, 0)
    signal.alarm(0)
    return json.loads(answered) if answered else ["nothing", "it hung"]


def fork_attention(puppet: Puppet, act: str) -> Any:
    """`act` in a fork, with a dispatch of the parent's in flight; then the parent's combine, exact."""
    window = puppet.window
    module, step = RemoteExperts(LAYER).attach(window), random_step(window.topology, 6)
    ticket = module.dispatch(*step[:3])
    acts: dict[str, Callable[[], Any]] = {
        "dispatch": lambda: module.dispatch(*step[:3]),
        "combine": lambda: module.combine(ticket, step[3]),
        "module": lambda: module(*step),
        "check": window.check,
        "mask": lambda: window.mask(0),
        "poison": window.poison,
        "reset": window.reset,
        "close": window.close,
        "del": lambda: window.__del__(),
    }
    answer = in_fork(acts[act])
    with window.step():
        out = module.combine(ticket, step[3])
    assert torch.equal(out, expected(window.topology, *step))
    return answer


@pytest.mark.parametrize("act", ["dispatch", "combine", "module", "check", "mask", "poison", "reset", "close", "del"])
def test_a_fork_is_refused_and_its_parent_goes_on(act: str) -> None:
    """faults: a worker process forked off an engine sends through its parent's window; or ends the parent's watch."""
    with serving(topology=Topology(1, 1, 2)) as cluster:
        attention, ffn = cluster.ranks
        kind, text = attention.do("call", fork_attention, act)
        if act in ("close", "del"):  # the copy's own affair
            assert (kind, text) == ("value", "None")
        else:
            assert kind in ("ClosedError", "RuntimeError") and FORKED in text, (kind, text)
        attention.do("steps", 3, LAYER, STAGE)
        assert ffn.do("errors") == []
        ffn.signal(signal.SIGKILL)
        begin = time.monotonic()
        attention.tell("step", LAYER, STAGE)
        error, at = attention.error("step")
        assert (error.kind, at - begin < AT_ONCE) == ("PeerFailedError", True), "the parent's watch has ended"
        cluster.end([attention])


def fork_ffn(puppet: Puppet) -> Any:
    window = puppet.window
    return in_fork(lambda: ExpertServer(window, harness.experts_of(window.topology, 0)).run())


def test_a_fork_of_an_ffn_rank_is_refused_and_its_parent_serves_on() -> None:
    with Cluster(Topology(1, 1, 2)) as cluster:
        attention, ffn = cluster.ranks
        cluster.all("open", "afd")
        kind, text = ffn.do("call", fork_ffn)
        assert kind == "ClosedError" and FORKED in text
        ffn.tell("serve")
        attention.do("steps", 3, LAYER, STAGE)
        cluster.end([attention])
        ffn.value("serve")
        cluster.end([ffn])


# Threads.


def two_lanes(puppet: Puppet, seconds: float) -> list[Any]:
    """A thread per stage, each making steps; per thread how many, or the exception that ended it and when."""
    window, end = puppet.window, time.monotonic() + seconds
    both = threading.Barrier(2, lambda: puppet.connection.send(("at work", None)))

    def lane(stage: int) -> Any:
        module, done = RemoteExperts(LAYER, stage).attach(window), 0
        while time.monotonic() < end:
            step = random_step(window.topology, 6)
            try:
                out = module(*step)
            except afd_ops.AfdError as error:
                return Seen.of(error), time.monotonic(), done
            assert torch.equal(out, expected(window.topology, *step)), "not exact"
            done += 1
            if done == WARM:
                both.wait(PATIENCE)
        return done

    return together(lambda: lane(0), lambda: lane(1))


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("kill", "PeerFailedError"), ("leave", "PeerLeftError"), ("stop", "PeerTimeoutError"), ("pause", "")],
)
def test_two_threads_on_two_stages_both_learn_of_a_peers_fault(fault: str, kind: str) -> None:
    with serving(deadline=1.0) as cluster:
        victim = cluster.ffn[1]
        for rank in cluster.attention:
            rank.tell("call", two_lanes, PATIENCE / 2 if kind else 1.0)
        for rank in cluster.attention:
            rank.arrived("work")
        begin = time.monotonic()
        if fault in ("stop", "pause"):
            victim.signal(signal.SIGSTOP)
            time.sleep(0.3)
            victim.signal(signal.SIGCONT if fault == "pause" else signal.SIGSTOP)
        elif fault == "kill":
            victim.signal(signal.SIGKILL)
        else:
            victim.tell(fault)
        for rank in cluster.attention:
            for outcome in rank.value("call"):
                if kind:
                    assert isinstance(outcome, tuple), outcome
                    seen, at, done = outcome
                    assert (seen.kind, seen.peer, seen.layer) == (kind, 1, LAYER) and done >= WARM, seen
                    assert seen.stage in (0, 1) and seen.sequence >= 0 and seen.op in ("dispatch", "combine")
                    assert at - begin < 1.0 + (SLACK if fault == "stop" else 0.0)
                else:
                    assert isinstance(outcome, int) and outcome > 0, outcome
        if fault == "stop":
            victim.signal(signal.SIGCONT)
            assert victim.error("serve")[0].kind in ("PeerFailedError", "PeerTimeoutError")
        cluster.end(cluster.attention)


def test_an_exception_of_one_lane_ends_the_wait_of_another() -> None:
    with harness.windows(Topology(1, 1, 2), stages=2) as (window, _):
        waiting, step = RemoteExperts(LAYER, stage=1).attach(window), random_step(window.topology, 4)
        ticket = waiting.dispatch(*step[:3])

        def fail() -> None:
            time.sleep(0.05)
            with window.step():
                RemoteExperts(LAYER, stage=0).attach(window).dispatch(*step[:3])
                raise ValueError("in the shared expert")

        def wait() -> Tensor:
            with window.step():
                return waiting.combine(ticket, step[3])

        begin = time.monotonic()
        failed, waited = together(fail, wait)
        assert time.monotonic() - begin < AT_ONCE
        assert isinstance(failed, ValueError) and isinstance(waited, afd_ops.RankFailedError) and waited.peer == -1
