"""What every rank sees when one ends badly: each fault at each point, between processes.

    python tests/test_failures.py [--rounds N] [--seed S]    the same with random victims, moments and delays
    python tests/test_failures.py --device cuda [--jobs N] [--seconds S] [--out FILE]    each once over NVSHMEM

Over shared memory every case has fresh processes. Over NVSHMEM, where those take seconds to start, only a case that
ends a process has; the others share some, with a new window each.

The parent leads its children to a named point and strikes one of them there: by its process id (kill, pauses), or by
making it end itself (exit, leave, exception); puppets.py has both. Every wait is bounded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import expected, random_step
from puppets import (
    ANYWHERE,
    ARRIVE,
    BEFORE,
    BETWEEN,
    DEADLINE,
    HELD,
    IDLE,
    PACE,
    PATIENCE,
    SIZES,
    SLACK,
    Cluster,
    Rank,
)
from torch.distributed import TCPStore

import afd_ops
from afd_ops import _C, Bootstrap, RemoteExperts, Topology, Window

FAULTS = {
    "kill": "SIGKILL",
    "exit": "the process ends with status 0 and says nothing",
    "leave": "close(), then the process ends",
    "exception": "an exception in the model, in the experts, or elsewhere in the server loop",
    "pause": "SIGSTOP, and SIGCONT well before the deadline",
    "long pause": "SIGSTOP, and SIGCONT after the deadline",
}
POINTS = (BEFORE, BETWEEN, HELD, IDLE)
PAUSE = 0.4  # a fifth of the deadline

# What the ranks that needed the victim raise, and its text.
RAISED = {
    "kill": ("PeerFailedError", "{}'s process ended without closing its window"),
    "exit": ("PeerFailedError", "{}'s process ended without closing its window"),
    "leave": ("PeerLeftError", "{} closed its window"),
    "exception": ("PeerFailedError", "{} failed and poisoned this window"),
    "long pause": ("PeerTimeoutError", "{} did not answer within {:g} s"),
}
LAYER, STAGE, WARM = 7, 1, 3  # WARM steps first, so that the step at hand has sequence 3, in ring 1


class Cell:
    """One fault, at one point, of one rank."""

    def __init__(self, cluster: Cluster, fault: str, role: str, point: str, victim: int, delay: float) -> None:
        self.cluster, self.fault, self.point, self.delay = cluster, fault, point, delay
        self.deadline = cluster.sizes["deadline"]
        group = cluster.attention if role == "attention" else cluster.ffn
        self.victim = group[victim]
        self.attention = [rank for rank in cluster.attention if rank is not self.victim]
        self.ffn = [rank for rank in cluster.ffn if rank is not self.victim]
        self.paused = fault in ("pause", "long pause")
        self.waiting = self.struck = 0.0  # since when
        self.noticed: list[float] = []  # seconds until a survivor knew
        # A rank on a GPU learns how its peers are from its own kernels only.
        self.told_by_kernels = cluster.device == "cuda"

    def play(self) -> None:
        self.lead()
        time.sleep(self.delay)
        self.strike()
        if self.victim.role == "attention":
            self.after_attention()
        else:
            self.after_ffn()

    def lead(self) -> None:
        """Everyone to the point; whoever does not matter there runs."""
        held = {"attention": self.cluster.ffn, "ffn": [self.victim]}[self.victim.role]
        if self.point == ANYWHERE:
            for rank in self.cluster.attention:
                rank.tell("free", LAYER, STAGE)
            return
        if self.point == IDLE:
            return
        if self.point == HELD or (self.point == BETWEEN and self.victim.role == "ffn"):
            for rank in held:
                rank.do("hold", ARRIVE)
                rank.arrived(ARRIVE)
        stop = BEFORE if self.point == BEFORE else BETWEEN
        for rank in self.cluster.attention:
            rank.tell("step", LAYER, STAGE, stop)
        for rank in self.cluster.attention:
            rank.arrived(stop)
        if self.point == HELD:
            for rank in held:
                rank.do("hold", HELD)  # takes what both attention ranks have sent
                rank.arrived(HELD)
        if self.point != BEFORE and self.victim.role == "ffn":
            self.waiting = time.monotonic()
            self.cluster.all("hold", among=self.cluster.attention)  # they wait in combine
        if self.point == HELD and self.victim.role == "attention" and (self.paused or self.fault == "kill"):
            self.cluster.all("hold", among=self.cluster.attention)
            time.sleep(0.05)  # so does the victim: it cannot say so from inside the op

    def strike(self) -> None:
        self.struck = time.monotonic()
        if self.paused:
            self.victim.signal(signal.SIGSTOP)
        elif self.fault == "kill":
            self.victim.signal(signal.SIGKILL)
        else:
            self.victim.tell(self.fault)
        if self.fault in ("kill", "exit", "leave"):
            self.victim.process.join(self.cluster.pace.patience)
            assert self.victim.process.exitcode == (-signal.SIGKILL if self.fault == "kill" else 0)

    def wake(self) -> None:
        """The victim goes on, if it can."""
        if self.paused:
            self.victim.tell("hold")
            self.victim.signal(signal.SIGCONT)
            self.victim.value("hold")

    def rest(self, least: float) -> None:
        """The pause lasts at least this long."""
        if self.paused:
            time.sleep(max(0.0, self.struck + least - time.monotonic()))

    def in_time(self, at: float) -> None:
        """Whoever needed the victim knew within the deadline; by the deadline only if nothing else could tell it."""
        waited = at - (self.waiting or self.struck)
        least, most = (self.deadline, SLACK + self.deadline) if self.fault == "long pause" else (0.0, self.deadline)
        self.noticed.append(round(waited, 3))
        assert 0.95 * least <= waited < most, f"after {waited:.2f} s"

    @property
    def command(self) -> str:
        """What the attention ranks are at."""
        return "free" if self.point == ANYWHERE else "step"

    def finish(self, rank: Rank) -> None:
        """This attention rank ends what it is at, and its results are exact."""
        if self.point == ANYWHERE:
            time.sleep(self.delay)
            rank.do("enough")
        if self.point != IDLE:
            rank.do("hold")
            rank.value(self.command)

    # An attention rank was struck: nobody else stops.

    def after_attention(self) -> None:
        for rank in self.ffn:
            rank.do("hold")
        for rank in self.attention:
            self.finish(rank)
        self.cluster.all("steps", WARM, LAYER, STAGE, among=self.attention)
        self.rest(self.deadline * 1.1 if self.fault == "long pause" else PAUSE)
        self.wake()
        failed = self.fault in ("kill", "exit")
        if self.paused:  # it needs no one's patience: its answers were written meanwhile
            self.finish(self.victim)
            self.victim.do("steps", WARM, LAYER, STAGE)
        elif self.fault == "exception" and self.point != IDLE:
            error, _ = self.victim.error(self.command)
            assert error.kind == "Boom"
            failed = self.gave_up()
        kind, text = RAISED.get(self.fault, ("", ""))
        for rank in self.ffn:  # know it within the deadline
            records = self.records(rank, failed)
            assert len(records) == failed, records
            for record in records:
                assert (record["kind"] + "Error", record["peer"]) == (kind, self.victim.role_rank)
                assert record["op"] == "arrive" and text.format(self.victim.name, self.deadline) in record["message"]
        self.cluster.all("steps", WARM, LAYER, STAGE, among=self.attention)

        self.cluster.end(self.attention)
        if self.victim.process.exitcode is None:
            self.cluster.end([self.victim])
        for rank in self.ffn:  # served the others to their end, and raise then
            _, error, _ = rank.hear("serve")
            assert (error is not None) == failed, error
            assert error is None or (error.kind, error.peer) == (kind, self.victim.role_rank), error
        self.cluster.end(self.ffn)

    def gave_up(self) -> bool:
        """Whether the exception stopped the victim's own window: it does if a dispatch waited for its combine."""
        self.victim.tell("check")
        error = self.victim.hear("check").error
        assert error is None or (error.kind, error.peer) == ("RankFailedError", -1), error
        assert error is None or f"{self.victim.name} gave up on this window" in error.text
        if self.point != ANYWHERE:
            assert (error is not None) == (self.point in (BETWEEN, HELD))
        return error is not None

    def records(self, rank: Rank, failed: bool) -> list[dict[str, Any]]:
        while True:
            records: list[dict[str, Any]] = rank.do("errors")
            if bool(records) == failed or time.monotonic() > self.struck + self.deadline:
                return records
            time.sleep(0.01)

    # An FFN rank was struck: the attention ranks stop, unless they had to wait less than their deadline.

    def after_ffn(self) -> None:
        noticed = self.fault != "pause" and not (self.fault == "long pause" and self.point == IDLE)
        if self.point == BEFORE:
            self.cluster.all("hold", among=self.attention)
        if not noticed:
            self.rest(self.deadline * 1.1 if self.fault == "long pause" else PAUSE)
            self.wake()
            for rank in self.attention:
                self.finish(rank)
            self.cluster.all("steps", WARM, LAYER, STAGE, among=self.attention)
            self.cluster.end(self.attention)
            for rank in self.cluster.ffn:
                rank.value("serve")
            self.cluster.end(self.cluster.ffn)
            return
        for rank in self.attention:
            self.assert_stopped(rank)
        for rank in self.ffn:  # told by the attention ranks, both of which it served
            error, at = rank.error("serve")
            assert (error.kind, error.op, error.peer) == ("PeerFailedError", "arrive", 0), error
            assert f"{self.cluster.attention[0].name} failed and poisoned this window" in error.text
            self.in_time(at)
        survivors = [*self.attention, *self.ffn]
        self.wake()
        if self.victim.process.exitcode is None:
            error, _ = self.victim.error("serve")
            if self.fault == "exception":
                assert error.kind == "Boom"
            elif self.point == HELD:  # it knows first that it was too late
                assert (error.kind, error.op, error.peer) == ("PeerTimeoutError", "reply", 0), error
                assert (error.layer, error.stage, error.ring, error.sequence) == (LAYER, STAGE, 1, WARM)
                assert f"{self.cluster.attention[0].name} was not answered within {self.deadline} s" in error.text
            elif not (self.point == BEFORE and self.told_by_kernels):  # its kernel goes on, and may have taken the item
                assert error.kind == "PeerFailedError" or self.point == ANYWHERE, error
            survivors.append(self.victim)
        self.cluster.end(survivors)

    def assert_stopped(self, rank: Rank) -> None:
        """This attention rank has stopped within the deadline, and its exception says where it stood."""
        if self.point == ANYWHERE:
            error, at = rank.error("free")
            assert error.op in ("dispatch", "combine", "host")
        elif self.point == IDLE and self.fault != "leave" and not self.told_by_kernels:
            while True:  # as an engine would, before it uses an output
                rank.tell("check")
                outcome = rank.hear("check")
                if outcome.error is not None or time.monotonic() > self.struck + self.deadline:
                    break
            assert outcome.error is not None, "check() did not notice"
            error, at = outcome.error, outcome.at
            assert (error.op, error.layer, error.stage, error.ring, error.sequence) == ("host", -1, -1, -1, -1)
        else:
            if self.point == IDLE:  # a peer is missed by whoever needs it
                rank.do("check")
                rank.tell("step", LAYER, STAGE)
            error, at = rank.error("step")
            ops = {"combine"} if self.point in (BETWEEN, HELD) or self.fault == "long pause" else {"dispatch"}
            if self.point in (BEFORE, IDLE) and self.fault != "leave":
                ops.add("combine")  # it hears a moment later
            assert error.op in ops, error
            assert (error.layer, error.stage, error.ring, error.sequence) == (LAYER, STAGE, 1, WARM), error
        kind, text = RAISED[self.fault]
        assert (error.kind, error.peer) == (kind, self.victim.role_rank), error
        assert text.format(self.victim.name, self.deadline) in error.text
        self.in_time(at)
        rank.tell("step", LAYER, STAGE)  # it has stopped for good
        again, _ = rank.error("step")
        assert (again.kind, again.peer) == (kind, self.victim.role_rank)


