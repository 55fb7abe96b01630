"""A byte-level language model in the shape of DeepSeek-V4, small enough for a laptop, in plain torch.

It reads a whole prompt at once (no KV cache). Every layer is RMSNorm, sliding-window attention with one
shared key/value head, RMSNorm and a mixture of experts; the first layer picks experts by token id, the others
by a learned gate. The routed experts are the one replaceable part of a layer: any module with two methods,

    ticket = experts.dispatch(x [T, D], topk_ids [T, k], topk_weights [T, k])
    out    = experts.combine(ticket, base [T, D])           # base + sum over k of weight * expert(x)

as `afd_ops.RemoteExperts` has them; `LocalExperts` below holds all experts in this process. What runs between
the two calls (here the shared expert) overlaps with the experts' work.

Weights are random but seeded by the name of each tensor: a rank builds its own share of the model and nothing
else, and a whole model built elsewhere has exactly the same weights.

Shapes: T tokens of one prompt, D hidden, E experts, k of them per token, I their inner width, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes of the model; the names follow DeepSeek-V4 where it has one."""

    vocab: int = 256
    hidden: int = 128
    layers: int = 4
    hash_layers: int = 1  # the first layers route by token id
    heads: int = 4
    head_dim: int = 32
    rope_dim: int = 16  # the last channels of a head
    rope_theta: float = 10000.0
    q_rank: int = 64
    out_groups: int = 2
    out_rank: int = 32
    window: int = 64  # a token sees itself and the window - 1 tokens before it
    experts: int = 8
    topk: int = 2
    intermediate: int = 256
    routed_scale: float = 1.5
    swiglu_limit: float = 10.0
    eps: float = 1e-6
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rope_dim % 2 or self.rope_dim > self.head_dim:
            raise ValueError(f"rope_dim={self.rope_dim} must be even and at most head_dim={self.head_dim}")
        if self.heads % self.out_groups:
            raise ValueError(f"heads={self.heads} must be a multiple of out_groups={self.out_groups}")
        if not 1 <= self.topk <= self.experts:
            raise ValueError(f"topk={self.topk} must lie between 1 and experts={self.experts}")


# --- weights --------------------------------------------------------------------------------------


def _generator(config: Config, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _weight(config: Config, name: str, shape: Sequence[int]) -> Tensor:
    """The weight of that name: norms near 1, other vectors near 0, matrices that keep a vector's size."""
    noise = torch.randn(*shape, generator=_generator(config, name))
    if "norm" in name:
        return 1 + 0.1 * noise
    if name == "embed.weight":
        return noise
    return noise * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)


def expert_weights(config: Config, layer: int, experts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Some experts of a layer, in the order asked: gate_up [n, 2I, D] (gate rows first), down [n, D, I]."""
    gate_up = torch.empty(len(experts), 2 * config.intermediate, config.hidden)
    down = torch.empty(len(experts), config.hidden, config.intermediate)
    for row, expert in enumerate(experts):
        name = f"layers.{layer}.moe.experts.{expert}"
        gate_up[row] = _weight(config, f"{name}.gate_up", gate_up.shape[1:])
        down[row] = _weight(config, f"{name}.down", down.shape[1:])
    return gate_up, down


# --- one layer ------------------------------------------------------------------------------------


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU: [..., 2I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turns the last channels of x [T, heads, d], as adjacent pairs, by angle [T, rope_dim / 2]."""
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    plain, turned = x.split([x.shape[-1] - 2 * angle.shape[-1], 2 * angle.shape[-1]], dim=-1)
    even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned), dim=-1)


