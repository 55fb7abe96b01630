"""DeepSeek-V4's attention: one 512-wide vector per position is key and value of all heads.

Every layer sees the last `sliding_window` positions. Two kinds of layers see, besides, the past compressed: HCA pools
every `ratio` positions into one entry and attends to all entries; CSA pools overlapping pairs of short windows and an
indexer chooses which entries a token attends to.

State is static: rings and entries are buffers [rows, ...], one row per request. A call brings S new tokens to each of
B consecutive rows, which may stand at different positions: S = 1 is a decode step, S > 1 a prompt or a part of one.
What is visible follows from positions alone, so a row that starts again at position 0 needs no clearing.

Shapes: B rows, S new tokens of each, D hidden, H heads, d head_dim. `start` [B] = position of a row's first new token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .config import CSA, SLIDING, Config

FAR = -1e30  # a gate that loses against any other, yet whose softmax is no NaN where all are such


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (rms(x, self.eps) * self.weight).to(x.dtype)


def rms(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def linear(inner: int, outer: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(inner, outer, bias=False, dtype=dtype)


def frequencies(config: Config, compressed: bool) -> Tensor:
    """Rotary frequencies, float32 [rope_dim / 2]: plain, or with YaRN where the layer compresses."""
    theta = config.compress_rope_theta if compressed else config.rope_theta
    dim, yarn = config.qk_rope_head_dim, config.yarn
    pair = torch.arange(0, dim, 2, dtype=torch.float32)
    frequency = 1.0 / theta ** (pair / dim)
    if not compressed:
        return frequency

    def pair_that_turns(times: float) -> float:
        """The pair that turns so many times within the original positions."""
        return dim * math.log(yarn.original_positions / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(yarn.beta_slow)), dim - 1)
    ramp = ((pair / 2 - low) / max(high - low, 1e-3)).clamp(0, 1)
    return frequency / yarn.factor * ramp + frequency * (1 - ramp)


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Turns the last channels of x [..., d], as adjacent pairs, by angle [..., rope_dim / 2]."""
    cos, sin = angle.cos(), angle.sin()
    plain, turned = x.split([x.shape[-1] - 2 * angle.shape[-1], 2 * angle.shape[-1]], dim=-1)
    even, odd = turned.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x.dtype)), dim=-1)


def row_index(row: int, count: int, device: torch.device) -> Tensor:
    """[count, 1]: the rows a call writes to."""
    return torch.arange(row, row + count, device=device)[:, None]


