"""The yardstick: the same round trip composed of stock tensor ops over NVSHMEM memory, for round_trip.py.

Sort + searchsorted plan, whole-batch slots copied field by field, flag last; the FFN host polls the flag and reads the
header, then index_select and index_add in bf16; the attention stream waits for a constant marker and resets it. The
attention half is captured. Timed pairs have no experts at all; the first pairs and the last, which are not timed, have
them and are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import common
import torch
import workload
from torch import Tensor

from afd_ops.heap.nvshmem import NvshmemHeap

CHECKED = 3  # pairs at the start, before the capture
DEADLINE = 20.0
TOKENS, ROUTED, BEGIN, COUNTS = 3, 5, 6, 7  # words of the header


class Slot:
    """The fields of one rank's memory, each at a multiple of 256 bytes."""

    def __init__(self, case: workload.Case, memory: Tensor | None = None) -> None:
        pairs = case.tokens * case.topk
        self.nbytes = 0
        self._memory = memory
        self.flag = self._field(1, torch.int32)
        self.header = self._field(COUNTS + workload.EXPERTS, torch.int32)
        self.token = self._field(pairs, torch.int32)
        self.weight = self._field(pairs, torch.float32)
        self.payload = self._field(case.tokens * case.hidden, case.dtype)
        if memory is not None:
            self.payload = self.payload.view(case.tokens, case.hidden)

    def _field(self, count: int, dtype: torch.dtype) -> Tensor:
        begin = self.nbytes
        self.nbytes += -(-count * dtype.itemsize // 256) * 256
        if self._memory is None:
            return torch.empty(0)
        return self._memory[begin : begin + count * dtype.itemsize].view(dtype)


def round_trip(
    rank: int, heap: NvshmemHeap, barrier: Callable[[], object], case: workload.Case, replays: int
) -> dict[str, Any]:
    """On rank 0 period_us, drained_us and error (relative, by norm: bf16 sums round at every step); {} on rank 1."""
    memory = heap.core.tensor((Slot(case).nbytes,), dtype=torch.uint8)
    heap.keep(memory)
    memory.zero_()
    torch.cuda.synchronize()
    barrier()
    local, peer = Slot(case, memory), Slot(case, heap.core.get_peer_tensor(memory, 1 - rank))
    timed = replays * (1 + common.TRIALS) + common.DRAINED
    found: dict[str, Any] = {}
    with torch.inference_mode():
        if rank == 0:
            found = _attention(local, peer, case, replays)
        else:
            _ffn(local, peer, case, timed)
    barrier()
    return found


def _attention(local: Slot, peer: Slot, case: workload.Case, replays: int) -> dict[str, Any]:
    from cuda.bindings import driver

    x, ids, weights = workload.inputs(case)
    sequence = torch.zeros(1, dtype=torch.int32, device="cuda")
    header = torch.zeros_like(local.header)
    header[TOKENS] = case.tokens
    probe = torch.arange(workload.EXPERTS + 1, device="cuda", dtype=torch.int32)

    def pair() -> Tensor:
        sequence.add_(1)
        sorted_ids, order = torch.sort(ids.reshape(-1), stable=True)
        bounds = torch.searchsorted(sorted_ids, probe)
        counts = bounds[1:] - bounds[:-1]
        token = torch.div(order, case.topk, rounding_mode="floor").int()
        weight = weights.reshape(-1)[order].float()
        header[ROUTED] = counts.sum()
        header[BEGIN] = bounds[0]
        header[COUNTS:] = counts
        peer.header.copy_(header)
        peer.token.copy_(token)
        peer.weight.copy_(weight)
        peer.payload.copy_(x)
        peer.flag.copy_(sequence)
        out = torch.zeros_like(x)
        stream = torch.cuda.current_stream().cuda_stream
        (status,) = driver.cuStreamWaitValue32(stream, local.flag.data_ptr(), 1, 0)  # greater or equal
        assert status == driver.CUresult.CUDA_SUCCESS, status
        out += local.payload
        local.flag.zero_()
        return out

    want = workload.expected(case, x, ids, weights, 1, factors=workload.factors()).float()

    def check(got: Tensor) -> float:
        return float(((got.float() - want).norm() / want.norm()).item())

    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(CHECKED):
            y = pair()
        torch.cuda.synchronize()
        error = check(y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pair()
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize()
    period = common.period_us(graph.replay, 1, replays)
    drained = common.drained_us(graph.replay)
    graph.replay()
    return {"period_us": period, "drained_us": drained, "error": max(error, check(y))}


def _ffn(local: Slot, peer: Slot, case: workload.Case, timed: int) -> None:
    flag, header = (torch.zeros(n, dtype=torch.int32).pin_memory() for n in (1, local.header.numel()))
    polling, seen, factors = torch.cuda.Stream(), 0, workload.factors()
    for pair in range(CHECKED + timed + 1):
        until = time.monotonic() + DEADLINE
        while True:
            with torch.cuda.stream(polling):
                flag.copy_(local.flag, non_blocking=False)
            if flag.item() != seen:
                seen = int(flag.item())
                break
            if time.monotonic() > until:
                raise TimeoutError(f"pair {pair} of {CHECKED + timed + 1} did not come within {DEADLINE} s")
        with torch.cuda.stream(polling):
            header.copy_(local.header)
        words = header.tolist()
        routed = words[ROUTED]
        token = local.token[:routed].to(torch.int64)
        rows = local.payload.index_select(0, token)
        if not CHECKED <= pair < CHECKED + timed:
            mine = torch.repeat_interleave(factors, torch.tensor(words[COUNTS:], device="cuda")).unsqueeze(1)
            rows[:, : workload.COLUMNS] = (rows[:, : workload.COLUMNS].float() * mine).to(rows.dtype)
        out = torch.zeros(case.tokens, case.hidden, dtype=case.dtype, device="cuda")
        out.index_add_(0, token, rows * local.weight[:routed].unsqueeze(1).to(rows.dtype))
        peer.payload.copy_(out)
        peer.flag.fill_(1)
    torch.cuda.synchronize()
