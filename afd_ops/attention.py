"""The attention side as modules."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from afd_ops import _C
from afd_ops.errors import ClosedError
from afd_ops.window import Window


class RemoteExperts(nn.Module):
    """Experts that live on FFN ranks: a drop-in for an `experts(hidden, topk_ids, topk_weights)` module.

    Build, move, load and profile it before any window exists; `attach` later fills its port. Detached, it contributes
    nothing and returns `base`; called eagerly it warns of that once. All layers share one compiled graph: which layer
    this is travels in the port, not in the graph.

    Args:
        layer: sent along, so that the FFN ranks know whose experts are meant.
        stage: the lane of the window this module uses; two ubatches use two.
    """

    port: Tensor
    order: Tensor

    def __init__(self, layer: int, stage: int = 0) -> None:
        super().__init__()
        if layer < 0 or stage < 0:
            raise ValueError(f"layer is {layer} and stage is {stage}, expected 0 or more")
        self.layer = layer
        self.stage = stage
        self.window_id = 0
        self.window: Window | None = None
        self._warned = False
        self.register_buffer("port", torch.zeros(_C.PORT_WORDS, dtype=torch.int32), persistent=False)
        self.register_buffer("order", torch.zeros(1, dtype=torch.int32), persistent=False)

    def attach(self, window: Window | None) -> RemoteExperts:
        """Sends through `window` from now on; None detaches.

        Raises:
            ValueError: the window is an FFN rank's, lacks the stage, or this module is on another device.
            ClosedError: the window is closed.
        """
        if window is None:
            self.port.zero_()
            self.window, self.window_id = None, 0
            return self
        if window.role != "attention":
            raise ValueError(
                f"window belongs to {window.topology.describe(window.bootstrap.rank)}, expected an attention rank"
            )
        if window.closed:
            raise ClosedError(f"window {window.id} is closed")
        if self.port.device != window.heap.device:
            raise ValueError(
                f"port is on {self.port.device}, but the window is on {window.heap.device}; move the module first"
            )
        self.port.copy_(window.port(self.layer, self.stage))
        self.order = window.order  # the same tensor in all modules: it is what keeps their ops in program order
        self.window, self.window_id = window, window.id
        return self

    def dispatch(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Sends the tokens and returns the ticket for `combine`; what is computed in between overlaps with the experts.

        Call both inside `with window.step():`: there errors are typed, and a step that raises in between stops the
        window instead of keeping a ring for good.

        Args:
            hidden: [T, H] in the window's wide dtype.
            topk_ids: [T, topk] int32 or int64; -1 = no expert.
            topk_weights: [T, topk] float32.
        """
        if self.window_id == 0:
            self._warn_detached()
            return torch.zeros(0, dtype=torch.int32, device=hidden.device)
        return torch.ops.afd.dispatch(hidden, topk_ids, topk_weights, self.port, self.order, self.window_id)  # type: ignore[no-any-return]

    def combine(self, ticket: Tensor, base: Tensor) -> Tensor:
        """base [T, H] + the experts' weighted sums, in base's dtype.

        Give it what was computed since `dispatch`: a compiler moves work that combine does not need behind it. To keep
        that work from moving in front of `dispatch`, compile with `options={"reorder_for_peak_memory": False}`.
        """
        if self.window_id == 0:
            return base
        return torch.ops.afd.combine(ticket, base, self.port, self.order, self.window_id)  # type: ignore[no-any-return]

    def cancel(self, ticket: Tensor) -> None:
        """Drops a step: waits for the answers to `ticket` and throws them away, so that its ring is free again."""
        if self.window is not None:
            rows = torch.zeros((ticket.shape[0] - 1, self.window.geometry.hidden), dtype=self.window.wide_dtype)
            torch.ops.afd.combine(ticket, rows.to(ticket.device), self.port, self.order, self.window_id)

    def forward(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, base: Tensor | None = None) -> Tensor:
        """The whole round trip: [T, H] -> [T, H]. Outside torch.compile, errors are typed."""
        if torch.compiler.is_compiling() or self.window is None:
            return self._round_trip(hidden, topk_ids, topk_weights, base)
        with self.window.step():
            return self._round_trip(hidden, topk_ids, topk_weights, base)

    def check(self) -> None:
        """`Window.check()`: raises if the window has stopped. Call it before a step's output is used."""
        if self.window is not None:
            self.window.check()

    def extra_repr(self) -> str:
        return f"layer={self.layer}, stage={self.stage}, window={self.window_id or 'detached'}"

    def _round_trip(self, hidden: Tensor, topk_ids: Tensor, topk_weights: Tensor, base: Tensor | None) -> Tensor:
        ticket = self.dispatch(hidden, topk_ids, topk_weights)
        return self.combine(ticket, torch.zeros_like(hidden) if base is None else base)

    def _warn_detached(self) -> None:
        if not torch.compiler.is_compiling() and not self._warned:
            self._warned = True
            warnings.warn(
                f"RemoteExperts of layer {self.layer} has no window and adds nothing; attach(window)", stacklevel=3
            )


def attach(model: nn.Module, window: Window | None) -> int:
    """Attaches every RemoteExperts below `model`; returns how many there were."""
    modules = [module for module in model.modules() if isinstance(module, RemoteExperts)]
    for module in modules:
        module.attach(window)
    return len(modules)
