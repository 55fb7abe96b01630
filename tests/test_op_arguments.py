"""The ops' input contract, on every device: what is refused is named with both values, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import harness
import pytest
import torch
from harness import random_step
from op_trips import (
    HIDDEN,
    TOKENS,
    TOPOLOGY,
    State,
    argument_names,
    by_hand,
    columns_first,
    finish,
    overload,
    refused,
    stop_before,
)
from torch import Tensor

import afd_ops
from afd_ops import _C

pytestmark = pytest.mark.usefixtures("device")


def cut(t: Tensor) -> Tensor:
    return t[:-1]


def wide(t: Tensor) -> Tensor:
    return torch.cat([t, t[:, :1]], dim=1)


def flat(t: Tensor) -> Tensor:
    return t.flatten()


def deep(t: Tensor) -> Tensor:
    return t[None]


def with_word(*place: int, value: int) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t = t.clone()
        t[place] = value
        return t

    return change


def to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda t: t.to(dtype)


class Refusal(NamedTuple):
    """A bad argument of a step of 5 tokens.

    Attributes:
        wrong: what is wrong with it.
        says: what the error says beside the argument's name.
        found: for what the host does not see without reading memory: what check() raises where a kernel finds it, None
            where no kernel looks.
    """

    op: str
    argument: str
    wrong: str
    change: Callable[[Any], Any]
    says: tuple[str, ...]
    found: type[afd_ops.AfdError] | str | None = "by the host"


ARGUMENT, STALE = afd_ops.ArgumentError, afd_ops.StaleError
ROWS: list[tuple[Any, ...]] = [
    ("dispatch", "x", "1 dimension", flat, ("x has 1 dim", "expected 2")),
    ("dispatch", "x", "3 dimensions", deep, ("x has 3 dim", "expected 2")),
    ("dispatch", "x", "hidden", wide, ("x has size 17", "expected 16")),
    ("dispatch", "x", "bfloat16", to(torch.bfloat16), ("x is bfloat16", "expected float32")),
    ("dispatch", "x", "float64", to(torch.float64), ("x is float64", "expected float32")),
    ("dispatch", "x", "int32", to(torch.int32), ("x is int32", "expected float32")),
    ("dispatch", "x", "last stride", columns_first, ("x has stride 5", "expected 1")),
    ("dispatch", "x", "capacity", lambda x: x.new_zeros(TOKENS + 1, HIDDEN), ("x has 17", "16")),
    ("dispatch", "topk_ids", "1 dimension", flat, ("topk_ids has 1 dim", "expected 2")),
    ("dispatch", "topk_ids", "tokens", cut, ("topk_ids has size 4", "expected 5")),
    ("dispatch", "topk_ids", "topk", wide, ("topk_ids has size 3", "expected 2")),
    ("dispatch", "topk_ids", "float32", to(torch.float32), ("topk_ids is float32", "expected int32 or int64")),
    ("dispatch", "topk_ids", "int16", to(torch.int16), ("topk_ids is ", "expected int32 or int64")),
    ("dispatch", "topk_ids", "id E", with_word(4, 1, value=5), ("topk_ids[4, 1] is 5", "0 to 4"), ARGUMENT),
    ("dispatch", "topk_ids", "id -2", with_word(4, 1, value=-2), ("topk_ids[4, 1] is -2", "-1", "0 to 4"), ARGUMENT),
    ("dispatch", "topk_ids", "id 2^32", with_word(0, 0, value=2**32), ("topk_ids[0, 0] is 4294967296",), ARGUMENT),
    ("dispatch", "topk_weights", "1 dimension", flat, ("topk_weights has 1 dim", "expected 2")),
    ("dispatch", "topk_weights", "tokens", cut, ("topk_weights has size 4", "expected 5")),
    ("dispatch", "topk_weights", "topk", wide, ("topk_weights has size 3", "expected 2")),
    ("dispatch", "topk_weights", "bfloat16", to(torch.bfloat16), ("topk_weights is bfloat16", "expected float32")),
    ("dispatch", "topk_weights", "float64", to(torch.float64), ("topk_weights is float64", "expected float32")),
    ("dispatch", "port", "stage", with_word(2, value=2), ("port is for stage 2", "2 stages"), ARGUMENT),
    ("combine", "ticket", "1 dimension", flat, ("ticket has 1 dim", "expected 2")),
    ("combine", "ticket", "width", wide, ("ticket has size 9", "expected 8")),
    ("combine", "ticket", "int64", to(torch.int64), ("ticket is int64", "expected int32")),
    ("combine", "ticket", "strided", columns_first, ("ticket is not contiguous",)),
    ("combine", "ticket", "no rows", lambda t: t[:0], ("ticket has 0 rows", "at least 1")),
    ("combine", "ticket", "rows", cut, ("base has size 5", "expected 4")),
    ("combine", "port", "stage", with_word(2, value=0), ("ticket is of stage 1", "port is of stage 0"), STALE),
    ("combine", "port", "layer", with_word(1, value=4), ("ticket is of layer 3", "port is of layer 4"), STALE),
    ("combine", "base", "1 dimension", flat, ("base has 1 dim", "expected 2")),
    ("combine", "base", "tokens", cut, ("base has size 4", "expected 5")),
    ("combine", "base", "hidden", wide, ("base has size 17", "expected 16")),
    ("combine", "base", "int32", to(torch.int32), ("base is int32", "expected float32, bfloat16 or float16")),
    ("combine", "base", "float64", to(torch.float64), ("base is float64", "expected float32, bfloat16 or float16")),
    ("combine", "base", "last stride", columns_first, ("base has stride 5", "expected 1")),
    ("receive", "rows", "too few", lambda rows: rows - 1, ("rows is ", "but the item has "), ARGUMENT),
    ("receive", "rows", "negative", lambda rows: -1, ("rows is -1",)),
    ("receive_into", "rows", "too few", lambda rows: rows[:1], ("rows is 1", "but the item has "), ARGUMENT),
    ("receive_into", "rows", "hidden", wide, ("rows has size 17", "expected 16")),
    ("receive_into", "rows", "float16", to(torch.float16), ("rows is float16", "expected float32")),
    ("receive_into", "rows", "strided", columns_first, ("rows is not contiguous",)),
    ("receive_into", "scales", "some", lambda scales: scales.new_ones(3), ("scales has size 3", "expected 0")),
    ("receive_into", "offsets", "size", cut, ("offsets has size 2", "expected 3")),
    ("receive_into", "offsets", "int64", to(torch.int64), ("offsets is int64", "expected int32")),
    ("reply", "expert_out", "1 dimension", flat, ("expert_out has 1 dim", "expected 2")),
    ("reply", "expert_out", "rows", cut, ("expert_out has ", "but the item has "), ARGUMENT),
    ("reply", "expert_out", "hidden", wide, ("expert_out has size 17", "expected 16")),
    ("reply", "expert_out", "float16", to(torch.float16), ("expert_out is float16", "expected float32")),
    ("reply", "expert_out", "last stride", columns_first, ("expert_out has stride ", "expected 1")),
    ("plan", "topk_ids", "1 dimension", flat, ("topk_ids has 1 dim", "expected 2")),
    ("plan", "topk_ids", "float32", to(torch.float32), ("topk_ids is float32", "expected int32 or int64")),
    ("plan", "topk_ids", "id E", with_word(0, 1, value=5), ("topk_ids[0, 1] is 5", "0 to 4"), None),
    ("plan", "expert_map", "1 dimension", flat, ("expert_map has 1 dim", "expected 2")),
    ("plan", "expert_map", "width", wide, ("expert_map has size 3", "expected 2")),
    ("plan", "expert_map", "int64", to(torch.int64), ("expert_map is int64", "expected int32")),
    ("plan", "expert_map", "strided", columns_first, ("expert_map is not contiguous",)),
    ("plan", "expert_map", "rank", with_word(0, 0, value=2), ("expert_map[0] is (2, 0)", "below (2, 3)"), None),
    ("plan", "expert_map", "local", with_word(4, 1, value=-1), ("expert_map[4] is (1, -1)", "below (2, 3)"), None),
]
# The FFN ranks' ops need nothing of a port's content.
PORT: dict[str, Any] = {"dispatch": ARGUMENT, "combine": STALE}
PORT |= dict.fromkeys(("arrive", "receive", "receive_into", "reply"))
for _op in PORT:
    ROWS += [
        (_op, "port", "no magic", torch.zeros_like, ("port holds 0", str(_C.PORT_MAGIC), "attach(window)"), PORT[_op]),
        (_op, "port", "size", cut, ("port has size 3", "expected 4")),
        (_op, "port", "2 dimensions", deep, ("port has 2 dim", "expected 1")),
        (_op, "port", "int64", to(torch.int64), ("port is int64", "expected int32")),
        (_op, "port", "stage -1", with_word(2, value=-1), ("port is for stage -1", "2 stages"), PORT[_op]),
        (_op, "port", "strided", lambda p: torch.stack([p, torch.zeros_like(p)], 1)[:, 0], ("port is not contiguous",)),
    ]
for _op in ("receive", "receive_into", "reply"):
    ROWS += [
        (_op, "item", "1 dimension", flat, ("item has 1 dim", "expected 2")),
        (_op, "item", "slots", cut, ("item has size 12", "expected 13")),
        (_op, "item", "width", wide, ("item has size 9", "expected 8")),
        (_op, "item", "int64", to(torch.int64), ("item is int64", "expected int32")),
        (_op, "item", "strided", columns_first, ("item is not contiguous",)),
        (_op, "item", "count", with_word(0, _C.ITEM_COUNT, value=13), ("item holds 13 slots", "0 to 12"), None),
        (_op, "item", "region", with_word(1, 0, value=2), ("item names slot (2, ",), None),
        (_op, "item", "ring", with_word(1, 2, value=-1), ("item names slot (", ", -1)"), None),
    ]
REFUSED = [Refusal(*row) for row in ROWS]


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda r: f"{r.op}-{r.argument}-{r.wrong}")
def test_a_bad_argument_is_refused_by_name_and_nothing_is_lost(
    cluster: list[afd_ops.Window], refusal: Refusal, seed: int
) -> None:
    """faults: written before it was checked, a ring or sequence used up, a wrong stride or width read silently."""
    name, found = refusal.op, refusal.found
    if found is None and not harness.host_reads():
        pytest.skip("its kernel takes this for granted")
    trip = by_hand(cluster, 5)
    good = stop_before(name, trip)
    names = argument_names(name)
    bad = tuple(refusal.change(a) if n == refusal.argument else a for n, a in zip(names, good, strict=True))
    if isinstance(found, type) and not harness.host_reads():
        (window,) = [w for w in cluster if w.id == bad[names.index("window")]]
        out = overload(name)(*bad)
        harness.synchronize()
        with pytest.raises(found, match=refusal.argument if found is ARGUMENT else "ticket"):
            window.check()
        assert name != "combine" or bool(out.isnan().all())
        harness.reset(cluster)
    else:
        state, stats = State(cluster), [window.stats() for window in cluster]
        with pytest.raises(RuntimeError) as raised:
            overload(name)(*bad)
        message = str(raised.value)
        assert message.startswith(f"Argument in afd::{name.removesuffix('_into')}: ")
        assert all(part in message for part in refusal.says), message
        assert type(afd_ops.errors.typed(raised.value)) is afd_ops.ArgumentError
        assert State(cluster) == state
        assert [window.stats() for window in cluster] == stats
        finish(trip)
    finish(by_hand(cluster, 5))


def test_a_ticket_that_was_cut_with_its_base_is_the_callers_fault_not_the_peers(
    cluster: list[afd_ops.Window], seed: int
) -> None:
    """fault: the caller slices padding off both, and a healthy peer is accused and the window stopped."""
    trip = by_hand(cluster, 5)
    ticket, base, *rest = stop_before("combine", trip)
    kind, says = ARGUMENT, r"^Argument in afd::combine: ticket has 4 tokens, expected 5, as many as"
    with refused(cluster, cluster[0], kind if harness.host_reads() else STALE, says):
        torch.ops.afd.combine(ticket[:-1], base[:-1], *rest)
    if harness.host_reads():
        finish(trip)


def test_a_full_lane_says_its_depth_and_nothing_is_lost(cluster: list[afd_ops.Window], seed: int) -> None:
    """fault: more dispatches in flight than rings hang or overwrite."""
    window = cluster[0]
    before = State(cluster)
    steps = [random_step(TOPOLOGY, 2) for _ in range(4)]
    for step in steps[:3]:
        torch.ops.afd.dispatch(*step[:3], window.port(0, 0), window.order, window.id)
    slots = [harness.slots_of(peer).clone() for peer in cluster[2:]]
    says = r"^RingBusy in afd::dispatch: stage 0 .*3 dispatches in flight \(depth 3\)"
    with refused(cluster, window, afd_ops.RingBusyError, says):
        torch.ops.afd.dispatch(*steps[3][:3], window.port(0, 0), window.order, window.id)
    assert all(map(torch.equal, slots, [harness.slots_of(peer) for peer in cluster[2:]]))
    if harness.host_reads():
        before.restore()
    else:
        harness.reset(cluster)
    finish(by_hand(cluster, 2))


def test_a_ticket_is_good_once(cluster: list[afd_ops.Window], seed: int) -> None:
    trip = by_hand(cluster, 3)
    used = stop_before("combine", trip)
    finish(trip)
    with refused(cluster, cluster[0], STALE, r"^Stale in afd::combine: ticket with sequence .* was used before"):
        torch.ops.afd.combine(*used)


@pytest.mark.parametrize("name", ["receive", "reply"])
def test_an_item_is_good_until_it_is_answered(cluster: list[afd_ops.Window], name: str, seed: int) -> None:
    if name == "receive" and not harness.host_reads():
        pytest.skip("its kernel does not ask whether the item was answered; reply's does")
    trip = by_hand(cluster, 3)
    used = stop_before(name, trip)
    finish(trip)
    with refused(cluster, cluster[2], STALE, f"^Stale in afd::{name}: item with sequence .* was answered before"):
        overload(name)(*used)


@pytest.mark.parametrize(("name", "place"), [("receive", "item"), ("reply", "item"), ("combine", "ticket")])
def test_what_is_of_another_generation_is_refused(
    cluster: list[afd_ops.Window], name: str, place: str, seed: int
) -> None:
    trip = by_hand(cluster, 3)
    good = stop_before(name, trip)
    bad = tuple(
        with_word(0, 0, value=77)(a) if n == place else a for n, a in zip(argument_names(name), good, strict=True)
    )
    says = f"^Stale in afd::{name}: {place} is of generation 77, .* at {cluster[0].generation}"
    if name == "combine" or harness.host_reads():
        with refused(cluster, cluster[0], STALE, says):
            overload(name)(*bad)
    else:  # an item of before a reset, which a server loop may still hold: dropped without a word
        state = State(cluster)
        overload(name)(*bad)
        assert State(cluster) == state
        cluster[2].check()
    if name != "combine" or harness.host_reads():
        finish(trip)


@pytest.mark.parametrize("name", ["dispatch", "arrive", "receive", "reply", "combine"])
def test_a_window_that_is_not_there_or_of_the_other_role_is_refused(
    cluster: list[afd_ops.Window], name: str, seed: int
) -> None:
    trip = by_hand(cluster, 3)
    good = stop_before(name, trip)
    at = argument_names(name).index("window")
    of_role = "attention" if name in ("dispatch", "combine") else "ffn"
    other = next(window for window in cluster if window.role != of_role)
    state = State(cluster)
    for window, says in [
        (0, "^Closed in .* window 0 does not exist"),
        (-1, "^Closed in .* window -1 does not exist"),
        (2**40, f"^Closed in .* window {2**40} does not exist"),
        (other.id, f"^Argument in .* window {other.id} belongs to .*{other.role}.* op is for {of_role} ranks"),
    ]:
        with pytest.raises(RuntimeError, match=says):
            overload(name)(*good[:at], window, *good[at + 1 :])
    assert State(cluster) == state
    finish(trip)


def test_nothing_pending_is_an_empty_item_that_nobody_answers(cluster: list[afd_ops.Window]) -> None:
    window = cluster[2]
    state, stats = State(cluster), window.stats()
    item = torch.ops.afd.arrive(window.port(), window.id)
    assert item[0, _C.ITEM_COUNT] == 0 and item[0, _C.ITEM_ROWS] == 0
    rows, _, offsets = torch.ops.afd.receive(item, window.port(), window.id, 0)
    assert rows.shape == (0, HIDDEN) and offsets.tolist() == [0, 0, 0]
    torch.ops.afd.reply(rows, item, window.port(), window.id)
    assert State(cluster) == state and window.stats() == stats
