"""`sinkhorn` on a GPU: one launch, a matrix never leaves the registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 16  # matrices of a program


@triton.jit
def _sinkhorn(logits, mix, count, eps, iterations: tl.constexpr, n: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    matrix = tl.program_id(0) * block + tl.arange(0, block)[:, None, None]
    at = matrix * n * n + tl.arange(0, n)[None, :, None] * n + tl.arange(0, n)[None, None, :]
    x = tl.load(logits + at, mask=matrix < count, other=0.0)
    x = tl.exp(x - tl.max(x, axis=2, keep_dims=True))
    x = x / tl.sum(x, axis=2, keep_dims=True) + eps
    x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
    for _ in range(iterations - 1):
        x = x / (tl.sum(x, axis=2, keep_dims=True) + eps)
        x = x / (tl.sum(x, axis=1, keep_dims=True) + eps)
    tl.store(mix + at, x, mask=matrix < count)


def launch(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """logits float32 [..., n, n], n a power of two."""
    logits = logits.contiguous()
    mix, n = torch.empty_like(logits), logits.shape[-1]
    if count := logits.numel() // (n * n):
        _sinkhorn[(triton.cdiv(count, BLOCK),)](logits, mix, count, eps, iterations, n, BLOCK, num_warps=1)
    return mix
