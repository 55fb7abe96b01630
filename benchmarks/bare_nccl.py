"""The yardstick for round_trip.py: NCCL send and receive of bare activations, no routing, grouping or reduction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import common
import torch
import torch.distributed as dist
import workload

ALONE = 100  # replays of the graph with one pair


def start(rank: int, store: dist.Store) -> None:
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


def end() -> None:
    dist.destroy_process_group()


def round_trip(rank: int, barrier: Callable[[], object], case: workload.Case, pairs: int, replays: int) -> Any:
    """period_us, drained_us and error on rank 0, {} on rank 1; captured, one pair in flight.

    The period is the better of `pairs` pairs in a graph and of one: torch hands NCCL another stream, and what that
    costs depends on the graph.
    """
    x, _, _ = workload.inputs(case)
    y = torch.zeros_like(x)

    def chain(count: int) -> None:
        for _ in range(count):
            if rank == 0:
                dist.send(x, 1)
                dist.recv(y, 1)
            else:
                dist.recv(y, 0)
                dist.send(y, 0)

    chain(5)
    torch.cuda.synchronize()
    barrier()
    graph, single = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(pairs)
    with torch.cuda.graph(single):
        chain(1)
    y.zero_()
    torch.cuda.synchronize()
    barrier()
    graph.replay()
    torch.cuda.synchronize()
    if rank == 0:
        period = min(common.period_us(graph.replay, pairs, replays), common.period_us(single.replay, 1, ALONE))
        drained = common.drained_us(single.replay)
        return {"period_us": period, "drained_us": drained, "error": workload.difference(y, x)}
    for _ in range(common.TRIALS * replays):
        graph.replay()
    for _ in range(common.TRIALS * ALONE + common.DRAINED):
        single.replay()
    torch.cuda.synchronize()
    return {}
