"""Experts captured in CUDA graphs, one per (layer, bucket of rows)."""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from afd_ops import _C
from afd_ops.buckets import Entry, GraphCache
from afd_ops.layout import PAYLOAD_DTYPES, WIDE_DTYPES


class Experts(Protocol):
    """Any callable (rows [R, H], scales, offsets [owned experts] int32, layer) -> [R, H].

    Rows stand in local-expert order, expert e's from offsets[e - 1] to offsets[e]. Rows past the last offset are
    uninitialised: they may be computed on, never reduced over. With a float8_e4m3fn payload scales is float32
    [R, H / 128], see `dequantize`, else [0]. The result is in the window's wide dtype.
    """

    def __call__(self, rows: Tensor, scales: Tensor, offsets: Tensor, layer: int, /) -> Tensor: ...


@dataclass(frozen=True)
class ItemBuffers:
    """Where an FFN rank receives its items: rows, scales and offsets as `Experts` takes them, always at one place."""

    rows: Tensor
    scales: Tensor
    offsets: Tensor

    @staticmethod
    def create(rows: int, hidden: int, owned: int, dtype: torch.dtype, device: torch.device | str) -> ItemBuffers:
        """For items of up to `rows` rows of a rank that owns `owned` experts; dtype is the window's."""
        quantized = WIDE_DTYPES[PAYLOAD_DTYPES.index(dtype)] != dtype
        scales = (rows, hidden // _C.SCALE_BLOCK) if quantized else (0,)
        return ItemBuffers(
            torch.empty((rows, hidden), dtype=dtype, device=device),
            torch.empty(scales, dtype=torch.float32, device=device),
            torch.zeros(owned, dtype=torch.int32, device=device),
        )

    def first(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """The arguments of experts for an item of that many rows."""
        return self.rows[:rows], self.scales[:rows] if self.scales.numel() else self.scales, self.offsets


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    out: Tensor


class CapturedExperts:
    """An experts callable whose usual sizes are CUDA graphs: give it to `ExpertServer` in the callable's place.

    Knows no window: build and `capture` it before the window opens, and keep it when a window is replaced. An item
    replays the smallest bucket that holds its rows; one that has none is computed eagerly, with the same result.

    Args:
        experts: see `Experts`. What it does must be capturable: no synchronisation, no value read on the host; and it
            draws no random numbers.
        rows: the most rows of an item: the window's `rows`, by default tokens x topk.
        hidden, dtype: the window's.
        owned: experts that this rank owns.
        device: a GPU.
        limit: bytes that graphs may take on the device, their memory pool included; None = no limit. The least used
            are given up first, of those the largest.

    Attributes:
        inputs: where the server receives items.
        graph_table: of each graph layer, bucket and cudaGraphExec_t, ordered by them; what the server looks up.
    """

    def __init__(
        self,
        experts: Experts,
        *,
        rows: int,
        hidden: int,
        owned: int,
        dtype: torch.dtype,
        device: torch.device | str,
        limit: int | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ValueError(f"device is {device}, expected a GPU: graphs are captured there only")
        self.experts = experts
        self.inputs = ItemBuffers.create(rows, hidden, owned, dtype, self.device)
        self.nbytes = 0
        self.seconds = 0.0
        self.live_rows = self.bucket_rows = 0
        self.graph_table = array("q")
        self._entries: list[Entry[_Graph]] = []
        self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._graphs: GraphCache[_Graph] = GraphCache(self._capture, self._release, lambda: self.nbytes, limit)

    def capture(self, layers: Iterable[int], buckets: Iterable[int]) -> None:
        """Captures every bucket for every layer, the largest first; what is there already stays, within the limit.

        Waits for the device. Not while a server runs on these experts. On a GPU that an attention rank of this process
        shares, not after that rank's first dispatch: allocating may wait for its kernels, which wait for the answer.
        Meanwhile no other thread may wait for this device or draw random numbers on it: CUDA or torch refuse that.

        Args:
            layers: layer numbers.
            buckets: rows, see `ladder`.
        """
        sizes = sorted(set(buckets))
        most = self.inputs.rows.shape[0]
        if sizes and not 0 < sizes[0] <= sizes[-1] <= most:
            raise ValueError(f"buckets go from {sizes[0]} to {sizes[-1]}, expected 1 to {most}: the rows of an item")
        begun = time.perf_counter()
        with torch.cuda.device(self.device), torch.inference_mode():
            self._entries, self.graph_table = [], array("q")  # what is captured may raise, after graphs were given up
            try:
                self._graphs.fill(layers, sizes)
                torch.cuda.synchronize()
            finally:
                self._entries = list(self._graphs)
                for entry in self._entries:
                    self.graph_table.extend((entry.layer, entry.bucket, entry.graph.graph.raw_cuda_graph_exec()))
        self.seconds += time.perf_counter() - begun

    def launched(self, graph: int, rows: int) -> Tensor:
        """Counts a replay; what it makes of the first `rows` rows of `inputs`: [bucket, H], good until the next one.

        Args:
            graph: its place in `graph_table`.
        """
        entry = self._entries[graph]
        entry.uses += 1
        self.live_rows += rows
        self.bucket_rows += entry.bucket
        return entry.graph.out

    def __call__(self, rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        """Eagerly, see `Experts`."""
        return self.experts(rows, scales, offsets, layer)

    def stats(self) -> dict[str, Any]:
        """graphs, graph_bytes, capture_seconds, padding (of the rows that graphs computed), uses by (layer, bucket)."""
        return {
            "graphs": len(self._graphs),
            "graph_bytes": self.nbytes,
            "capture_seconds": self.seconds,
            "padding": 1 - self.live_rows / self.bucket_rows if self.bucket_rows else 0.0,
            "uses": {(entry.layer, entry.bucket): entry.uses for entry in self._graphs},
        }

    # The cache's callbacks.

    def _capture(self, layer: int, bucket: int) -> _Graph:
        arguments = self.inputs.first(bucket)
        owned = self.inputs.offsets.shape[0]
        ends = torch.arange(1, owned + 1, dtype=torch.int64) * bucket // max(1, owned)
        self.inputs.offsets.copy_(ends.to(torch.int32))
        self._stream.wait_stream(torch.cuda.current_stream())
        if not any(entry.bucket == bucket for entry in self._graphs):
            with torch.cuda.stream(self._stream):  # loads this size's kernels, which a capture may not
                self.experts(*arguments, layer)
            torch.cuda.empty_cache()  # else the pool of the graphs would stand beside as much cached memory
        # The memory of one as large or larger, which is enough. A pool gives back nothing before its last graph goes: a
        # graph larger than all others, which may go beyond the limit, must not make theirs grow.
        pools = [entry.graph.graph.pool() for entry in self._graphs if entry.bucket >= bucket]
        pool = pools[0] if pools else torch.cuda.graph_pool_handle()
        self._stream.synchronize()
        before, _ = torch.cuda.mem_get_info()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream), _no_garbage_collection():
            # Not torch.cuda.graph: it empties the cache each time. Other threads may launch.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = self.experts(*arguments, layer).contiguous()
            except BaseException:
                with suppress(RuntimeError):  # that the capture was not completed
                    graph.capture_end()
                raise
            graph.capture_end()
            graph.replay()  # uploads it
        self._stream.synchronize()
        # The address alone: replays follow each other on one stream, so all graphs may use the same memory.
        out = device_memory(out.data_ptr(), out.nbytes, out.device).view(out.dtype).view(out.shape)
        self.nbytes += before - torch.cuda.mem_get_info()[0]
        return _Graph(graph, out)

    def _release(self, graph: _Graph) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what is counted below is the graph's
        before, _ = torch.cuda.mem_get_info()
        graph.graph.reset()
        torch.cuda.empty_cache()  # its pool's, if it was the last one there
        self.nbytes -= torch.cuda.mem_get_info()[0] - before


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A graph that is found to be garbage while this thread captures would be destroyed, which ends the capture."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def device_memory(address: int, nbytes: int, device: torch.device | str) -> Tensor:
    """Memory of a GPU as uint8, without owning it."""

    class Memory:
        __cuda_array_interface__: ClassVar[dict[str, Any]] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    return torch.as_tensor(Memory(), device=device)
