"""Ranks as puppets: processes of a cluster that do what a test says, and stop at named points while it wants them to.

Every wait is bounded. Each child loads this file, so it imports no pytest.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import harness
import torch
from harness import expected, random_step
from torch import Tensor
from torch.distributed import TCPStore

from afd_ops import Bootstrap, ExpertServer, RemoteExperts, Topology, Window

BEFORE, BETWEEN, HELD, IDLE = "before dispatch", "between dispatch and combine", "between arrive and reply", "idle"
ANYWHERE = "anywhere"  # not at a point, but at a random moment of ranks that run freely: soak only
ARRIVE = "before arrive"


class Pace(NamedTuple):
    """What is long and what is short on a kind of device, in seconds."""

    deadline: float  # what ends earlier was not ended by it
    short_deadline: float  # where the deadline is what ends a wait
    patience: float  # for a child that should answer at once
    life: float  # no child outlives this, whatever happens to its parent


# On GPUs several processes share one, and a context takes seconds to build and to tear down.
PACE = {"cpu": Pace(2.0, 1.2, 20.0, 100.0), "cuda": Pace(10.0, 2.5, 45.0, 300.0)}
DEADLINE, _, PATIENCE, _ = PACE["cpu"]
SLACK = 3.0  # what a busy machine may add to a wait that has ended
AT_ONCE = 1.5  # what must not have waited for anything, far below the deadlines

TOPOLOGY = Topology(2, 2, 4)
SIZES: dict[str, Any] = {**harness.SIZES, "stages": 2, "depth": 2, "deadline": DEADLINE}


class Boom(Exception):
    """What a puppet raises when it is told to."""


class Seen(NamedTuple):
    """An exception, as it crosses to the parent."""

    kind: str
    text: str
    op: str | None
    peer: int | None
    layer: int | None
    stage: int | None
    ring: int | None
    sequence: int | None
    traceback: str

    @staticmethod
    def of(error: BaseException) -> Seen:
        where = (getattr(error, name, None) for name in ("op", "peer", "layer", "stage", "ring", "sequence"))
        return Seen(type(error).__name__, str(error), *where, "".join(traceback.format_exception(error)))


class Outcome(NamedTuple):
    """How a command ended in a child."""

    value: Any
    error: Seen | None
    at: float  # time.monotonic() of the child, which is that of the host


# The children.


class Puppet:
    """One rank: does what its parent says, and stops at named points while the parent wants it to."""

    def __init__(
        self, connection: Any, rank: int, topology: Topology, port: int, sizes: dict[str, Any], pace: Pace
    ) -> None:
        self.connection, self.rank, self.topology, self.sizes, self.pace = connection, rank, topology, sizes, pace
        self.store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=pace.patience))
        self.heap: Any = None  # NVSHMEM's
        self.graphs = False
        self.lanes: dict[tuple[int, int, int], Lane] = {}
        self.windows: dict[str, Window] = {}
        self.name = ""
        self.stops: set[str] = set()
        self.over = False
        self.server: ExpertServer | None = None
        self.kept: Any = None  # what a call of test_recovery leaves for the next

    @property
    def window(self) -> Window:
        return self.windows[self.name]

    # The parent's hand.

    def reach(self, point: str) -> None:
        """A named point: reads what the parent says, and goes no further while it wants this rank here."""
        said = False
        while point in self.stops or self.connection.poll():
            if point in self.stops and not said:
                self.connection.send((f"at {point}", Outcome(None, None, time.monotonic())))
                said = True
            self.obey()

    def obey(self) -> None:
        if not self.connection.poll(self.pace.life):
            raise EOFError
        command, args = self.connection.recv()
        if command == "exception":
            raise Boom("injected")
        value, error = None, None
        try:
            value = getattr(self, command)(*args)
        except Exception as raised:
            error = Seen.of(raised)
        self.connection.send((command, Outcome(value, error, time.monotonic())))

    def main(self) -> None:
        while not self.over:
            with suppress(Boom):  # with nothing to interrupt
                self.obey()

    def hold(self, *points: str) -> None:
        self.stops = set(points)

    def quit(self) -> None:
        self.over = True

    def exit(self) -> None:
        os._exit(0)

    def leave(self) -> None:
        self.window.close()
        os._exit(0)

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self, *args)

    # The window.

    def prepare(self, graphs: bool, deadline: float) -> None:
        """For the windows to come: whether ops are replayed from graphs, and how long they wait."""
        self.graphs, self.sizes["deadline"], self.stops = graphs, deadline, set()

    def start(self) -> None:
        """On a GPU, before the first window."""
        from afd_ops.heap.nvshmem import NvshmemHeap

        bootstrap = Bootstrap(
            self.store, self.rank, self.topology.world_size, name="NVSHMEM", timeout=self.pace.patience / 2
        )
        self.heap = NvshmemHeap(bootstrap, harness.DEVICE)

    def open(
        self, name: str, topology: Topology | None = None, rank: int | None = None, address: str = "", **sizes: Any
    ) -> int:
        topology, rank = topology or self.topology, self.rank if rank is None else rank
        if address:
            bootstrap = Bootstrap.connect(address, rank, topology.world_size, name=name, timeout=self.pace.patience / 2)
        else:
            bootstrap = Bootstrap(self.store, rank, topology.world_size, name=name, timeout=self.pace.patience / 2)
        self.windows[name] = Window(topology, bootstrap, heap=self.heap, **{**self.sizes, **sizes})
        self.use(name)
        harness.fill_with_nan(self.window)
        bootstrap.barrier()
        return self.window.id

    def use(self, name: str) -> None:
        self.name = name

    def check(self) -> None:
        self.window.check()

    def errors(self) -> list[dict[str, Any]]:
        return self.window.errors()

    def stats(self) -> dict[str, Any]:
        return self.window.stats()

    def generation(self) -> int:
        return self.window.generation

    def reset(self) -> None:
        self.window.reset()

    def poison(self) -> None:
        self.window.poison()

    def close(self) -> None:
        for window in self.windows.values():
            window.close()

    def finalize(self) -> None:
        """Gives NVSHMEM's memory back, together with all ranks."""
        self.heap.finalize()

    def leftovers(self) -> int:
        """Mappings and open files of the windows' shared memory."""
        links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
        return sum("memfd:afd_ops" in line for line in [*links, *Path("/proc/self/maps").read_text().splitlines()])

    # The attention side.

    def step(self, layer: int, stage: int, *stops: str) -> None:
        """One step of an engine, its result compared with the oracle."""
        self.stops = set(stops)
        step = random_step(self.window.topology, 6)
        step[1][0] = torch.tensor([0, self.window.topology.num_experts - 1])  # something for the first and last
        lane = self.lane(layer, stage, step)
        with self.window.step():
            self.reach(BEFORE)
            lane.dispatch(step)
            try:
                self.reach(BETWEEN)
            except Boom:
                if self.graphs:
                    self.window.poison()  # step() does not know of what a replay has sent
                raise
            out = lane.combine(step)
        assert torch.equal(out, expected(self.window.topology, *step)), "not exact"

    def lane(self, layer: int, stage: int, step: Sequence[Tensor]) -> Lane:
        key = (self.window.id, layer, stage)
        if key not in self.lanes:
            kind = ReplayedLane if self.graphs else Lane
            self.lanes[key] = kind(harness.remote(self.window, layer, stage), step)
        return self.lanes[key]

    def steps(self, count: int, layer: int, stage: int) -> None:
        for _ in range(count):
            self.step(layer, stage)

    def free(self, layer: int, stage: int) -> int:
        """Steps until `enough`; returns how many."""
        self.more, done = True, 0
        while self.more:
            self.step(layer, stage)
            done += 1
        return done

    def enough(self) -> None:
        self.more = False

    # The FFN side.

    def experts(self, rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        self.reach(HELD)
        return harness.experts_of(self.window.topology, self.window.role_rank)(rows, scales, offsets, layer)

    def serve(self) -> None:
        self.server = ReplayedServer(self) if self.graphs else Server(self)
        self.server.run()

    def stop(self) -> None:
        assert self.server is not None
        self.server.stop()

    def drain(self) -> None:
        assert self.server is not None
        self.server.drain()


class Server(ExpertServer):
    """A server loop with the points ARRIVE and HELD."""

    def __init__(self, puppet: Puppet) -> None:
        super().__init__(puppet.window, puppet.experts)
        self.puppet = puppet

    def step(self) -> int:
        self.puppet.reach(ARRIVE)
        return super().step()


class ReplayedServer(Server):
    """The same with its ops in two graphs, so that HELD lies between their replays."""

    def __init__(self, puppet: Puppet) -> None:
        super().__init__(puppet)
        window, (taken, answered) = self.window, (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        rows, device = window.geometry.tokens * window.geometry.topk, window.heap.device
        owned = torch.tensor([*window.topology.experts_of(window.role_rank), 0], device=device)
        place = torch.arange(rows, dtype=torch.int32, device=device)

        def experts(x: Tensor, offsets: Tensor) -> Tensor:
            """harness.expert by offsets on the device."""
            index = owned[torch.searchsorted(offsets, place, right=True)].unsqueeze(1)
            return x * (index % 3 + 1) + index

        experts(torch.zeros(rows, window.geometry.hidden, device=device), place[: owned.shape[0] - 1])
        with torch.cuda.graph(taken):
            self.item = torch.ops.afd.arrive(self.port, window.id)
            x, _, offsets = torch.ops.afd.receive(self.item, self.port, window.id, rows)
        with torch.cuda.graph(answered):
            torch.ops.afd.reply(experts(x, offsets), self.item, self.port, window.id)
        self.taken, self.answered, self.kept = taken, answered, (x, offsets, owned, place)

    def step(self) -> int:
        self.puppet.reach(ARRIVE)
        self.taken.replay()
        count = self._read(self.item, self.window.generation)[0]
        if count > 0:
            self.puppet.reach(HELD)
            self.answered.replay()
        return count


class Lane:
    """The ops of one lane of an attention rank. On a GPU each has ended before the next point."""

    def __init__(self, module: RemoteExperts, step: Sequence[Tensor]) -> None:
        self.module = module
        self.ticket: Tensor | None = None

    def dispatch(self, step: Sequence[Tensor]) -> None:
        self.ticket = self.module.dispatch(*step[:3])
        settle(self.ticket)

    def combine(self, step: Sequence[Tensor]) -> Tensor:
        assert self.ticket is not None
        out = self.module.combine(self.ticket, step[3])
        settle(out)
        return out


class ReplayedLane(Lane):
    """The same, each in a graph of its own, so that a fault can come between their replays."""

    def __init__(self, module: RemoteExperts, step: Sequence[Tensor]) -> None:
        super().__init__(module, step)
        self.buffers = [t.clone() for t in step]
        self.sent, self.answered = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.sent):
            self.ticket = module.dispatch(*self.buffers[:3])
        with torch.cuda.graph(self.answered):
            self.out = module.combine(self.ticket, self.buffers[3])

    def dispatch(self, step: Sequence[Tensor]) -> None:
        for buffer, fresh in zip(self.buffers, step, strict=True):
            buffer.copy_(fresh)
        self.sent.replay()
        settle(self.out)

    def combine(self, step: Sequence[Tensor]) -> Tensor:
        self.answered.replay()
        settle(self.out)
        return self.out


def settle(t: Tensor) -> None:
    if t.is_cuda:
        torch.cuda.current_stream().synchronize()


def _child(connection: Any, device: str, rank: int, topology: Topology, *args: Any) -> None:
    pace = PACE[device]
    faulthandler.dump_traceback_later(pace.life, exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)
    if device == "cuda":
        harness.DEVICE = f"cuda:{rank * torch.cuda.device_count() // topology.world_size}"
        torch.cuda.set_device(harness.DEVICE)
        torch.zeros(1, device=harness.DEVICE)  # a context takes seconds: not where sets of processes take turns
    with suppress(EOFError, ConnectionError):  # the parent has given up
        puppet = Puppet(connection, rank, topology, *args, pace)
        puppet.main()
    if device == "cuda":
        os._exit(0)  # giving back what NVSHMEM still holds would wait for the dead


# The parent.


class Rank:
    """A child, as its parent sees it."""

    def __init__(self, process: Any, connection: Any, topology: Topology, rank: int, patience: float) -> None:
        self.process, self.connection, self.rank, self.patience = process, connection, rank, patience
        self.role, self.role_rank, self.name = topology.role(rank), topology.role_rank(rank), topology.describe(rank)
        self.heard: list[tuple[str, Outcome]] = []

    def tell(self, command: str, *args: Any) -> None:
        self.connection.send((command, args))

    def hear(self, command: str, timeout: float | None = None) -> Outcome:
        """The outcome of a command that was told; what else the child says meanwhile is kept."""
        timeout = self.patience if timeout is None else timeout
        deadline = time.monotonic() + timeout
        while True:
            for index, (said, outcome) in enumerate(self.heard):
                if said == command:
                    del self.heard[index]
                    return outcome
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"{self.name} did not end {command!r} within {timeout} s")
            try:
                self.heard.append(self.connection.recv())
            except (EOFError, ConnectionError):
                raise AssertionError(f"{self.name} ended before {command!r}") from None

    def do(self, command: str, *args: Any) -> Any:
        """The value of a command that must succeed."""
        self.tell(command, *args)
        return self.value(command)

    def value(self, command: str) -> Any:
        value, error, _ = self.hear(command)
        assert error is None, f"{command!r} of {self.name}:\n{error.traceback}"
        return value

    def error(self, command: str) -> tuple[Seen, float]:
        """The exception by which a command must end, and when it did."""
        value, error, at = self.hear(command)
        assert error is not None, f"{command!r} of {self.name} returned {value!r}, expected an exception"
        return error, at

    def arrived(self, point: str) -> None:
        self.hear(f"at {point}")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)


