"""A cluster on GPUs inside one process: experts that tell the host nothing, attention halves in graphs, oracles.

All payloads are small integers, so that every result must equal the oracle exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import harness
import torch
from torch import Tensor

import afd_ops
from afd_ops import _C

SIZES: dict[str, Any] = dict(
    hidden=256, topk=4, tokens=128, dtype=torch.bfloat16, stages=1, depth=2, deadline=10.0, poll_interval=0.002
)
BY_HAND: dict[str, Any] = dict(threads=False, poll_interval=2.0)  # a server's step waits for what is on its way
LAYERS = 4  # experts of layers that differ by this many are alike
TICKET_GENERATION, TICKET_RING = 0, 2  # words of a ticket's first row

FUSED, SPLIT = 5, 100  # tokens of a combine that is one launch, and of one that is a wait and a sum


# Experts by offsets on the device, and what they must give.


def device_experts(window: afd_ops.Window) -> afd_ops.Experts:
    """No two experts, and no two layers, agree; nothing here is read back by the host.

    The layer is an int (from the server) or a tensor (in a captured server). Run once here for many shapes, so that no
    kernel is first loaded while another one waits on this GPU.
    """
    device = window.heap.device
    owned = torch.tensor(window.topology.experts_of(window.role_rank), device=device)

    def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: Any) -> Tensor:
        if rows.dtype == torch.float8_e4m3fn:
            rows = afd_ops.dequantize(rows, scales)
        place = torch.arange(rows.shape[0], dtype=torch.int32, device=device)
        local = torch.searchsorted(offsets, place, right=True).clamp(max=owned.shape[0] - 1)
        index = owned[local].unsqueeze(1)
        return rows * (index % 3 + 1) + (index + layer % LAYERS)

    layers = (1, torch.ones((), dtype=torch.int32, device=device))
    for count in (1, 2, 3, 4, 5, 8, 33, 256, 400, 512):
        rows = torch.ones(count, window.geometry.hidden, device=device).to(window.dtype)
        scales = torch.ones(count, window.geometry.hidden // _C.SCALE_BLOCK, device=device)
        offsets = torch.full((owned.shape[0],), count, dtype=torch.int32, device=device)
        for layer in layers:
            assert experts(rows, scales, offsets, layer).dtype == window.wide_dtype
    torch.cuda.synchronize(device)
    return experts


def inputs(window: afd_ops.Window, turns: int, count: int) -> list[Tensor]:
    """x, topk_ids (some -1, some twice in a row), topk_weights, base of `turns` steps, stacked: small integers."""
    g, device = window.geometry, window.heap.device

    def integers(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (turns, count, columns), device=device)

    x = integers(-3, 4, g.hidden)
    if window.dtype == torch.float8_e4m3fn:
        x[..., :: _C.SCALE_BLOCK] = 7  # a block whose largest element is 7 is quantised without loss
    return [
        x.to(window.wide_dtype),
        integers(-1, g.num_experts, g.topk),
        integers(0, 3, g.topk).float(),
        integers(-3, 4, g.hidden).to(window.wide_dtype),
    ]


def one_step(window: afd_ops.Window, count: int) -> list[Tensor]:
    return [stacked[0] for stacked in inputs(window, 1, count)]


def oracle(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor, layer: int = 0) -> Tensor:
    """base + the routed experts' weighted sum, for any number of leading dimensions."""
    live, ids = ids >= 0, ids.clamp(min=0)
    weights = torch.where(live, weights, torch.zeros_like(weights))
    scale = (weights * (ids % 3 + 1)).sum(-1, keepdim=True)
    shift = (weights * (ids + layer % LAYERS)).sum(-1, keepdim=True)
    return (base.float() + x.float() * scale + shift).to(base.dtype)


def differing(outs: Tensor, want: Tensor) -> list[int]:
    """The turns, by the first dimension, in which any element differs; a NaN always does."""
    return (outs != want).flatten(1).any(1).nonzero().flatten().tolist()  # type: ignore[no-any-return]


def attention_half(module: afd_ops.RemoteExperts, x: Tensor, ids: Tensor, weights: Tensor, base: Tensor) -> Tensor:
    ticket = module.dispatch(x, ids, weights)
    work = base * 2 + x  # overlaps with the experts
    return module.combine(ticket, work)


def attention_oracle(x: Tensor, ids: Tensor, weights: Tensor, base: Tensor, layer: int = 0) -> Tensor:
    return oracle(x, ids, weights, base * 2 + x, layer)


# A cluster inside this process.


