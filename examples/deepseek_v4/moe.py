"""What of a mixture-of-experts layer stays on the attention ranks: the gate and the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import linear
from .config import HASH, Config


class Gate(nn.Module):
    """Chooses and weighs each token's experts: from a table by token id, or by score plus a learned bias."""

    def __init__(self, config: Config, kind: str) -> None:
        super().__init__()
        self.topk, self.scale = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.tid2eid = self.bias = None
        if kind == HASH:
            table = torch.zeros(config.vocab_size, self.topk, dtype=torch.int64)
            self.tid2eid = nn.Parameter(table, requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.zeros(config.n_routed_experts))

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D], tokens [T] -> topk_ids int64 [T, k], topk_weights float32 [T, k]; token -1: ids -1."""
        scores = nn.functional.softplus(nn.functional.linear(x.float(), self.weight)).sqrt()
        # The bias steers the choice only: weights come from the scores alone.
        ids = (scores + self.bias).topk(self.topk, dim=-1).indices if self.tid2eid is None else self.tid2eid[tokens]
        chosen = scores.gather(-1, ids)
        return ids.where(tokens[:, None] >= 0, -1), chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * self.scale


class SharedExpert(nn.Module):
    """The expert every token visits: the same clamped SwiGLU, neither gated nor scaled."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = linear(config.hidden_size, config.moe_intermediate_size, dtype)
        self.w3 = linear(config.hidden_size, config.moe_intermediate_size, dtype)
        self.w2 = linear(config.moe_intermediate_size, config.hidden_size, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, D]."""
        gate, up = self.w1(x).clamp(max=self.limit), self.w3(x).clamp(-self.limit, self.limit)
        return self.w2(nn.functional.silu(gate) * up)
