"""The FFN side: a server around any experts callable, and one such callable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from afd_ops import _C
from afd_ops.errors import AbortedError, ClosedError, from_record
from afd_ops.window import Window

Experts = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(rows [R, H], scales, offsets [owned experts] int32, layer) -> [R, H].

Rows stand in local-expert order, expert e's from offsets[e - 1] to offsets[e]. Rows past the last offset are
uninitialised: they may be computed on, never reduced over. With a float8_e4m3fn payload scales is float32
[R, H / 128], see `dequantize`, else [0]. The result is in the window's wide dtype."""


def dequantize(rows: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What dispatch quantised: rows[r, h] * scales[r, h // 128] in float32, rounded to dtype.

    Args:
        rows: [R, H] float8_e4m3fn.
        scales: [R, H / 128] float32.
    """
    return (rows.float() * scales.repeat_interleave(_C.SCALE_BLOCK, dim=1)).to(dtype)


class ExpertServer:
    """Answers what attention ranks send, until they have all closed their windows.

    Slots that are ready together for the same layer are computed in one call of `experts`.

    Args:
        window: an FFN rank's.
        experts: see `Experts`; engines bring their own kernels.
    """

    def __init__(self, window: Window, experts: Experts) -> None:
        if window.role != "ffn":
            raise ValueError(
                f"window belongs to {window.topology.describe(window.bootstrap.rank)}, expected an ffn rank"
            )
        self.window = window
        self.experts = experts
        self.port = window.port()
        self._stop = threading.Event()
        self._drain = threading.Event()

    def step(self) -> int:
        """Waits up to the poll interval for an item and answers it; returns how many slots it held (0: nothing came).

        Raises:
            RuntimeError: as the ops and `experts` raise it; `run` handles that.
        """
        item = torch.ops.afd.arrive(self.port, self.window.id)
        count, layer, rows = self._read(item)
        if count == 0:
            return 0
        x, scales, offsets = torch.ops.afd.receive(item, self.port, self.window.id, rows)
        out = self.experts(x, scales, offsets, layer) if rows else x.to(self.window.wide_dtype)
        torch.ops.afd.reply(out, item, self.port, self.window.id)
        return int(count)

    def _read(self, item: Tensor) -> tuple[int, int, int]:
        if item.device.type == "cpu":
            entry = item[0].tolist()
            return entry[_C.ITEM_COUNT], entry[_C.ITEM_LAYER], entry[_C.ITEM_ROWS]
        while True:  # arrive always posts, an empty item too; what ran before it on the stream may take its time
            mail = self.window.next_item(timeout=1.0)
            if mail is not None:
                return mail
            self.window.check()

    def run(self) -> None:
        """Serves until every attention rank has left, or `stop()` or `drain()`.

        A peer that fails closes its own region; the others are served on and the error is raised when all have ended.
        An exception of `experts` is never swallowed: it poisons the window, so that no attention rank waits for it.

        Raises:
            PeerError: a peer failed, or this window was stopped.
            AbortedError, ClosedError: the window was reset or closed meanwhile.
        """
        generation = self.window.generation
        with torch.inference_mode():
            while not self._stop.is_set():
                try:
                    count = self.step()
                except BaseException as error:
                    self._give_up(error, generation)
                    raise
                if count == 0 and (self._drain.is_set() or _C.ALIVE not in _C.regions(self.window.id)):
                    break
        for record in self.window.errors():
            raise from_record(record)

    def stop(self) -> None:
        """Ends `run` after the item it is at; from any thread."""
        self._stop.set()

    def drain(self) -> None:
        """Ends `run` once everything that has arrived is answered; from any thread."""
        self._drain.set()

    def _give_up(self, error: BaseException, generation: int) -> None:
        window = self.window
        if window.closed:
            raise ClosedError(f"window {window.id} was closed while its server ran") from error
        if window.generation != generation:  # what it was answering has been dropped
            raise AbortedError(f"window {window.id} was reset while its server ran") from error
        try:
            if isinstance(error, Exception):
                window.raise_typed(error)
        except (AbortedError, ClosedError):
            raise
        except Exception:
            window.poison()
            raise
        window.poison()


class GroupedSwiGLU(nn.Module):
    """Routed experts by grouped GEMM: down(silu(min(g, L)) * clamp(u, -L, L)) with [g; u] = gate_up(x).

    Formula: DeepSeek-V4's clamped SwiGLU (`swiglu_limit`).

    Args:
        gate_up: per layer [owned experts, 2 I, H]; the first I output rows are the gate.
        down: per layer [owned experts, H, I].
        limit: L; None = no clamp.
    """

    def __init__(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], limit: float | None = None) -> None:
        super().__init__()
        if len(gate_up) != len(down):
            raise ValueError(f"gate_up has {len(gate_up)} layers, down has {len(down)}")
        self.gate_up = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in gate_up)
        self.down = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in down)
        self.limit = limit

    def forward(self, rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        """rows [R, H] -> [R, H]; see `Experts`. Quantised rows are computed on in bfloat16."""
        if not 0 <= layer < len(self.gate_up):
            raise ValueError(f"layer is {layer}, but there are experts for {len(self.gate_up)} layers")
        if rows.dtype == torch.float8_e4m3fn:
            rows = dequantize(rows, scales)
        gate, up = nn.functional.grouped_mm(rows, self.gate_up[layer].transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        hidden = nn.functional.silu(gate) * up
        return nn.functional.grouped_mm(hidden, self.down[layer].transpose(-2, -1), offs=offsets)
