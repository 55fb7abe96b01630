"""Several ubatches in one graph, on one stream: while the tokens of one are at the FFN ranks, the others compute.

    layer 0   attention, dispatch of u0 | attention, dispatch of u1
    layer 1   combine u0, attention, dispatch of u0 | combine u1, attention, dispatch of u1
    ...
    at last   combine u0 | combine u1

Nothing but the order of the program makes the overlap: no threads, no second stream. Compilers keep the order of
dispatch and combine, and what a dispatch sends is computed before it, so the attention of u1 stays in front of u0's
combine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from .model import DecoderLayer, Pending


class Ubatch(NamedTuple):
    """Requests that step together: rows row ... row + B - 1 of the state, S new tokens each. See DeepseekV4.forward."""

    tokens: Tensor  # int64 [B, S]
    start: Tensor  # int64 [B]
    row: int = 0


def interleave(layers: Sequence[DecoderLayer], ubatches: Sequence[Ubatch], streams: Sequence[Tensor]) -> list[Tensor]:
    """Through all layers, ubatch i on stage i.

    Args:
        ubatches: of any shapes, each with rows of its own.
        streams: of each ubatch, [B, S, n, D]; and so is the result.
    """
    streams = list(streams)
    pending: list[Pending] = []
    for depth, layer in enumerate(layers):
        for stage, ubatch in enumerate(ubatches):
            if depth:
                streams[stage] = layers[depth - 1].after(pending.pop(0), stage)
            pending.append(layer.before(streams[stage], *ubatch, stage))
    return [layers[-1].after(piece, stage) for stage, piece in enumerate(pending)]