class Cluster:
    """A process per rank. At the end none is left, whatever happened."""

    def __init__(
        self, topology: Topology = TOPOLOGY, *, device: str = "cpu", lasting: bool = False, **sizes: Any
    ) -> None:
        self.topology, self.sizes, self.device, self.pace = topology, {**SIZES, **sizes}, device, PACE[device]
        self.lasting = lasting  # `end` leaves the processes: there are more windows to come
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # outlives every rank
        self.ranks: list[Rank] = []
        self.started: list[Rank] = []

    def __enter__(self) -> Cluster:
        self.ranks = [self.start(rank) for rank in range(self.topology.world_size)]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for rank in self.started:
            if kind is not None or rank.process.exitcode is None:
                rank.process.kill()
            rank.process.join(self.pace.patience)
            rank.connection.close()
        left = [rank.name for rank in self.started if Path(f"/proc/{rank.process.pid}").exists()]
        assert not left, f"still running: {left}"

    def start(self, rank: int) -> Rank:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "afd_ops", "pytest"])  # what each child would load for itself
        ours, theirs = context.Pipe()
        args = (theirs, self.device, rank, self.topology, self.store.port, self.sizes)
        process = context.Process(target=_child, args=args, daemon=True)
        process.start()
        theirs.close()
        self.started.append(Rank(process, ours, self.topology, rank, self.pace.patience))
        return self.started[-1]

    @property
    def attention(self) -> list[Rank]:
        return self.ranks[: self.topology.attention_size]

    @property
    def ffn(self) -> list[Rank]:
        return self.ranks[self.topology.attention_size :]

    def all(self, command: str, *args: Any, among: list[Rank] | None = None) -> list[Any]:
        """Told to all, then awaited of all."""
        ranks = self.ranks if among is None else among
        for rank in ranks:
            rank.tell(command, *args)
        return [rank.value(command) for rank in ranks]

    def end(self, ranks: list[Rank]) -> None:
        """These close what they have not closed, keep nothing, and end."""
        self.all("close", among=ranks)
        assert self.all("leftovers", among=ranks) == [0] * len(ranks), "shared memory is still mapped"
        if self.lasting:
            for rank in ranks:
                rank.heard.clear()  # of points that were passed
        else:
            self.quit(ranks)

    def quit(self, ranks: list[Rank]) -> None:
        self.all("quit", among=ranks)
        for rank in ranks:
            rank.process.join(self.pace.patience)
            assert rank.process.exitcode == 0, rank.name
