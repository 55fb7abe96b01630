"""Geometry of a window: the sizes all ranks agree on. The offsets that follow from them are computed by csrc/wire.h."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch

from afd_ops import _C
from afd_ops.topology import Topology

PAYLOAD_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _C.DTYPES)
WIDE_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _C.WIDE_DTYPES)
"""Per payload dtype, that of x given to dispatch, of expert_out and of replies."""

ANY_LAYERS = 2**31  # more than a header can name


@dataclass(frozen=True)
class Geometry:
    """What every rank must be started with alike. `create` fills and validates it.

    Attributes:
        attention_size, ffn_size, num_experts: from the topology.
        local_experts: the most experts an FFN rank owns.
        stages: independent lanes per attention rank (one per ubatch).
        depth: dispatches in flight per lane.
        tokens: capacity of one dispatch, in tokens.
        topk: choices per token.
        hidden: elements of a row.
        dtype: of the payload on its way to the FFN ranks, an index into `PAYLOAD_DTYPES` and `WIDE_DTYPES`.
        layers: MoE layers, by their number; a dispatch of another one is a protocol error.
    """

    attention_size: int
    ffn_size: int
    num_experts: int
    local_experts: int
    stages: int
    depth: int
    tokens: int
    topk: int
    hidden: int
    dtype: int
    layers: int

    @staticmethod
    def create(
        topology: Topology,
        *,
        hidden: int,
        topk: int,
        tokens: int,
        dtype: torch.dtype,
        stages: int,
        depth: int,
        layers: int | None = None,
    ) -> Geometry:
        """layers None: any number of them. Raises ValueError naming the first bad field and its value."""
        for name, value, most in (
            ("attention_size", topology.attention_size, _C.MAX_RANKS),
            ("ffn_size", topology.ffn_size, _C.MAX_RANKS),
            ("hidden", hidden, None),
            ("topk", topk, None),
            ("tokens", tokens, None),
            ("stages", stages, None),
            ("depth", depth, _C.MAX_DEPTH),
            ("layers", ANY_LAYERS if layers is None else layers, ANY_LAYERS),
        ):
            if not isinstance(value, int):
                raise ValueError(f"{name} is {value!r}, expected an int")
            if value < 1 or (most is not None and value > most):
                raise ValueError(f"{name} is {value}, expected 1 {'or more' if most is None else f'to {most}'}")
        if dtype not in PAYLOAD_DTYPES:
            raise ValueError(f"dtype is {dtype}, expected one of {', '.join(map(str, PAYLOAD_DTYPES))}")
        if hidden * dtype.itemsize % 16:
            raise ValueError(f"hidden is {hidden}: a row of {hidden * dtype.itemsize} bytes, expected a multiple of 16")
        if WIDE_DTYPES[PAYLOAD_DTYPES.index(dtype)] != dtype and hidden % _C.SCALE_BLOCK:
            raise ValueError(f"hidden is {hidden}, expected a multiple of {_C.SCALE_BLOCK} with dtype {dtype}")
        if tokens * topk >= 2**31:
            raise ValueError(f"tokens x topk is {tokens * topk}, expected less than 2**31")
        return Geometry(
            attention_size=topology.attention_size,
            ffn_size=topology.ffn_size,
            num_experts=topology.num_experts,
            local_experts=topology.local_experts,
            stages=stages,
            depth=depth,
            tokens=tokens,
            topk=topk,
            hidden=hidden,
            dtype=PAYLOAD_DTYPES.index(dtype),
            layers=ANY_LAYERS if layers is None else layers,
        )

    @property
    def words(self) -> tuple[int, ...]:
        """The fields in the order of csrc/wire.h."""
        fields = asdict(self)
        return tuple(fields[name] for name in _C.GEOMETRY)

    @property
    def layout(self) -> dict[str, int]:
        """Byte offsets by the names of csrc/wire.h."""
        return _C.layout(self.words)

    def window_bytes(self, regions: int | None = None) -> int:
        """Bytes of a window that receives from `regions` peers; by default of a symmetric one, max(A, F) regions."""
        return _C.window_bytes(self.words, max(self.attention_size, self.ffn_size) if regions is None else regions)