class Ring(nn.Module):
    """The last `size` vectors of every row; position p lies in slot p % size."""

    slots: Tensor  # [rows, size, width]

    def __init__(self, rows: int, size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("slots", torch.zeros(rows, size, width, dtype=dtype), persistent=False)

    def extend(self, new: Tensor, start: Tensor, row: int) -> Tensor:
        """Stores new [B, S, width]; returns it with what was there: [B, size, width] if S = 1, else with new appended.
        `positions` and `places` say what is where."""
        count, steps = new.shape[:2]
        old = self.slots[row : row + count]
        items = old if steps == 1 else torch.cat((old, new), dim=1)
        kept = min(steps, self.size)
        slot = (start[:, None] + torch.arange(steps - kept, steps, device=new.device)) % self.size
        self.slots.index_put_((row_index(row, count, new.device), slot), new[:, steps - kept :])
        return self.slots[row : row + count] if steps == 1 else items

    def positions(self, start: Tensor, steps: int) -> Tensor:
        """The position of every item [B, items]; negative: none."""
        last = (start if steps == 1 else start - 1)[:, None]
        slot = torch.arange(self.size, device=start.device)
        held = last - (last - slot) % self.size
        if steps == 1:
            return held
        return torch.cat((held, start[:, None] + torch.arange(steps, device=start.device)), dim=1)

    def places(self, position: Tensor, start: Tensor, steps: int) -> Tensor:
        """The item that holds a position; position [B, P], of the last `size` before the new ones or of these."""
        if steps == 1:
            return position % self.size
        begin = start[:, None]
        fresh = (self.size + position - begin).clamp(max=self.size + steps - 1)
        return torch.where(position < begin, position % self.size, fresh)


class Compressor(nn.Module):
    """Pools every window of `ratio` positions into one entry, by a softmax per channel.

    With `overlap`, an entry pools the window before it too: half of the channels serve the entry of their own window,
    the other half that of the next one.
    """

    entries: Tensor  # [rows, N, width]; entry w covers positions w * ratio ...

    def __init__(
        self, config: Config, width: int, ratio: int, overlap: bool, rows: int, positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ratio, self.halves, self.width = ratio, 2 if overlap else 1, width
        pooled = self.halves * width
        self.wkv = linear(config.hidden_size, pooled, dtype)
        self.wgate = linear(config.hidden_size, pooled, dtype)
        self.ape = nn.Parameter(torch.zeros(ratio, pooled))
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.recent = Ring(rows, self.halves * ratio, 2 * pooled, dtype)
        count = (positions - 1) // ratio + 2  # a call may write one entry ahead of its last position
        self.register_buffer("entries", torch.zeros(rows, -(-count // 8) * 8, width, dtype=dtype), persistent=False)

    def forward(self, x: Tensor, start: Tensor, row: int, frequency: Tensor) -> Tensor:
        """x [B, S, D] -> all entries of these rows [B, N, width], those of the windows that x touches made anew.

        Entry w is complete, and so visible to position p, if w < (p + 1) // ratio.
        """
        count, steps = x.shape[:2]
        ratio, halves = self.ratio, self.halves
        items = self.recent.extend(torch.cat((self.wkv(x), self.wgate(x)), dim=-1), start, row)
        window = start[:, None] // ratio + torch.arange((steps + ratio - 2) // ratio + 1, device=x.device)
        # The positions of these windows and, with overlap, of the one before.
        begin = (window[:, :1] - (halves - 1)) * ratio
        position = begin + torch.arange((window.shape[1] + halves - 1) * ratio, device=x.device)
        place = self.recent.places(position, start, steps)
        known = (position >= 0) & (position < start[:, None] + steps)
        items = items[torch.arange(count, device=x.device)[:, None], place].unflatten(1, (-1, ratio))
        value, gate = items.chunk(2, dim=-1)  # [B, windows, ratio, halves * width]
        known = known.unflatten(1, (-1, ratio))[..., None]
        gate = torch.where(known, gate.float() + self.ape, FAR)
        value = torch.where(known, value, 0)
        if halves == 2:
            gate, value = (
                torch.cat((t[:, :-1, :, : self.width], t[:, 1:, :, self.width :]), dim=2) for t in (gate, value)
            )
        pooled = self.norm((gate.softmax(dim=2) * value).sum(dim=2))
        entry = rotate(pooled, (window * ratio)[..., None] * frequency).to(x.dtype)
        self.entries.index_put_((row_index(row, count, x.device), window), entry)
        return self.entries[row : row + count]


class Indexer(nn.Module):
    """Chooses the compressed entries that a token attends to."""

    def __init__(self, config: Config, ratio: int, rows: int, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.width, self.topk = config.index_n_heads, config.index_head_dim, config.index_topk
        self.wq_b = linear(config.q_lora_rank, self.heads * self.width, dtype)
        self.weights_proj = linear(config.hidden_size, self.heads, dtype)
        self.compressor = Compressor(config, self.width, ratio, True, rows, positions, dtype)

    def forward(
        self, x: Tensor, q_latent: Tensor, angle: Tensor, visible: Tensor, start: Tensor, row: int, frequency: Tensor
    ) -> Tensor:
        """visible [B, S, N] -> the chosen ones among them [B, S, N]."""
        keys = self.compressor(x, start, row, frequency)
        q = rotate(self.wq_b(q_latent).unflatten(-1, (self.heads, self.width)), angle[:, :, None])
        match = torch.matmul(q.flatten(1, 2), keys.mT).unflatten(1, (-1, self.heads)).float().relu()
        weight = self.weights_proj(x).float() * (self.heads * self.width) ** -0.5
        score = (match * weight[..., None]).sum(dim=2).masked_fill(~visible, -math.inf)
        best = score.topk(min(self.topk, score.shape[-1]), dim=-1, sorted=False).indices
        return torch.zeros_like(visible).scatter(-1, best, True) & visible


class Attention(nn.Module):
    """One layer's attention and its state."""

    frequency: Tensor  # [rope_dim / 2]

    def __init__(self, config: Config, kind: str, rows: int, positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        self.heads, self.width, self.groups = heads, width, config.o_groups
        self.window, self.eps = config.sliding_window, config.rms_norm_eps
        self.wq_a = linear(hidden, config.q_lora_rank, dtype)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = linear(config.q_lora_rank, heads * width, dtype)
        self.wkv = linear(hidden, width, dtype)
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.wo_a = linear(heads * width // config.o_groups, config.o_groups * config.o_lora_rank, dtype)
        self.wo_b = linear(config.o_groups * config.o_lora_rank, hidden, dtype)
        self.recent = Ring(rows, self.window, width, dtype)
        self.compressor = self.indexer = None
        if kind != SLIDING:
            self.ratio = config.compress_rates[kind]
            self.compressor = Compressor(config, width, self.ratio, kind == CSA, rows, positions, dtype)
        if kind == CSA:
            self.indexer = Indexer(config, self.ratio, rows, positions, dtype)
        self.register_buffer("frequency", frequencies(config, kind != SLIDING), persistent=False)

    def forward(self, x: Tensor, start: Tensor, row: int) -> Tensor:
        """x [B, S, D] of rows row ... row + B - 1 -> [B, S, D]."""
        steps = x.shape[1]
        position = start[:, None] + torch.arange(steps, device=x.device)
        angle = position[..., None] * self.frequency
        q_latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(q_latent).unflatten(-1, (self.heads, self.width))
        q = rotate(rms(q, self.eps).to(x.dtype), angle[:, :, None])
        keys = [self.recent.extend(rotate(self.norm(self.wkv(x)), angle), start, row)]
        held, asks = self.recent.positions(start, steps)[:, None], position[..., None]
        visible = [(held >= 0) & (held <= asks) & (held > asks - self.window)]
        if self.compressor is not None:
            keys.append(self.compressor(x, start, row, self.frequency))
            complete = torch.arange(keys[1].shape[1], device=x.device) < (asks + 1) // self.ratio
            if self.indexer is not None:
                complete = self.indexer(x, q_latent, angle, complete, start, row, self.frequency)
            visible.append(complete)
        out = rotate(self.attend(q, keys, visible), -angle[:, :, None])
        out = out.flatten(0, 1).unflatten(1, (self.groups, -1)).transpose(0, 1).flatten(2)
        low = torch.matmul(out, self.wo_a.weight.unflatten(0, (self.groups, -1)).mT)
        return self.wo_b(low.transpose(0, 1).flatten(1)).unflatten(0, (-1, steps))

    def attend(self, q: Tensor, keys: list[Tensor], visible: list[Tensor]) -> Tensor:
        """q [B, S, H, d], each of keys [B, K, d] with its mask [B, S, K] -> [B, S, H, d].

        A learned logit per head takes part in the softmax and then no value.
        """
        flat = q.flatten(1, 2)
        logits = [
            (torch.matmul(flat, k.mT).unflatten(1, (-1, self.heads)).float() * self.width**-0.5).masked_fill(
                ~v[:, :, None], -math.inf
            )
            for k, v in zip(keys, visible, strict=True)
        ]
        sink = self.attn_sink[:, None].expand(*q.shape[:3], 1)
        share = torch.cat((*logits, sink), dim=-1).softmax(dim=-1)[..., :-1].to(q.dtype)
        shares = share.flatten(1, 2).split([k.shape[1] for k in keys], dim=-1)
        out = sum(torch.matmul(s, k) for s, k in zip(shares, keys, strict=True))
        return out.unflatten(1, (-1, self.heads))