@dataclass(frozen=True)
class Cluster:
    attention: list[afd_ops.Window]
    ffn: list[afd_ops.Window]
    servers: list[afd_ops.ExpertServer]
    streams: list[torch.cuda.Stream | None]  # of the servers

    @property
    def windows(self) -> list[afd_ops.Window]:
        return [*self.attention, *self.ffn]

    def answer(self, *ranks: int) -> list[int]:
        """One step of each of these FFN ranks, all by default, by this thread: how many slots each answered."""
        slots = []
        for rank in ranks or range(len(self.servers)):
            with torch.cuda.stream(self.streams[rank]):
                slots.append(self.servers[rank].step())
        return slots

    def reset(self) -> None:
        harness.reset(self.windows)


@contextmanager
def cluster(
    topology: afd_ops.Topology,
    make_experts: Callable[[afd_ops.Window], afd_ops.Experts] = device_experts,
    *,
    threads: bool = True,
    **sizes: Any,
) -> Iterator[Cluster]:
    """All ranks of a topology; the FFN ranks serve from threads, or by hand (`Cluster.answer`).

    The body runs on a stream of its own, and every server on another. The first round trip is made here, patiently:
    combine is not launched before everybody has answered, so that no server allocates for the first time behind it.
    """
    with harness.windows(topology, **{**SIZES, **sizes}) as windows:
        attention, ffn = windows[: topology.attention_size], windows[topology.attention_size :]
        servers = [afd_ops.ExpertServer(window, make_experts(window)) for window in ffn]
        with torch.cuda.stream(torch.cuda.Stream(attention[0].heap.device)):
            streams = [harness.server_stream(window) for window in ffn]
            kept = []
            for window, stream in zip(ffn, streams, strict=True):
                with torch.cuda.stream(stream):
                    # empty_cache() leaves its segment
                    kept.append(torch.empty(512, dtype=torch.uint8, device=window.heap.device))
            ready = Cluster(attention, ffn, servers, streams)
            with harness.answering(servers, streams) if threads else nullcontext():
                _first_round_trip(ready, threads)
                yield ready


def _first_round_trip(ready: Cluster, threads: bool) -> None:
    for window in ready.attention:
        module, step = harness.remote(window), one_step(window, min(3, window.geometry.tokens))
        work = step[3] * 2 + step[0]
        answered = [ffn.stats()["replies"] for ffn in ready.ffn]
        ticket = module.dispatch(*step[:3])
        torch.cuda.current_stream().synchronize()
        if not threads:
            ready.answer()
        until = time.monotonic() + 10
        while [ffn.stats()["replies"] for ffn in ready.ffn] != [n + 1 for n in answered]:
            assert time.monotonic() < until, "an FFN rank does not answer"
            time.sleep(0.001)
        module.combine(ticket, work)
        torch.cuda.current_stream().synchronize()
        window.check()


def slot_index(window: afd_ops.Window, region: int, stage: int, ring: int) -> int:
    return (region * window.geometry.stages + stage) * window.geometry.depth + ring


def assert_exact_again(ready: Cluster, layer: int = 1, stage: int = 0) -> None:
    """Every attention rank's next steps, more of them than rings."""
    for window in ready.attention:
        module = harness.remote(window, layer, stage)
        for count in (SPLIT, 1, FUSED, 0, 2):
            step = one_step(window, count)
            want = oracle(*step, layer)
            torch.cuda.synchronize()
            ticket = module.dispatch(*step[:3])
            assert ready.answer() == [1] * len(ready.servers)
            out = module.combine(ticket, step[3])
            torch.cuda.synchronize()
            window.check()
            assert torch.equal(out, want), count


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """On a stream that no other thread uses: torch hands out 32 in turn. Others go on launching and allocating."""
    with (
        torch.cuda.device(stream.device),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        yield


class Captured:
    """`attention_half` of one lane in a graph, over buffers that stay where they are."""

    def __init__(
        self, window: afd_ops.Window, count: int, layer: int = 0, stage: int = 0, ids: torch.dtype = torch.int64
    ) -> None:
        self.layer, self.module = layer, harness.remote(window, layer, stage)
        self.buffers = [t.clone() for t in one_step(window, count)]
        self.buffers[1] = self.buffers[1].to(ids)
        self.graph = torch.cuda.CUDAGraph()
        with capturing(self.graph, torch.cuda.current_stream()):
            self.out = attention_half(self.module, *self.buffers)

    def replay(self, step: Sequence[Tensor], out: Tensor) -> None:
        """On the current stream, without a word to the host."""
        for buffer, fresh in zip(self.buffers, step, strict=True):
            buffer.copy_(fresh)
        self.graph.replay()
        out.copy_(self.out)


def nans_like(t: Tensor) -> Tensor:
    return torch.full_like(t, float("nan"))
