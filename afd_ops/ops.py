"""What torch.library needs beside the schemas of csrc/ops.cpp: fakes, in the order of the round trip, and the refusal
of gradients.

`port` is the int32 [4] tensor of `Window.port`, by whose content an op learns layer and stage. `order` is
`Window.order`, one tensor for all layers and stages, declared mutated so that no compiler drops, duplicates or reorders
an op; on an FFN rank the port serves for that. Neither is ever written. `window` is `Window.id`. Outputs are fresh
tensors. Errors are RuntimeErrors whose text starts with a kind of `afd_ops.errors`.

afd::plan(topk_ids [T, topk] int32 or int64, expert_map [E, 2] int32, ffn_size, local_experts)
    -> position [F, T, topk, 2] int32, counts [F, local_experts] int32, masks [T, ceil(F / 32)] int32
    The routing plan alone: per F rank (local expert, rank within that expert) or (-1, -1), and which F ranks need a
    token.

afd::dispatch(x [T, H], topk_ids [T, topk], topk_weights [T, topk] float32, port, order, window)
    -> ticket [T + 1, W] int32
    Sends each token once to every F rank that owns one of its experts. Does not wait. id -1 means no expert.
    x is of the window's wide dtype; if its payload is narrower, the cast is part of the copy.

afd::arrive(port, window) -> item [1 + slots, 8] int32
    Waits for any slot, chooses what to compute together; item[0] = generation, slot count, layer, rows. Empty (count 0)
    after the poll interval.

afd::receive(item, port, window, rows) -> rows [rows, H], scales float32, offsets [owned experts] int32
    The item's tokens in local-expert order; offsets are cumulative ends. Rows past the last offset are uninitialised.
    With a float8_e4m3fn payload scales is [rows, H / 128], a factor per row and 128 channels; else it is [0].

afd::receive_into(item, rows [R, H], scales, offsets, port, window) -> ()
    The same into buffers that stay where they are, so that captured experts can read them: R rows at least, shapes and
    dtypes as receive gives them.

afd::reply(expert_out [>= item rows, H], item, port, window) -> ()
    Each token's weighted sum over this rank's experts, accumulated in float32, rounded once, sent back; in and out in
    the window's wide dtype.

afd::combine(ticket, base [T, H], port, order, window) -> [T, H] in base's dtype
    base + the F ranks' sums, added in float32 in F-rank order and rounded once. Uses the ticket up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from afd_ops import _C
from afd_ops.layout import PAYLOAD_DTYPES, WIDE_DTYPES

F = TypeVar("F", bound=Callable[..., Any])
register_fake: Callable[[str], Callable[[F], F]] = torch.library.register_fake


@register_fake("afd::plan")
def _plan(topk_ids: Tensor, expert_map: Tensor, ffn_size: int, local_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, topk = topk_ids.shape
    return (
        topk_ids.new_empty((ffn_size, tokens, topk, 2), dtype=torch.int32),
        topk_ids.new_empty((ffn_size, local_experts), dtype=torch.int32),
        topk_ids.new_empty((tokens, -(-ffn_size // 32)), dtype=torch.int32),
    )


@register_fake("afd::dispatch")
def _dispatch(x: Tensor, topk_ids: Tensor, topk_weights: Tensor, port: Tensor, order: Tensor, window: int) -> Tensor:
    return x.new_empty((x.shape[0] + 1, _C.ticket_width(_C.facts(window)["ffn_size"])), dtype=torch.int32)


@register_fake("afd::arrive")
def _arrive(port: Tensor, window: int) -> Tensor:
    return port.new_empty((1 + _C.facts(window)["slots"], _C.ITEM_WORDS), dtype=torch.int32)


@register_fake("afd::receive")
def _receive(item: Tensor, port: Tensor, window: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    facts = _C.facts(window)
    hidden, dtype = facts["hidden"], facts["dtype"]
    quantized = PAYLOAD_DTYPES[dtype] != WIDE_DTYPES[dtype]
    return (
        item.new_empty((rows, hidden), dtype=PAYLOAD_DTYPES[dtype]),
        item.new_empty((rows, hidden // _C.SCALE_BLOCK) if quantized else (0,), dtype=torch.float32),
        item.new_empty((facts["owned_experts"],), dtype=torch.int32),
    )


@register_fake("afd::receive_into")
def _receive_into(item: Tensor, rows: Tensor, scales: Tensor, offsets: Tensor, port: Tensor, window: int) -> None:
    return None


@register_fake("afd::reply")
def _reply(expert_out: Tensor, item: Tensor, port: Tensor, window: int) -> None:
    return None


@register_fake("afd::combine")
def _combine(ticket: Tensor, base: Tensor, port: Tensor, order: Tensor, window: int) -> Tensor:
    return base.new_empty(base.shape)


def _below_autograd(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any) -> Any:
        if torch.is_grad_enabled():
            for name, value in zip(names, args, strict=False):
                if isinstance(value, Tensor) and value.requires_grad:
                    raise RuntimeError(
                        f"Argument in {op._schema.name}: {name} requires grad, but afd ops are for inference and have "
                        "no backward; run the model under torch.inference_mode() or torch.no_grad()"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


# Refused in forward, not in backward: a ticket is int32 and carries no gradient, so a backward would silently treat the
# round trip as a constant. torch.library.register_autograd takes no op that mutates an argument. In inference mode this
# kernel is not on the path. The registrations live as long as the Library object.
_library: Any = torch.library.Library("afd", "IMPL")  # type: ignore[no-untyped-call]
for _name in ("dispatch", "combine", "receive", "receive_into", "reply"):
    _library.impl(_name, _below_autograd(getattr(torch.ops.afd, _name).default), "Autograd")
