"""Manifold-constrained hyper-connections (mHC): n residual streams, mixed around every sub-layer.

    z = rms(flatten(X))                     over n x D, no weight        m = fn . z
    pre_j  = sigmoid(m[j] s0 + b[j]) + eps
    post_j = 2 sigmoid(m[n + j] s1 + b[n + j])
    C      = softmax of the rows of (m[2n:] s2 + b[2n:]), + eps; columns normalised, then rows and columns in turn
    h      = sum_j pre_j X_j                the sub-layer's input
    X'_k   = post_k y + sum_j C[j, k] X_j   y = the sub-layer's output

Only pre is needed before the sub-layer: post, C and the mixing of the streams can wait. All in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .sinkhorn import sinkhorn


def flat_rms(streams: Tensor, fn: Tensor, eps: float) -> Tensor:
    """fn . rms(flatten(X)): streams [..., n, D], fn [out, n D] -> float32 [..., out]."""
    flat = streams.flatten(-2).float()
    return nn.functional.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def collapse(weights: Tensor, streams: Tensor) -> Tensor:
    """sum_j weights_j X_j: [..., n], [..., n, D] -> [..., D]."""
    return (weights[..., None] * streams).sum(-2).to(streams.dtype)


class HyperConnection(nn.Module):
    """The residual of one sub-layer."""

    def __init__(self, hidden: int, mult: int, iterations: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.mult, self.iterations, self.eps, self.norm_eps = mult, iterations, eps, norm_eps
        self.fn = nn.Parameter(torch.zeros((2 + mult) * mult, mult * hidden))
        self.base = nn.Parameter(torch.zeros((2 + mult) * mult))
        self.scale = nn.Parameter(torch.zeros(3))

    def enter(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """streams [..., n, D] -> the sub-layer's input [..., D], and what `mixed` needs."""
        m = flat_rms(streams, self.fn, self.norm_eps)
        pre = torch.sigmoid(m[..., : self.mult] * self.scale[0] + self.base[: self.mult]) + self.eps
        return collapse(pre, streams), m

    def mixed(self, streams: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        """post [..., n], and sum_j C[j, k] X_j [..., n, D]; both float32."""
        n = self.mult
        post = 2 * torch.sigmoid(m[..., n : 2 * n] * self.scale[1] + self.base[n : 2 * n])
        logits = (m[..., 2 * n :] * self.scale[2] + self.base[2 * n :]).unflatten(-1, (n, n))
        mix = sinkhorn(logits, self.iterations, self.eps)
        return post, sum(mix[..., j, :, None] * streams[..., j, None, :] for j in range(n))


def leave(post: Tensor, y: Tensor, rest: Tensor) -> Tensor:
    """post_k y + rest_k: [..., n], [..., D], [..., n, D] -> the next streams [..., n, D] in y's dtype."""
    return (post[..., None] * y[..., None, :] + rest).to(y.dtype)


class HyperHead(nn.Module):
    """The streams' weighted sum at the end."""

    def __init__(self, hidden: int, mult: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.fn = nn.Parameter(torch.zeros(mult, mult * hidden))
        self.base = nn.Parameter(torch.zeros(mult))
        self.scale = nn.Parameter(torch.zeros(1))

    def forward(self, streams: Tensor) -> Tensor:
        """[..., n, D] -> [..., D]."""
        m = flat_rms(streams, self.fn, self.norm_eps)
        return collapse(torch.sigmoid(m * self.scale + self.base) + self.eps, streams)