@contextmanager
def serving(**sizes: Any) -> Iterator[Cluster]:
    """A cluster whose FFN ranks serve, and whose attention ranks have made WARM steps."""
    with Cluster(**sizes) as cluster:
        cluster.all("open", "afd")
        for rank in cluster.ffn:
            rank.tell("serve")
        cluster.all("steps", WARM, LAYER, STAGE, among=cluster.attention)
        yield cluster


def strike(fault: str, role: str, point: str, victim: int, delay: float = 0.0) -> None:
    with serving(deadline=deadline_of("cpu", fault)) as cluster:
        Cell(cluster, fault, role, point, victim, delay).play()


def deadline_of(device: str, fault: str) -> float:
    return PACE[device].short_deadline if fault == "long pause" else PACE[device].deadline


CELLS = list(itertools.product(FAULTS, ("attention", "ffn"), POINTS))

# NVSHMEM jobs with several processes a GPU share files of fixed names (/dev/shm/mps_shm_*); of those that start at the
# same moment one may fail or hang.
STARTING = threading.Lock()

# On GPUs: (fault, role, point, whether both sides replay graphs).
GpuCell = tuple[str, str, str, bool]
ENDS_A_PROCESS = ("kill", "exit", "leave")


def gpu_batches(played: Sequence[GpuCell]) -> list[list[GpuCell]]:
    """The whole matrix, and kill at a random moment: what can share processes in few batches, the rest one by one."""
    cells = [(*cell, graphs) for cell in CELLS for graphs in (False, True)]
    cells += [("kill", role, ANYWHERE, graphs) for role in ("attention", "ffn") for graphs in (False, True)]
    cells = [cell for cell in cells if cell not in played]
    lasting = [cell for cell in cells if cell[0] not in ENDS_A_PROCESS]
    return [*(lasting[n::4] for n in range(4)), *([cell] for cell in cells if cell[0] in ENDS_A_PROCESS)]


