"""What the GPU benchmarks send, what their experts do to it, and what must come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import afd_ops
from afd_ops.reference import quantize

EXPERTS = 32
COLUMNS = 64  # of a row that the experts change
HEIGHT = 8  # rows of a program


@dataclass(frozen=True)
class Case:
    """One size of the round trip. `capacity` is the window's tokens."""

    tokens: int
    hidden: int = 7168
    dtype: torch.dtype = torch.bfloat16
    topk: int = 8
    capacity: int = 0

    @property
    def window(self) -> dict[str, Any]:
        """Arguments of `afd_ops.Window`."""
        return {"tokens": self.capacity or self.tokens, "hidden": self.hidden, "dtype": self.dtype, "topk": self.topk}

    @property
    def row(self) -> dict[str, Any]:
        """Columns of the result file."""
        return {**self.window, "tokens": self.tokens, "capacity": self.window["tokens"], "dtype": name(self.dtype)}

    @property
    def quantised(self) -> bool:
        return self.dtype == torch.float8_e4m3fn

    @property
    def wide(self) -> torch.dtype:
        return torch.bfloat16 if self.quantised else self.dtype


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def inputs(case: Case, seed: int = 1234) -> tuple[Tensor, Tensor, Tensor]:
    """x, topk_ids and topk_weights; weights of a token sum to 1. The same on every rank that gives the same seed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(case.tokens, case.hidden, generator=generator).to(case.wide)
    ids = torch.rand(case.tokens, EXPERTS, generator=generator).topk(case.topk).indices.int()
    weights = torch.rand(case.tokens, case.topk, generator=generator)
    return x.cuda(), ids.cuda(), (weights / weights.sum(1, keepdim=True)).cuda()


def factors() -> Tensor:
    """What each expert multiplies the first COLUMNS of its rows by."""
    return torch.linspace(0.5, 1.5, EXPERTS, device="cuda")


def filling(hidden: int, dtype: torch.dtype) -> Tensor:
    """The other columns of `Experts` with a quantised payload: one row, [hidden]."""
    return torch.linspace(-1, 1, hidden, device="cuda").to(dtype)


@triton.jit
def _scale_rows(  # type: ignore[no-untyped-def]
    rows, scales, out, offsets, factors, hidden, blocks, experts: tl.constexpr, columns: tl.constexpr,
    height: tl.constexpr, quantised: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * height + tl.arange(0, height)
    ends = tl.load(offsets + tl.arange(0, experts))
    live = row < tl.max(ends, axis=0)
    expert = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), axis=1)
    factor = tl.load(factors + expert, mask=live)
    at = row[:, None] * hidden + tl.arange(0, columns)[None, :]
    v = tl.load(rows + at, mask=live[:, None]).to(tl.float32)
    if quantised:
        scale = tl.load(scales + row * blocks, mask=live)
        v = (v * scale[:, None]).to(tl.bfloat16).to(tl.float32)
    tl.store(out + at, (v * factor[:, None]).to(out.dtype.element_ty), mask=live[:, None])


def scale_rows(rows: Tensor, scales: Tensor, out: Tensor, offsets: Tensor, factors: Tensor) -> Tensor:
    """The first COLUMNS of row r, dequantised if need be, times the factor of its expert, into out.

    Shows for every row which expert it met, and costs next to nothing beside the transport that is measured.
    """
    quantised = rows.dtype != out.dtype
    blocks = scales.shape[1] if quantised else 0
    _scale_rows[(triton.cdiv(rows.shape[0], HEIGHT),)](
        rows, scales if quantised else factors, out, offsets, factors, rows.shape[1], blocks, EXPERTS, COLUMNS, HEIGHT,
        quantised, num_warps=1,
    )  # fmt: skip
    return out


class Experts:
    """The timed experts: they scale the first COLUMNS of a row.

    In place, or, where the payload is quantised, into rows that are otherwise constant: a grouped GEMM would write its
    bfloat16 output anyway, so turning every element into bfloat16 is none of the transport's cost. `whole` does that
    too, so that all columns can be checked outside the timing.
    """

    def __init__(self, case: Case, rows: int) -> None:
        self.factors = factors()
        self.out = None
        if case.quantised:
            self.out = filling(case.hidden, case.wide).repeat(rows, 1)

    def __call__(self, rows: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        return scale_rows(rows, scales, rows if self.out is None else self.out, offsets, self.factors)

    def whole(self, rows: Tensor, scales: Tensor, offsets: Tensor) -> Tensor:
        if self.out is not None:
            rows = afd_ops.dequantize(rows, scales)
        return scale_rows(rows, scales, rows, offsets, self.factors)


def expected(
    case: Case, x: Tensor, ids: Tensor, weights: Tensor, pairs: int, *, factors: Tensor, whole: bool = True
) -> Tensor:
    """What `pairs` chained round trips make of x, in plain torch, rounded where ours are.

    Args:
        whole: the experts were `Experts.whole`.
    """
    mine = factors[ids.long()]
    for _ in range(pairs):
        seen = afd_ops.dequantize(*quantize(x), case.wide) if case.quantised else x
        base = seen
        if case.quantised and not whole:
            base = filling(case.hidden, case.wide).expand_as(x)
        total = torch.zeros_like(x, dtype=torch.float32)
        for k in range(case.topk):
            row = base.float()
            row[:, :COLUMNS] = (seen[:, :COLUMNS].float() * mine[:, k : k + 1]).to(case.wide).float()
            total += weights[:, k : k + 1] * row
        x = total.to(case.wide)
    return x


def difference(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; NaN if there is one."""
    return float((got.float() - want.float()).abs().max().item())
