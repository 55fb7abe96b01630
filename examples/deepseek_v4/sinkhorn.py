"""Sinkhorn normalisation of many small matrices, as one op.

Traced, its loop would be a hundred tiny kernels on a GPU and most of a layer's compile time.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op(
    "deepseek_v4::sinkhorn", mutates_args=(), schema="(Tensor logits, int iterations, float eps) -> Tensor"
)
def sinkhorn(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Rows through a softmax, + eps; then columns divided by their sum + eps, and in turn rows and columns.

    Args:
        logits: float32 [..., n, n].
        iterations: of the columns; the rows take one less.
    """
    mix = logits.softmax(-1) + eps
    mix /= mix.sum(-2, keepdim=True) + eps
    for _ in range(iterations - 1):
        mix /= mix.sum(-1, keepdim=True) + eps
        mix /= mix.sum(-2, keepdim=True) + eps
    return mix.contiguous()


@sinkhorn.register_fake
def _(logits: Tensor, iterations: int, eps: float) -> Tensor:
    return logits.new_empty(logits.shape)


@sinkhorn.register_kernel("cuda")
def _(logits: Tensor, iterations: int, eps: float) -> Tensor:
    from .sinkhorn_cuda import launch

    return launch(logits, iterations, eps)
