"""The FFN side: a server around any experts callable, and one such callable."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from afd_ops import _C
from afd_ops.captured import Experts, ItemBuffers
from afd_ops.errors import AbortedError, ClosedError, from_record
from afd_ops.metrics import PHASES, PhaseTimes
from afd_ops.window import Window

PATIENCE_NS = 1_000_000_000  # how long a server waits for mail before it looks how its window is


def dequantize(rows: Tensor, scales: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """What dispatch quantised: rows[r, h] * scales[r, h // 128] in float32, rounded to dtype.

    Args:
        rows: [R, H] float8_e4m3fn.
        scales: [R, H / 128] float32.
    """
    return (rows.float() * scales.repeat_interleave(_C.SCALE_BLOCK, dim=1)).to(dtype)


class ExpertServer:
    """Answers what attention ranks send, until they have all closed their windows.

    Slots that are ready together for the same layer are computed in one call of `experts`. On a GPU the host waits for
    nothing but the mailbox: it learns there which layer and how many rows, while the rows are put in order.

    Args:
        window: an FFN rank's.
        experts: see `Experts`; engines bring their own kernels. `CapturedExperts` replays graphs.
        linger: seconds to wait, once a slot is ready, for those of other attention ranks; 0 takes what is ready.
            Waiting ends when as many slots are ready as attention ranks are left, and with the window's poll_interval.
            A few microseconds; below that interval.

    Items are received into buffers of the server (`CapturedExperts` brings them), so `experts` must not keep its
    arguments.

    Raises:
        ValueError: the window is not an FFN rank's, linger is out of range, or `experts.inputs` are another window's.
    """

    def __init__(self, window: Window, experts: Experts, *, linger: float = 0.0) -> None:
        if window.role != "ffn":
            raise ValueError(
                f"window belongs to {window.topology.describe(window.bootstrap.rank)}, expected an ffn rank"
            )
        if not 0 <= linger < window.poll_interval:
            raise ValueError(f"linger is {linger}, expected 0 to less than poll_interval = {window.poll_interval} s")
        self.window = window
        self.experts = experts
        self.port = window.port()
        facts, device = _C.facts(window.id), window.heap.device
        needs = facts["rows"], facts["hidden"], facts["owned_experts"], window.dtype, device
        inputs = getattr(experts, "inputs", None)  # an engine's callable may have others of that name
        self.inputs = inputs if isinstance(inputs, ItemBuffers) else ItemBuffers.create(*needs)
        wanted = ItemBuffers.create(max(needs[0], self.inputs.rows.shape[0]), *needs[1:4], "meta")
        for name in ("rows", "scales", "offsets"):
            has, fits = getattr(self.inputs, name), getattr(wanted, name)
            layouts = [f"{t.dtype} {list(t.shape)}, strides {list(t.stride())}, on " for t in (has, fits)]
            if layouts[0] != layouts[1] or has.device != device:
                raise ValueError(
                    f"experts.inputs.{name} is {layouts[0]}{has.device}, this window needs {layouts[1]}{device}"
                )
        self._captured: Any = experts if hasattr(experts, "graph_table") else None
        self._nothing = torch.empty((0, facts["hidden"]), dtype=window.wide_dtype, device=device)
        self._times = PhaseTimes(device)
        self._batch_sizes: Counter[int] = Counter()
        self._row_counts: Counter[int] = Counter()
        self._replayed = self._eager = 0
        self._stop = threading.Event()
        self._drain = threading.Event()
        _C.set_linger(window.id, int(linger * 1e9))
        self._item: Tensor | None = None
        if window.heap.capturable:
            self._item = torch.empty((1 + facts["slots"], _C.ITEM_WORDS), dtype=torch.int32, device=device)
            parts = self._item, self.inputs.rows, self.inputs.scales, self.inputs.offsets
            item, rows, scales, offsets = (part.data_ptr() for part in parts)
            self._places = window.id, item, rows, scales, self.inputs.rows.shape[0], offsets

    def step(self) -> int:
        """Waits up to the poll interval for an item and answers it; returns how many slots it held (0: nothing came
        that may be answered).

        Raises:
            RuntimeError: as the ops and `experts` raise it; `run` handles that.
        """
        window, port, inputs, times = self.window, self.port, self.inputs, self._times
        generation = window.generation
        marks = times.begin()
        item = self._item
        if item is not None:
            # Both ops; from compute capability 9.0 on the second is on the device before the first has ended.
            window.device_half.arrive_and_receive(*self._places, self._stream())
        else:
            item = torch.ops.afd.arrive(port, window.id)
            torch.ops.afd.receive_into(item, inputs.rows, inputs.scales, inputs.offsets, port, window.id)
        if marks is not None:
            times.mark(marks)
        count, layer, rows, graph = self._read(item, generation)
        if count == 0:
            return 0
        out = self._nothing
        if graph >= 0:
            out = self._captured.launched(graph, rows)
            self._replayed += 1
        elif rows > 0:
            out = self.experts(*inputs.first(rows), layer)
            self._eager += 1
        if marks is not None:
            times.mark(marks)
        torch.ops.afd.reply(out, item, port, window.id)
        if marks is not None:
            times.mark(marks)
        times.end(marks)
        self._batch_sizes[count] += 1
        self._row_counts[rows] += 1
        return count

    def _stream(self) -> int:
        return torch.cuda.current_stream(self.window.heap.device).cuda_stream

    def _read(self, item: Tensor, generation: int) -> tuple[int, int, int, int]:
        """Slots, layer, rows, and which graph was launched for them (-1: none): on a GPU from the mailbox, where arrive
        leaves them."""
        if item.device.type == "cpu":
            entry = item[0].tolist()
            return entry[_C.ITEM_COUNT], entry[_C.ITEM_LAYER], entry[_C.ITEM_ROWS], -1
        window = self.window
        address, words = (0, 0) if self._captured is None else self._captured.graph_table.buffer_info()
        while True:  # arrive always posts, an empty item too; what ran before it on the stream may take its time
            mail = window.device_half.next_item(window.id, PATIENCE_NS, address, words, self._stream())
            if mail is not None:
                return mail  # type: ignore[no-any-return]
            window.check()
            if window.generation != generation:  # mail of before a reset is dropped
                raise AbortedError(f"window {window.id} was reset while its server waited")

    def stats(self) -> dict[str, Any]:
        """What this server has done; from any thread.

        items, rows; batch_sizes: items by the slots they held; row_counts: items by their rows, which `ladder` takes;
        replayed, eager: items whose experts were a graph or not, coverage: the share of graphs; wait_us, compute_us,
        reply_us: a `metrics.Histogram` each, of one item in 16; regions: per attention rank slots, rows and
        bytes_sent, since the window opened. With `CapturedExperts` also what its stats() say.
        """
        window, row_counts = self.window.stats(), self._row_counts.copy()
        items = row_counts.total()
        replayed, eager = self._replayed, self._eager  # counted apart: another thread's step may be under way
        found = {
            "items": items,
            "rows": sum(rows * count for rows, count in row_counts.items()),
            "batch_sizes": dict(self._batch_sizes.copy()),
            "row_counts": dict(row_counts),
            "replayed": replayed,
            "eager": eager,
            "coverage": replayed / (replayed + eager) if replayed + eager else 0.0,
            **{f"{phase}_us": self._times.histograms[phase].as_dict() for phase in PHASES},
            "regions": [
                {"slots": slots, "rows": rows, "bytes_sent": sent}
                for slots, rows, sent in zip(
                    window["slots_taken"], window["rows_taken"], window["bytes_sent"], strict=True
                )
            ],
        }
        if self._captured is not None:
            found |= self._captured.stats()
        return found

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
                draining = self._drain.is_set()  # asked before the step, which then sees all that has arrived
                try:
                    count = self.step()
                except BaseException as error:
                    self._give_up(error, generation)
                    raise
                if self.window.generation != generation:  # on a GPU the reply of a dropped item is no error
                    raise AbortedError(f"window {self.window.id} was reset while its server ran")
                if count == 0 and (draining or _C.ALIVE not in _C.regions(self.window.id)):
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
        if not isinstance(error, Exception):  # such as KeyboardInterrupt, which the caller must get to see
            if not window.closed and window.generation == generation:
                window.poison(generation)
            return
        if window.closed:
            raise ClosedError(f"window {window.id} was closed while its server ran") from error
        if window.generation != generation:  # what it was answering has been dropped
            raise AbortedError(f"window {window.id} was reset while its server ran") from error
        try:
            window.raise_typed(error)
        except (AbortedError, ClosedError):
            raise
        except Exception:
            window.poison(generation)
            raise


class GroupedSwiGLU(nn.Module):
    """Routed experts by grouped GEMM: down(silu(min(g, L)) * clamp(u, -L, L)) with [g; u] = gate_up(x).

    Formula: DeepSeek-V4's clamped SwiGLU (`swiglu_limit`).

    Args:
        gate_up: per layer [owned experts, 2 I, H]; the first I output rows are the gate. Of this rank's experts only,
            `topology.experts_of(rank)`, in the window's wide dtype.
        down: per layer [owned experts, H, I].
        limit: L; None = no clamp.

    Raises:
        ValueError: a shape or dtype does not fit; names it.
    """

    def __init__(self, gate_up: Sequence[Tensor], down: Sequence[Tensor], limit: float | None = None) -> None:
        super().__init__()
        if len(gate_up) != len(down):
            raise ValueError(f"gate_up has {len(gate_up)} layers, down has {len(down)}")
        for layer, (g, d) in enumerate(zip(gate_up, down, strict=True)):
            if g.dim() != 3 or d.dim() != 3 or g.shape[1] % 2:
                raise ValueError(
                    f"gate_up[{layer}] is {list(g.shape)} and down[{layer}] {list(d.shape)}, expected a tensor per "
                    "layer: [experts, 2 I, H] and [experts, H, I]"
                )
            experts, width, hidden = g.shape
            if list(d.shape) != [experts, hidden, width // 2]:
                raise ValueError(
                    f"down[{layer}] is {list(d.shape)}, expected {[experts, hidden, width // 2]}: [experts, H, I] of "
                    f"gate_up[{layer}], [experts, 2 I, H] = {list(g.shape)}"
                )
            if g.dtype != d.dtype:
                raise ValueError(f"down[{layer}] is {d.dtype}, but gate_up[{layer}] is {g.dtype}")
        self.gate_up = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in gate_up)
        self.down = nn.ParameterList(nn.Parameter(w, requires_grad=False) for w in down)
        self.limit = limit

    def forward(self, rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
        """rows [R, H] -> [R, H]; see `Experts`. Quantised rows are computed on in bfloat16."""
        if not 0 <= layer < len(self.gate_up):
            raise ValueError(f"layer is {layer}, but there are experts for {len(self.gate_up)} layers")
        if rows.dtype == torch.float8_e4m3fn:
            rows = dequantize(rows, scales)
        first = self.gate_up[layer]
        has, needs = (first.shape[0], first.shape[2], first.dtype), (offsets.shape[0], rows.shape[1], rows.dtype)
        if has != needs:
            raise ValueError(f"gate_up[{layer}] has (experts, H, dtype) {has}, but the items of this rank need {needs}")
        gate, up = nn.functional.grouped_mm(rows, first.transpose(-2, -1), offs=offsets).chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        hidden = nn.functional.silu(gate) * up
        return nn.functional.grouped_mm(hidden, self.down[layer].transpose(-2, -1), offs=offsets)
