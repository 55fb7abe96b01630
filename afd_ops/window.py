"""Window: symmetric memory that all ranks agreed on, and how it ends. No concept of AFD but "region"."""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from afd_ops import _C
from afd_ops.bootstrap import Bootstrap
from afd_ops.errors import AbortedError, BootstrapError, ClosedError, GeometryError, from_record, typed
from afd_ops.heap import Heap, Segment
from afd_ops.heap.local import LocalHeap
from afd_ops.heap.shm import ShmHeap
from afd_ops.layout import PAYLOAD_DTYPES, WIDE_DTYPES, Geometry
from afd_ops.topology import Role, Topology
from afd_ops.watch import ProcessWatch, process_namespace

logger = logging.getLogger("afd_ops")


class Window:
    """One rank's window. Construction is collective: every rank of the topology builds its own at the same time.

    Args:
        topology: roles and experts.
        bootstrap: how the ranks meet; its rank and world size are this rank's.
        hidden: elements of a row; hidden x itemsize a multiple of 16 bytes; with float8_e4m3fn a multiple of 128.
        topk: choices per token.
        tokens: capacity of one dispatch. A per-step budget, not the longest prefill: the caller chunks longer batches.
        dtype: of the rows: float32, bfloat16 or float16 in both directions, or float8_e4m3fn on the way to the FFN
            ranks and bfloat16 (`wide_dtype`) everywhere else: x, expert_out and the replies. Dispatch then casts, with
            one float32 scale per token and 128 channels, amax / 448; a block that holds an inf or NaN arrives as NaN.
        stages: independent lanes per attention rank, one per ubatch; different lanes may run on different threads.
        depth: dispatches in flight per lane.
        layers: how many layers the FFN ranks have experts for; an attention rank that sends another number breaks the
            protocol. None: any.
        heap: where the memory comes from; shared memory between processes of this host by default.
        deadline: seconds that combine waits for a reply, and that an FFN rank has from taking an item to answering it.
            Generous by default, because ranks that compile for the first time are minutes apart.
        poll_interval: seconds after which `arrive` returns an empty item.
        rows: FFN ranks: the most rows put into one item, at least tokens x topk (the default).

    Raises:
        ValueError: a size makes no sense; names it.
        GeometryError: ranks differ; on every rank, naming the field and both values.
        BootstrapError: a rank is missing or failed; names it.
        MemoryError: the window does not fit.

    An engine must call `check()` after synchronising and before it uses a step's output: a replayed graph calls no
    Python and cannot raise.

    Attributes:
        role, role_rank: "attention" or "ffn", and which of that role.
        topology, bootstrap: as given.
        device_half: the module that keeps a GPU window's half in device memory, `afd_ops._C_cuda`; None on a CPU.
    """

    order: torch.Tensor

    def __init__(
        self,
        topology: Topology,
        bootstrap: Bootstrap,
        *,
        hidden: int,
        topk: int,
        tokens: int,
        dtype: torch.dtype = torch.bfloat16,
        stages: int = 1,
        depth: int = 2,
        layers: int | None = None,
        heap: Heap | None = None,
        deadline: float = 600.0,
        poll_interval: float = 0.01,
        rows: int | None = None,
    ) -> None:
        self.topology = topology
        self.bootstrap = bootstrap
        self.heap: Heap = ShmHeap() if heap is None else heap
        self.poll_interval = poll_interval
        self.closed = True  # until it is open: a constructor that fails leaves nothing to close
        self._segment: Segment | None = None
        self._watch: ProcessWatch | None = None
        self.device_half: Any = None
        self._process = os.getpid()
        self.id = 0
        # A rank with an impossible argument still says so to the others, which would otherwise wait for it.
        answers = bootstrap.collective(
            "validate",
            lambda: self._validate(
                hidden=hidden,
                topk=topk,
                tokens=tokens,
                dtype=dtype,
                stages=stages,
                depth=depth,
                layers=layers,
                deadline=deadline,
                poll_interval=poll_interval,
                rows=rows,
            ),
        )
        self._agree(answers)
        try:
            handles = bootstrap.collective("allocate", self._allocate)
            bootstrap.collective("map", lambda: self._open(handles, deadline, poll_interval, rows))
            assert self._segment is not None
            self._segment.seal()
            self.order = torch.zeros(1, dtype=torch.int32, device=self.heap.device)
            bootstrap.barrier()
            self.closed = False
        except BaseException:
            self._release()
            raise

    # Construction, in order.

    def _validate(
        self, *, deadline: float, poll_interval: float, rows: int | None, tokens: int, topk: int, **sizes: Any
    ) -> str:
        topology, rank = self.topology, self.bootstrap.rank
        if self.bootstrap.world_size != topology.world_size:
            raise ValueError(
                f"bootstrap has {self.bootstrap.world_size} ranks, but the topology has attention_size + ffn_size = "
                f"{topology.world_size}"
            )
        self.geometry = Geometry.create(topology, tokens=tokens, topk=topk, **sizes)
        for name, value in (("deadline", deadline), ("poll_interval", poll_interval)):
            if not isinstance(value, (int, float)) or not 0 < value < 2**63 / 1e9:
                raise ValueError(f"{name} is {value}, expected more than 0 and less than {2**63 / 1e9:.1e} seconds")
        if rows is not None and not (isinstance(rows, int) and tokens * topk <= rows < 2**31):
            raise ValueError(f"rows is {rows!r}, expected tokens x topk = {tokens * topk} (one arrival) to {2**31 - 1}")
        self.role: Role = topology.role(rank)
        self.role_rank = topology.role_rank(rank)
        fields: dict[str, Any] = dict(zip(_C.GEOMETRY, self.geometry.words, strict=True))
        fields["dtype"] = str(PAYLOAD_DTYPES[self.geometry.dtype]).removeprefix("torch.")
        fields["wire_version"] = _C.WIRE_VERSION
        fields |= {f"expert_map[{e}]": list(place) for e, place in enumerate(topology.expert_map)}
        return json.dumps([topology.describe(rank), fields])

    @staticmethod
    def _agree(answers: list[str]) -> None:
        first_name, first = json.loads(answers[0])
        for answer in answers[1:]:
            name, other = json.loads(answer)
            for field in first | other:
                if first.get(field) != other.get(field):
                    raise GeometryError(
                        f"{name} has {field}={other.get(field)}, {first_name} has {field}={first.get(field)}; "
                        "every rank must be started with the same model"
                    )

    def _allocate(self) -> str:
        regions = len(self.topology.peers(self.bootstrap.rank)) if self.heap.per_role else None
        nbytes, free = self.geometry.window_bytes(regions), self.heap.free_bytes()
        logger.info("%s: window of %.1f MB", self.topology.describe(self.bootstrap.rank), nbytes / 1e6)
        if nbytes > free:
            raise MemoryError(f"the window takes {nbytes} bytes, but {free} are free; lower tokens, stages or depth")
        self._segment = self.heap.allocate(nbytes)
        return json.dumps([process_namespace(), self._process, self._segment.handle])

    def _open(self, handles: list[str], deadline: float, poll_interval: float, rows: int | None) -> str:
        assert self._segment is not None
        geometry = self.geometry
        peers: dict[int, tuple[str, int, str]] = {
            self.topology.role_rank(rank): json.loads(handles[rank])
            for rank in self.topology.peers(self.bootstrap.rank)
        }
        for p, (namespace, process, _) in peers.items():
            if namespace != process_namespace():  # its number would name a stranger here
                raise BootstrapError(
                    f"{self._name(p)} is process {process} of {namespace}, this one runs in {process_namespace()}: "
                    "every rank must see the other ranks' processes"
                )
        self.id = _C.open(
            geometry.words,
            ("attention", "ffn").index(self.role),
            self.role_rank,
            int(deadline * 1e9),
            int(poll_interval * 1e9),
            geometry.tokens * geometry.topk if rows is None else rows,
            self._segment.address,
            [self._reach(p, handle) for p, (_, _, handle) in peers.items()],
            [word for place in self.topology.expert_map for word in place],
        )
        if self.heap.device.type == "cuda":
            half = importlib.import_module("afd_ops._C_cuda")
            half.adopt(self.id, _C.addresses(self.id)["control"], self.heap.device.index)
            self.device_half = half
        half, window = self.device_half or _C, self.id  # not self, which the watching thread would keep alive
        processes = {p: process for p, (_, process, _) in peers.items()}
        try:
            self._watch = ProcessWatch(processes, lambda p: half.peer_gone(window, p))
        except ProcessLookupError as error:
            names = ", ".join(f"{self._name(p)} (process {process})" for p, process in processes.items())
            raise BootstrapError(f"a process has ended already, one of {names}") from error
        return ""

    def _name(self, peer: int) -> str:
        return self.topology.describe(self.topology.peers(self.bootstrap.rank)[peer])

    def _reach(self, peer: int, handle: str) -> int:
        assert self._segment is not None
        try:
            return self._segment.peer(handle)
        except RuntimeError as error:
            raise BootstrapError(f"{self._name(peer)} cannot be reached: {error}") from error

    # Use.

    @property
    def dtype(self) -> torch.dtype:
        return PAYLOAD_DTYPES[self.geometry.dtype]

    @property
    def wide_dtype(self) -> torch.dtype:
        """Of x given to dispatch, of expert_out and of replies: dtype, or bfloat16 if that is float8_e4m3fn."""
        return WIDE_DTYPES[self.geometry.dtype]

    @property
    def generation(self) -> int:
        """How many times the window was reset."""
        return _C.generation(self.id)

    def port(self, layer: int = -1, stage: int = 0) -> torch.Tensor:
        """The port tensor of one (layer, stage), int32 [4]: the argument by which an op learns them.

        It must stay where it is for as long as a graph uses it; the modules keep it as a buffer.
        """
        if not 0 <= stage < self.geometry.stages:
            raise ValueError(
                f"stage is {stage}, expected 0 to {self.geometry.stages - 1}: the window has {self.geometry.stages}"
            )
        if layer >= self.geometry.layers:
            raise ValueError(f"layer is {layer}, expected below {self.geometry.layers}: the window's layers")
        content = torch.zeros(_C.PORT_WORDS, dtype=torch.int32)
        content[0], content[1], content[2] = _C.PORT_MAGIC, layer, stage
        return content.to(self.heap.device)

    def check(self) -> None:
        """Raises the typed error that stopped this window, if there is one. One host load; never waits.

        Raises:
            ClosedError: the window is closed.
            PeerError: it has stopped.
        """
        error = self._stopped()
        if error is not None:
            raise from_record(error)

    def _stopped(self) -> dict[str, Any] | None:
        self._require_own()
        return _C.check(self.id)

    def _require_own(self) -> None:
        if self.closed:
            raise ClosedError(f"window {self.id} is closed")
        if os.getpid() != self._process:  # a word from here would be taken for its parent's
            raise ClosedError(
                f"window {self.id} was opened by process {self._process}, this is process {os.getpid()}: a forked "
                "process must open its own"
            )

    def errors(self) -> list[dict[str, Any]]:
        """Every error record: on an FFN rank one per region that failed, although the others are served on."""
        return _C.errors(self.id)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step of an engine: typed errors inside, `check()` at the end.

        An exception that escapes between a dispatch and its combine poisons the window until `reset()`: nobody will
        take the reply that is on its way, and it must not meet the next request. What other threads dispatch does
        not count. A request is told by its port tensor, which dispatch and combine must share, as the modules do.
        """
        self._require_own()
        generation, begun = self.generation, _C.trips_clock(self.id)
        try:
            yield
        except BaseException as error:
            # What a reset has dropped needs no poison.
            if not self.closed and self.generation == generation and _C.owes(self.id, begun):
                self.poison(generation)
            if isinstance(error, Exception):
                self.raise_typed(error)
            raise
        self.check()

    def raise_typed(self, error: Exception) -> NoReturn:
        """Raises `error`, in its typed form if an op of this window raised it."""
        better: Exception = error
        if isinstance(error, RuntimeError):
            better = typed(error, None if self.closed else _C.check(self.id))
        if better is error:
            raise error
        raise better from error

    def mask(self, ffn_rank: int) -> None:
        """Attention ranks: leave an FFN rank out from now on, also if it has ended: nothing is sent to it, nobody waits
        for it, its experts contribute zero. `affected` says to which tokens. Until `reset()`."""
        if self.role != "attention":
            raise ValueError(
                f"window belongs to {self.topology.describe(self.bootstrap.rank)}, expected an attention rank"
            )
        self.topology.world_rank("ffn", ffn_rank)  # validates
        self._require_own()
        _C.mask(self.id, ffn_rank)
        if self.device_half:
            self.device_half.mask(self.id, ffn_rank)

    def affected(self, ticket: torch.Tensor) -> torch.Tensor:
        """Which tokens of a ticket have an expert on a masked FFN rank: bool [T]."""
        words = -(-self.geometry.ffn_size // 32)
        bits = [0] * words
        for rank, masked in enumerate(_C.masked(self.id)):
            bits[rank // 32] |= masked << (rank % 32)
        mask = torch.tensor(bits, dtype=torch.int64).to(torch.int32).to(ticket.device)
        return ((ticket[1:, :words] & mask) != 0).any(dim=1)

    def poison(self, generation: int | None = None) -> None:
        """This rank gives up: its window stops and its peers are told. Ends with `reset()` or `close()`.

        Nothing happens if it has stopped already, or if a reset is under way or has failed.

        Args:
            generation: nothing happens if the window is at another one by now; by default the one it is at.
        """
        self._require_own()
        (self.device_half or _C).poison(self.id, self.generation if generation is None else generation)

    def stats(self) -> dict[str, Any]:
        """Counters since construction: dispatches, combines, items, replies, rows, tokens; per peer bytes_sent and, on
        an FFN rank, slots_taken and rows_taken."""
        if self.device_half:
            self.device_half.fetch_stats(self.id)
        return _C.stats(self.id)

    # The end.

    def reset(self) -> None:
        """Collective, all ranks alive: drops what is in flight and every error, and starts the next generation.

        The window id, ports and captured graphs stay valid; tickets and items of before are refused. A rank's server
        loop and ops in other threads end with AbortedError.

        Raises:
            BootstrapError: a rank did not take part; survivors close() and build a new window.
        """
        self._require_own()
        _C.set_abort(self.id)
        if not _C.drain(self.id, int(self.bootstrap.timeout * 1e9)):
            raise AbortedError(f"an op of this rank did not end within {self.bootstrap.timeout} s; reset() gave up")
        if self.device_half:
            self.device_half.synchronize(self.id)
        self.bootstrap.barrier()  # a store of before must not land in zeroed memory
        _C.rewind(self.id)
        half = self.device_half or _C
        if self.device_half:
            half.rewind(self.id)
        if self._watch is not None:  # news that has just been rewound does not come again
            for peer in self._watch.ended:
                half.peer_gone(self.id, peer)
        self.bootstrap.barrier()
        _C.resume(self.id)

    def close(self) -> None:
        """Tells the peers that this rank is done and gives the memory back. Not collective; may be called twice."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() == self._process:
            (self.device_half or _C).leave(self.id)
            self._release()
        elif self._segment is not None:  # a fork's copy: only its mappings are its own, the watch's eventfd is shared
            self._segment.close()

    def _release(self) -> None:
        drained = True
        if self._watch is not None:
            self._watch.close()
        if self.id:
            _C.set_closed(self.id)
            _C.set_abort(self.id)
            drained = _C.drain(self.id, 5_000_000_000)
        if self.device_half:
            self.device_half.synchronize(self.id)
        if self._segment is not None and drained:  # a thread still inside an op keeps its memory
            self._segment.close()
            self._segment = None

    def __del__(self) -> None:
        # Not collective. Without it the id would outlive the memory behind it.
        # A constructor that raised on its first lines; an interpreter that has taken its modules apart.
        with suppress(AttributeError, TypeError):
            self.close()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        return self  # a copied module sends through the same window

    def __reduce__(self) -> str:
        raise TypeError("a Window belongs to its process and cannot be pickled")


def open_local(
    topology: Topology, *, devices: str | Sequence[str] = "cpu", timeout: float = 60.0, **sizes: Any
) -> list[Window]:
    """The windows of all ranks of a topology inside this process, by world rank, on the local heap.

    Args:
        devices: one for all ranks, or one per world rank ("cuda:0", "cuda:1", ...).
        sizes: as for `Window`.
    """
    by_rank = [devices] * topology.world_size if isinstance(devices, str) else list(devices)
    if len(by_rank) != topology.world_size:
        raise ValueError(f"devices has {len(by_rank)} entries, expected {topology.world_size}, one per rank")
    store, memory = HashStore(), list[torch.Tensor]()
    windows: list[Window | None] = [None] * topology.world_size
    failures: list[BaseException] = []

    def build(rank: int) -> None:
        try:
            bootstrap = Bootstrap(store, rank, topology.world_size, timeout=timeout)
            windows[rank] = Window(topology, bootstrap, heap=LocalHeap(by_rank[rank], memory), **sizes)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=build, args=(rank,)) for rank in range(topology.world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        # The rank that failed knows more than those that were told.
        raise next((e for e in failures if not isinstance(e, BootstrapError)), failures[0])
    return [window for window in windows if window is not None]
