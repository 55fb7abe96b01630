"""The round trip in plain torch, slow and obvious: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from afd_ops.topology import Topology


def routed_sum(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, expert: Callable[[int, Tensor], Tensor]) -> Tensor:
    """sum over k of weights[t, k] * expert(ids[t, k], x[t]), token by token, in the dtype of x.

    Args:
        x: [T, H]; give float64 for an oracle of rounding errors.
        topk_ids: [T, topk]; -1 = no expert. Duplicates count twice.
        topk_weights: [T, topk].
        expert: (logical expert, row [H]) -> row [H].
    """
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for k in range(topk_ids.shape[1]):
            index = int(topk_ids[t, k])
            if index >= 0:
                out[t] += topk_weights[t, k].to(x.dtype) * expert(index, x[t])
    return out


def round_trip(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base: Tensor,
    topology: Topology,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """dispatch .. combine with the roundings of the real thing: each F rank's float32 sum is rounded to x's dtype, the
    sums are added to base in float32 in F-rank order, and the result is rounded to base's dtype.

    Args:
        expert: (logical expert, row [H] in x's dtype) -> row [H] in x's dtype.
    """
    out = base.float()
    for rank in range(topology.ffn_size):
        mine = torch.tensor([owner == rank for owner, _ in topology.expert_map] + [False])  # [-1] = no expert
        ids = torch.where(mine[topk_ids.long()], topk_ids.long(), -1)
        part = routed_sum(x.float(), ids, topk_weights, lambda e, row: expert(e, row.to(x.dtype)).float())
        answered = (ids >= 0).any(dim=1)
        out[answered] += part[answered].to(x.dtype).float()
    return out.to(base.dtype)
