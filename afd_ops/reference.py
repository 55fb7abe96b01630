"""The round trip in plain torch, slow and obvious: the oracle of the tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from afd_ops.ffn import dequantize
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


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """What dispatch makes of x for a float8_e4m3fn payload.

    Per token and 128 channels: amax = max |x|, at least 448 * 2**-126; scale = amax / 448; rows = x * (448 / amax),
    rounded to nearest even. An inf or NaN makes NaN of its block (after `dequantize`).

    Args:
        x: [T, H] bfloat16, H a multiple of 128.

    Returns:
        rows [T, H] float8_e4m3fn, scales [T, H / 128] float32.
    """
    blocks = x.float().reshape(x.shape[0], x.shape[1] // 128, 128)
    amax = blocks.abs().amax(dim=2).clamp(min=448 * 2.0**-126)
    most = torch.full_like(amax, 448.0)  # not a number: torch may multiply by a number's reciprocal
    rows = (blocks * (most / amax)[:, :, None]).flatten(1).to(torch.float8_e4m3fn)
    return rows, amax / most


def round_trip(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    base: Tensor,
    topology: Topology,
    expert: Callable[[int, Tensor], Tensor],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """dispatch .. combine with the roundings of the real thing: each F rank's float32 sum is rounded to x's dtype, the
    sums are added to base in float32 in F-rank order, and the result is rounded to base's dtype.

    Args:
        expert: (logical expert, row [H] in x's dtype) -> row [H] in x's dtype.
        dtype: the window's; if it is float8_e4m3fn, experts see x as it comes out of `quantize` and `dequantize`.
    """
    if dtype == torch.float8_e4m3fn:
        x = dequantize(*quantize(x), x.dtype)
    out = base.to(torch.float32, copy=True)
    for rank in range(topology.ffn_size):
        mine = torch.tensor([owner == rank for owner, _ in topology.expert_map] + [False])  # [-1] = no expert
        ids = torch.where(mine[topk_ids.long()], topk_ids.long(), -1)
        part = routed_sum(x.float(), ids, topk_weights, lambda e, row: expert(e, row.to(x.dtype)).float())
        answered = (ids >= 0).any(dim=1)
        out[answered] += part[answered].to(x.dtype).float()
    return out.to(base.dtype)
