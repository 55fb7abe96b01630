"""Where the routed experts of a layer are: on FFN ranks, or in this process. Both have

ticket = experts.dispatch(x [T, D], topk_ids [T, k], topk_weights [T, k])
out    = experts.combine(ticket, base [T, D], overlapped)    # base + sum over k of weight * expert(x)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import afd_ops


@torch.library.custom_op(
    "deepseek_v4::computed_by_now", mutates_args=("order",), schema="(Tensor(a!) order, Tensor[] results) -> ()"
)
def computed_by_now(order: Tensor, results: Sequence[Tensor]) -> None:
    """Does nothing, but needs `results` and keeps its place among the ops that mutate `order`.

    A compiler sinks what combine does not consume behind it, and of what a layer computes meanwhile only the shared
    expert's output can be its base: the mixed residual streams are n times as large.
    """


class RemoteExperts(afd_ops.RemoteExperts):
    """On FFN ranks."""

    def combine(self, ticket: Tensor, base: Tensor, overlapped: Sequence[Tensor] = ()) -> Tensor:
        """As in afd_ops; `overlapped` is what else was computed since dispatch, and is to stay before combine."""
        computed_by_now(self.order, overlapped)
        return super().combine(ticket, base)


class LocalExperts(nn.Module):
    """In this process: the model unsplit.

    Args:
        experts: all experts of all layers; see afd_ops.Experts. torch compiles the grouped GEMM in bfloat16 only.
        num_experts: of a layer.
    """

    def __init__(self, layer: int, experts: afd_ops.Experts, num_experts: int) -> None:
        super().__init__()
        self.layer, self.num_experts = layer, num_experts
        self.experts = experts

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The routed sum itself, float32 [T, D]."""
        flat = topk_ids.flatten()
        expert, order = torch.where(flat < 0, self.num_experts, flat).sort(stable=True)
        offsets = torch.searchsorted(expert, torch.arange(self.num_experts, device=x.device), right=True).int()
        rows = self.experts(x[order // topk_ids.shape[1]], x.new_empty(0), offsets, self.layer)
        answers = torch.empty_like(rows).index_copy(0, order, rows).view(*topk_ids.shape, -1).float()
        return torch.where((topk_ids >= 0)[..., None], answers * topk_weights[..., None], 0).sum(dim=1)

    def combine(self, ticket: Tensor, base: Tensor, overlapped: Sequence[Tensor] = ()) -> Tensor:
        return (base.float() + ticket).to(base.dtype)