class Attention(nn.Module):
    """Sliding-window attention: one vector per token is key and value of all heads; a learned sink each."""

    frequency: Tensor  # [rope_dim / 2]

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.heads * config.head_dim // config.out_groups
        self.heads, self.head_dim, self.groups = config.heads, config.head_dim, config.out_groups
        self.window, self.eps = config.window, config.eps
        self.q_a = nn.Linear(config.hidden, config.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(config.q_rank, config.eps)
        self.q_b = nn.Linear(config.q_rank, config.heads * config.head_dim, bias=False)
        self.kv = nn.Linear(config.hidden, config.head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.head_dim, config.eps)
        self.sink = nn.Parameter(torch.zeros(config.heads))
        self.out_a = nn.Parameter(torch.zeros(config.out_groups, config.out_rank, width))
        self.out_b = nn.Linear(config.out_groups * config.out_rank, config.hidden, bias=False)
        pair = torch.arange(0, config.rope_dim, 2, dtype=torch.float32)
        self.register_buffer("frequency", config.rope_theta ** (-pair / config.rope_dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        position = torch.arange(x.shape[0], device=x.device)
        angle = position[:, None] * self.frequency
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (self.heads, self.head_dim))
        q = rotate(F.rms_norm(q, (self.head_dim,), eps=self.eps), angle)
        kv = rotate(self.kv_norm(self.kv(x))[:, None], angle)[:, 0]

        distance = position[:, None] - position
        visible = (distance >= 0) & (distance < self.window)
        logits = torch.matmul(q.transpose(0, 1), kv.mT) * self.head_dim**-0.5
        logits = logits.masked_fill(~visible, float("-inf"))
        sink = self.sink[:, None, None].expand(-1, x.shape[0], 1)
        share = torch.cat((logits, sink), dim=-1).softmax(dim=-1)[..., :-1]

        out = rotate(torch.matmul(share, kv).transpose(0, 1), -angle)
        out = out.reshape(x.shape[0], self.groups, -1).transpose(0, 1)
        return self.out_b(torch.matmul(out, self.out_a.mT).transpose(0, 1).flatten(1))


class Gate(nn.Module):
    """Chooses and weighs each token's experts: from a table by token id, or by score plus a learned bias."""

    table: Tensor  # [V, k], where the choice is by token id

    def __init__(self, config: Config, by_token: bool) -> None:
        super().__init__()
        self.topk, self.scale, self.by_token = config.topk, config.routed_scale, by_token
        self.weight = nn.Parameter(torch.zeros(config.experts, config.hidden))
        if by_token:
            self.register_buffer("table", torch.zeros(config.vocab, config.topk, dtype=torch.int64))
        else:
            self.bias = nn.Parameter(torch.zeros(config.experts))

    def scores(self, x: Tensor) -> Tensor:
        """Every expert's score: x [T, D] -> float32 [T, E]."""
        return F.softplus(F.linear(x.float(), self.weight.float())).sqrt()

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D], tokens [T] -> topk_ids int64 [T, k], topk_weights float32 [T, k]."""
        scores = self.scores(x)
        # The bias steers the choice only: weights come from the scores alone.
        ids = self.table[tokens] if self.by_token else (scores + self.bias).topk(self.topk, dim=-1).indices
        chosen = scores.gather(-1, ids)
        return ids, chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * self.scale


class SharedExpert(nn.Module):
    """The expert every token visits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_up = nn.Linear(config.hidden, 2 * config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [T, D] -> [T, D]."""
        return self.down(swiglu(self.gate_up(x), self.limit))


class LocalExperts(nn.Module):
    """All routed experts of a layer in this process, one after the other. Not meant for torch.compile."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        gate_up, down = expert_weights(config, layer, range(config.experts))
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)  # [E, 2I, D]
        self.down = nn.Parameter(down, requires_grad=False)  # [E, D, I]

    def dispatch(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """x [T, D], topk_ids [T, k], topk_weights [T, k] -> the weighted sum of the answers [T, D]."""
        out = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert in range(self.gate_up.shape[0]):
            token, choice = (topk_ids == expert).nonzero(as_tuple=True)
            inner = swiglu(F.linear(x[token], self.gate_up[expert]), self.limit)
            answer = F.linear(inner, self.down[expert]).to(out.dtype)
            out.index_add_(0, token, topk_weights[token, choice, None] * answer)
        return out

    def combine(self, ticket: Tensor, base: Tensor) -> Tensor:
        """ticket from dispatch, base [T, D] -> base + the routed sum [T, D]."""
        return (base + ticket).to(base.dtype)


class MoE(nn.Module):
    """Gate and shared expert here; the routed experts wherever `experts` has them."""

    def __init__(self, config: Config, by_token: bool, experts: nn.Module) -> None:
        super().__init__()
        self.gate = Gate(config, by_token)
        self.shared = SharedExpert(config)
        self.experts: Any = experts  # a module with dispatch and combine

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x [T, D], tokens [T] -> [T, D]."""
        ids, weights = self.gate(x, tokens)
        ticket = self.experts.dispatch(x, ids, weights)
        base = self.shared(x)
        return self.experts.combine(ticket, base)


class DecoderLayer(nn.Module):
    """Only weights tell one layer from the next, so all layers with the same kind of gate share one graph."""

    def __init__(self, config: Config, by_token: bool, experts: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, config.eps)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden, config.eps)
        self.moe = MoE(config, by_token, experts)

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """hidden [T, D], tokens [T] -> hidden [T, D]."""
        hidden = hidden + self.attention(self.attention_norm(hidden))
        return hidden + self.moe(self.moe_norm(hidden), tokens)


# --- the model ------------------------------------------------------------------------------------


class ByteMoE(nn.Module):
    """The model; `make_experts(layer)` supplies its routed experts, see the top of this file."""

    def __init__(self, config: Config, make_experts: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            self.layers.append(DecoderLayer(config, layer < config.hash_layers, make_experts(layer)))
        self.norm = nn.RMSNorm(config.hidden, config.eps)
        self.head = nn.Linear(config.hidden, config.vocab, bias=False)
        self._fill()

    @torch.no_grad()
    def _fill(self) -> None:
        for name, parameter in self.named_parameters():
            if ".moe.experts." not in name:
                parameter.copy_(_weight(self.config, name, parameter.shape))
        for name, buffer in self.named_buffers():
            if name.endswith("gate.table"):  # k different experts for every byte
                shape = (self.config.vocab, self.config.experts)
                order = torch.rand(shape, generator=_generator(self.config, name)).argsort(dim=-1)
                buffer.copy_(order[:, : self.config.topk])
        self.requires_grad_(False).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens int64 [T], one prompt -> logits [T, V]."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden, tokens)
        return self.head(self.norm(hidden))


def unsplit(config: Config) -> ByteMoE:
    """The whole model in this process."""
    return ByteMoE(config, lambda layer: LocalExperts(config, layer))