# What the tests take of it.
GPU_BATCHES: dict[str, list[GpuCell]] = {
    "kill_attention": [("kill", "attention", HELD, True)],
    "kill_ffn": [("kill", "ffn", HELD, True)],
    "leave_ffn": [("leave", "ffn", BETWEEN, False)],
    "survived": [
        ("pause", "ffn", HELD, True),
        ("long pause", "ffn", BETWEEN, True),
        ("exception", "ffn", HELD, False),
        ("exception", "attention", BETWEEN, True),
        ("long pause", "attention", HELD, False),
    ],
}


def strike_gpus(cells: Sequence[GpuCell], seed: int, report: Callable[..., None], until: float = float("inf")) -> None:
    """Plays the cells in one set of processes, and in another after each that goes wrong.

    Args:
        report: called for each cell: (cell, seconds, seconds until each survivor knew, traceback or None); one that was
            not begun before `until` took None seconds.
    """
    left, rng = list(cells), random.Random(repr((seed, cells)))
    while left:
        lasting = left[0][0] not in ENDS_A_PROCESS
        cell: Cell | None = None
        begin = time.monotonic()
        if begin > until:
            for unplayed in left:
                report(unplayed, None, [], None)
            return
        try:
            with Cluster(device="cuda", lasting=lasting) as cluster:
                cluster.all("hold")  # they are up
                with STARTING:
                    cluster.all("start")
                while left and time.monotonic() < until:
                    begin, cell = time.monotonic(), None
                    fault, role, point, graphs = left[0]
                    cluster.sizes["deadline"] = deadline_of("cuda", fault)
                    cluster.all("prepare", graphs, cluster.sizes["deadline"])
                    cluster.all("open", f"afd {len(left)}")
                    for rank in cluster.ffn:
                        rank.tell("serve")
                    cluster.all("steps", WARM, LAYER, STAGE, among=cluster.attention)
                    cell = Cell(cluster, fault, role, point, rng.randrange(2), rng.choice((0.0, 0.001, 0.03)))
                    cell.play()
                    report(left.pop(0), time.monotonic() - begin, cell.noticed, None)
                    if not lasting:
                        break
                if lasting:
                    cluster.all("finalize")
                    cluster.quit(cluster.ranks)
        except Exception:
            if not left:  # only the end went wrong
                left = [(*cells[-1][:2], "the end of all ranks", cells[-1][3])]
            report(left.pop(0), time.monotonic() - begin, cell.noticed if cell else [], traceback.format_exc())


