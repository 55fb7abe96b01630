"""The model, whole: what an attention rank runs, with the routed experts wherever they are.

A decoder layer is two pieces, so that a caller can put another ubatch's work between them:

    pending = layer.before(streams, tokens, start)   attention, gate, dispatch
    streams = layer.after(pending)                   shared expert and residual mixing while the experts work; combine

One ubatch is one stage of the window and its own rows of the state; ubatches.py has the order of the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .attention import Attention, Compressor, Ring, RMSNorm, linear
from .config import Config
from .hyper_connections import HyperConnection, HyperHead, leave
from .moe import Gate, SharedExpert
from .ubatches import Ubatch, interleave

MakeExperts = Callable[[int, int], nn.Module]
"""(layer, stage) -> a module with dispatch and combine; see experts.py."""


class Pending(NamedTuple):
    """A layer between its two pieces."""

    ticket: Tensor
    streams: Tensor  # [B, S, n, D]
    x: Tensor  # the experts' input [T, D]
    m: Tensor  # the residual's coefficients [T, (2 + n) n]


class MoE(nn.Module):
    def __init__(self, config: Config, kind: str, experts: list[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Gate(config, kind)
        self.shared_experts = SharedExpert(config, dtype)
        self.experts = nn.ModuleList(experts)  # one per stage


class DecoderLayer(nn.Module):
    """Only weights tell one layer from the next of its kinds (attention, gate), so these share one compiled graph."""

    def __init__(
        self, config: Config, layer: int, experts: list[nn.Module], rows: int, positions: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        hyper = (config.hidden_size, config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps, config.rms_norm_eps)
        self.hc_attn = HyperConnection(*hyper)
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, config.layer_types[layer], rows, positions, dtype)
        self.hc_ffn = HyperConnection(*hyper)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, config.mlp_layer_types[layer], experts, dtype)

    def before(self, streams: Tensor, tokens: Tensor, start: Tensor, row: int = 0, stage: int = 0) -> Pending:
        """streams [B, S, n, D], tokens [B, S], start [B]: rows row ... row + B - 1, S new tokens each from `start`."""
        h, m = self.hc_attn.enter(streams)
        post, rest = self.hc_attn.mixed(streams, m)
        streams = leave(post, self.attn(self.attn_norm(h), start, row), rest)
        h, m = self.hc_ffn.enter(streams)
        x = self.ffn_norm(h).flatten(0, 1)
        ids, weights = self.ffn.gate(x, tokens.flatten())
        experts: Any = self.ffn.experts[stage]
        return Pending(experts.dispatch(x, ids, weights), streams, x, m)

    def after(self, pending: Pending, stage: int = 0) -> Tensor:
        """-> streams [B, S, n, D]."""
        ticket, streams, x, m = pending
        base = self.ffn.shared_experts(x)
        post, rest = self.hc_ffn.mixed(streams, m)
        experts: Any = self.ffn.experts[stage]
        y = experts.combine(ticket, base, (rest,))
        return leave(post, y.unflatten(0, streams.shape[:2]), rest)

    def forward(self, streams: Tensor, tokens: Tensor, start: Tensor, row: int = 0, stage: int = 0) -> Tensor:
        return self.after(self.before(streams, tokens, start, row, stage), stage)


class DeepseekV4(nn.Module):
    """Built on torch's default device; `weights.load` fills it.

    Args:
        make_experts: the routed experts of a (layer, stage).
        rows: requests that are decoded together.
        positions: longest request, prompt and answer; a position past it is an error, on a GPU an assert there.
        stages: most ubatches of a step; of a window at most geometry.stages, else it refuses to be attached.
        dtype: of matrices and state; norms, gates, hyper-connections and sinks are float32.
    """

    def __init__(
        self,
        config: Config,
        make_experts: MakeExperts,
        *,
        rows: int,
        positions: int,
        stages: int = 1,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.positions = config, positions
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList()
        for layer in range(config.layers):
            experts = [make_experts(layer, stage) for stage in range(stages)]
            self.layers.append(DecoderLayer(config, layer, experts, rows, positions, dtype))
        self.hc_head = HyperHead(config.hidden_size, config.hc_mult, config.hc_eps, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = linear(config.hidden_size, config.vocab_size, dtype)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def clear(self) -> None:
        """Zeroes the state of all rows, in place: after a failed step, whose NaN would show through any mask."""
        for module in self.modules():
            if isinstance(module, (Ring, Compressor)):
                for state in module.buffers(recurse=False):
                    state.zero_()

    def streams(self, tokens: Tensor) -> Tensor:
        """tokens [B, S] -> the residual streams, all equal at first [B, S, n, D]."""
        return self.embed_tokens(tokens.clamp(min=0))[:, :, None].expand(-1, -1, self.config.hc_mult, -1)

    def logits(self, streams: Tensor) -> Tensor:
        """[B, S, n, D] -> [B, S, V]."""
        return self.head(self.norm(self.hc_head(streams)))

    def forward(self, tokens: Tensor, start: Tensor, row: int = 0) -> Tensor:
        """S new tokens for each of the rows row ... row + B - 1: one each to decode, more for (a part of) a prompt.

        Args:
            tokens: int64 [B, S]; a row of -1 is padding: it visits no routed expert, its logits mean nothing, and what
                the row's state held at these positions is lost.
            start: int64 [B], the position of each row's first new token; 0 starts a new request.

        Returns:
            logits [B, S, V].
        """
        streams = self.streams(tokens)
        for layer in self.layers:
            streams = layer(streams, tokens, start, row)
        return self.logits(streams)

    def interleaved(self, ubatches: Sequence[Ubatch]) -> list[Tensor]:
        """`forward` for each of the ubatches, one's attention while another's tokens are at the FFN ranks.

        Returns:
            logits [B, S, V] of each.

        Raises:
            ValueError: more ubatches than stages.
        """
        stages = len(self.layers[0].ffn.experts)
        if len(ubatches) > stages:
            raise ValueError(f"{len(ubatches)} ubatches, but the model has {stages} stages: one is needed for each")
        streams = interleave(self.layers, ubatches, [self.streams(ubatch.tokens) for ubatch in ubatches])
        return [self.logits(s) for s in streams]
