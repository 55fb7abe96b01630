"""The yardstick for round_trip.py: NCCL send and receive of bare activations, no routing, grouping or reduction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import common
import torch
import torch.distributed as dist
import workload


def start(rank: int, store: dist.Store) -> None:
    dist.init_process_group(
        "nccl", store=dist.PrefixStore("nccl", store), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )


def end() -> None:
    dist.destroy_process_group()


def round_trip(rank: int, barrier: Callable[[], object], case: workload.Case, pairs: int, replays: int) -> Any:
    """period_us, drained_us and error on rank 0, {} on rank 1; `pairs` of them in a captured graph, one in flight."""
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
        period = common.period_us(graph.replay, pairs, replays)
        drained = common.drained_us(single.replay)
        return {"period_us": period, "drained_us": drained, "error": workload.difference(y, x)}
    for _ in range(common.TRIALS * replays):
        graph.replay()
    for _ in range(common.DRAINED):
        single.replay()
    torch.cuda.synchronize()
    return {}