def gpu_memory() -> list[int]:
    """MB in use on each GPU, by any process."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return [int(line) for line in subprocess.check_output(command, text=True, timeout=30).split()]


def memory_left(before: Sequence[int], seconds: float = 10.0) -> list[int]:
    """MB more in use than before; waits a moment for the driver."""
    deadline = time.monotonic() + seconds
    while True:
        more = [now - then for now, then in zip(gpu_memory(), before, strict=True)]
        if max(more) <= 32 or time.monotonic() > deadline:
            return more
        time.sleep(0.2)


@pytest.mark.parametrize("cell", range(len(CELLS)), ids=[" ".join(cell).replace(" ", "_") for cell in CELLS])
def test_whoever_needs_the_victim_says_so_in_time_and_the_others_carry_on(cell: int) -> None:
    strike(*CELLS[cell], victim=(cell + cell // 4) % 2)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", GPU_BATCHES)
def test_between_gpus_the_same(batch: str, seed: int) -> None:
    """A part of what `--device cuda` plays: NVSHMEM takes its time to start. That looks at memory besides."""
    wrong = []

    def report(cell: GpuCell, seconds: float | None, noticed: list[float], failure: str | None) -> None:
        print(cell, seconds, noticed)
        if failure:
            wrong.append(f"{cell}:\n{failure}")

    strike_gpus(GPU_BATCHES[batch], seed, report)
    assert not wrong, "\n".join(wrong)


def test_all_attention_ranks_die_and_the_servers_end() -> None:
    with serving() as cluster:
        for rank in cluster.attention:
            rank.signal(signal.SIGKILL)
        begin = time.monotonic()
        for rank in cluster.ffn:
            error, at = rank.error("serve")
            assert (error.kind, error.peer) == ("PeerFailedError", 0) and at - begin < DEADLINE
            assert [record["peer"] for record in rank.do("errors")] == [0, 1]
        cluster.end(cluster.ffn)


def test_a_rank_of_each_role_dies_at_once() -> None:
    with serving() as cluster:
        (dead, alive), (gone, left) = cluster.attention, cluster.ffn
        for rank in (dead, gone):
            rank.signal(signal.SIGKILL)
        begin = time.monotonic()
        alive.tell("step", LAYER, STAGE)
        error, at = alive.error("step")
        assert (error.kind, error.peer) == ("PeerFailedError", 0) and at - begin < DEADLINE
        error, at = left.error("serve")
        assert error.kind == "PeerFailedError" and at - begin < DEADLINE
        assert [record["message"].split(" failed")[0].split("'s")[0] for record in left.do("errors")] == [
            "rank 0 (attention 0)",
            "rank 1 (attention 1)",
        ]
        cluster.end([alive, left])


def test_an_answer_that_is_there_is_taken_and_only_check_says_that_its_rank_is_gone() -> None:
    """Why check() comes first: combine has all it needs and returns; nothing in it tells that the rank has ended."""
    with serving() as cluster:
        asking, (victim, _) = cluster.attention[0], cluster.ffn
        asking.tell("step", LAYER, STAGE, BETWEEN)
        asking.arrived(BETWEEN)
        for rank in cluster.ffn:
            until(lambda rank=rank: rank.do("stats")["replies"] == 2 * WARM + 1)
        victim.signal(signal.SIGKILL)
        victim.process.join(PATIENCE)
        asking.do("hold")
        _, error, _ = asking.hear("step")  # raised by its check(), or not even yet, but not by combine
        assert error is None or (error.kind, error.op) == ("PeerFailedError", "host"), error
        until(lambda: (asking.tell("check"), asking.hear("check").error)[1] is not None)


ENDS = """
import sys, torch, afd_ops, harness
from test_failures import SIZES
from torch.distributed import TCPStore
bootstrap = afd_ops.Bootstrap(TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False), 1, 2, timeout=20)
window = afd_ops.Window(afd_ops.Topology(1, 1, 2), bootstrap, **SIZES)
server = afd_ops.ExpertServer(window, harness.experts_of(window.topology, 0))
while not server.step():
    pass
"""


def test_a_script_that_ends_without_close_ends_well_and_its_peer_is_told() -> None:
    """faults: a destructor that is collective hangs the interpreter's end; nobody notices a rank that just ended."""
    topology, store = Topology(1, 1, 2), TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-c", ENDS, str(store.port)]
    places = os.pathsep.join([str(Path(__file__).parent), str(Path(afd_ops.__file__).parent.parent)])
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": places}) as script:
        try:
            with Window(topology, Bootstrap(store, 0, 2, timeout=PATIENCE), **SIZES) as window:
                step = random_step(topology, 6)
                module = RemoteExperts(LAYER, STAGE).attach(window)
                ticket = module.dispatch(*step[:3])
                assert torch.equal(module.combine(ticket, step[3]), expected(topology, *step))
                assert script.wait(PATIENCE) == 0
                begin = time.monotonic()
                try:
                    module(*step)
                except (afd_ops.PeerFailedError, afd_ops.PeerLeftError) as error:
                    assert error.peer == 0 and "rank 1 (ffn 0)" in str(error)
                    assert time.monotonic() - begin < DEADLINE
                else:
                    raise AssertionError("nobody noticed")
        finally:
            script.kill()


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def dev_shm() -> set[str]:
    """But for what CUDA's driver and NVSHMEM leave behind of a process that is killed."""
    return {e.name for e in Path("/dev/shm").iterdir() if not e.name.startswith(("cuda.shm.", "mps_shm_"))}


_before: set[str] = set()


def setup_module() -> None:
    _before.update(dev_shm())


def teardown_module() -> None:
    """Nothing with a name stays behind; others on this machine may use /dev/shm for a moment."""
    deadline = time.monotonic() + SLACK
    while left := dev_shm() - _before:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def soak(rounds: int, seed: int) -> int:
    """The full product, and each fault at a random moment besides; returns how many went wrong."""
    rng, wrong, done = random.Random(seed), 0, 0
    cells = [*CELLS, *itertools.product(FAULTS, ("attention", "ffn"), (ANYWHERE,))]
    for turn in range(rounds):
        begin = time.monotonic()
        for cell in rng.sample(cells, len(cells)):
            victim, delay = rng.randrange(2), rng.choice((0.0, rng.random() * 0.001, rng.random() * 0.1))
            try:
                strike(*cell, victim, delay)
            except Exception:
                wrong += 1
                print(f"{cell}, victim {victim}, delay {delay:.6f} s:\n{traceback.format_exc()}", flush=True)
            done += 1
        print(f"round {turn + 1}: {done} faults, {wrong} wrong, {time.monotonic() - begin:.0f} s", flush=True)
    return wrong


def soak_gpus(seed: int, jobs: int, seconds: float, out: Path | None, earlier: Path | None) -> int:
    """Every batch once, `jobs` at a time; what came out is on disk after every cell. Returns how many went wrong.

    Args:
        earlier: a result that did not reach its end. What it played is taken over: each row says with which sources.
    """
    begin, lock, before, names = time.monotonic(), threading.Lock(), gpu_memory(), dev_shm()
    known = json.loads(earlier.read_text())["rows"] if earlier else []
    rows: list[dict[str, Any]] = [row for row in known if row["result"] != "not run"]
    played = [(row["fault"], row["role"], row["point"], row["graphs"]) for row in rows]
    result: dict[str, Any] = {"seed": seed, "torch": torch.__version__}
    result |= {"memory_before_mb": before, "rows": rows}

    def report(cell: GpuCell, took: float | None, noticed: list[float], failure: str | None) -> None:
        fault, role, point, graphs = cell
        row = {"fault": fault, "role": role, "point": point, "graphs": graphs, "noticed_s": noticed}
        row |= {"csrc": _C.SOURCE_DIGEST, "failure": failure}
        said = "not run" if took is None else "wrong" if failure else "held"
        with lock:
            rows.append(row | {"result": said, "seconds": took and round(took, 1)})
            print(f"{time.monotonic() - begin:6.1f} s  {said:8s} {cell}, noticed after {noticed} s", flush=True)
            if failure:
                print(failure, flush=True)
            if out:
                out.write_text(json.dumps(result, indent=1) + "\n")

    with ThreadPoolExecutor(jobs) as pool:
        for _ in pool.map(lambda batch: strike_gpus(batch, seed, report, begin + seconds), gpu_batches(played)):
            pass
    result["memory_left_mb"] = memory_left(before)
    result["dev_shm_left"] = sorted(dev_shm() - names)
    result["seconds"] = round(time.monotonic() - begin, 1)
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = sum(row["result"] == "wrong" for row in rows)
    counts = {said: sum(row["result"] == said for row in rows) for said in ("held", "wrong", "not run")}
    print(f"{counts}; MB left on GPUs: {result['memory_left_mb']}; left in /dev/shm: {result['dev_shm_left']}")
    return wrong + (max(result["memory_left_mb"]) > 32)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    parser.add_argument("--device", choices=PACE, default="cpu")
    parser.add_argument("--jobs", type=int, default=4, help="cuda: sets of processes at a time")
    parser.add_argument("--seconds", type=float, default=540.0, help="cuda: no case begins later")
    parser.add_argument("--out", type=Path, help="cuda: result file")
    parser.add_argument("--earlier", type=Path, help="cuda: a result file; what it says was played is not played again")
    args = parser.parse_args()
    print(f"faults of {Path(afd_ops.__file__).parent} with seed {args.seed}", flush=True)
    if args.device == "cpu":
        wrong = soak(args.rounds, args.seed)
    else:
        wrong = soak_gpus(args.seed, args.jobs, args.seconds, args.out, args.earlier)
    print("FAIL" if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
