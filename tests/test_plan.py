"""afd::plan on every device against a plan one can read, over anything a router may produce."""

from __future__ import annotations

import re
from typing import Any

import harness
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from afd_ops import ArgumentError, Topology
from afd_ops.errors import typed

pytestmark = pytest.mark.usefixtures("device")


@st.composite
def routings(draw: st.DrawFn) -> tuple[Topology, Tensor]:
    """A topology with any complete expert map, and topk_ids of either width and any strides, -1 and duplicates too."""
    ffn = draw(st.one_of(st.integers(1, 6), st.sampled_from([31, 32, 33, 65])))  # around the words of the masks
    experts = draw(st.integers(1, 3 * ffn))
    topology = Topology(1, ffn, experts, tuple(draw(st.permutations(Topology(1, ffn, experts).expert_map))))
    tokens, topk = draw(st.integers(0, 9)), draw(st.integers(1, 6))
    choices = st.lists(st.integers(-1, experts - 1), min_size=topk, max_size=topk)
    rows = draw(st.lists(choices, min_size=tokens, max_size=tokens))
    ids = torch.tensor(rows, dtype=draw(st.sampled_from([torch.int32, torch.int64]))).reshape(tokens, topk)
    match draw(st.sampled_from(["dense", "transposed", "strided", "expanded"])):
        case "transposed":
            ids = ids.t().contiguous().t()
        case "strided":
            ids = torch.stack([ids, torch.full_like(ids, 99)], dim=2)[:, :, 0]
        case "expanded":
            ids = ids[:, :1].expand(-1, topk)
    return topology, ids


def plan(topology: Topology, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    there = torch.as_strided(whole(ids).to(harness.DEVICE), ids.shape, ids.stride(), ids.storage_offset())
    expert_map = torch.tensor(topology.expert_map, dtype=torch.int32, device=harness.DEVICE)
    position, counts, masks = torch.ops.afd.plan(there, expert_map, topology.ffn_size, topology.local_experts)
    return position.cpu(), counts.cpu(), masks.cpu()


def whole(t: Tensor) -> Tensor:
    """All memory behind a tensor: .to() of the tensor itself would make its strides dense."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def obvious_plan(topology: Topology, ids: list[list[int]], topk: int) -> tuple[Tensor, Tensor, Tensor]:
    ranks = range(topology.ffn_size)
    position = [[[[-1, -1] for _ in range(topk)] for _ in ids] for _ in ranks]
    counts = [[0] * topology.local_experts for _ in ranks]
    masks = [0] * len(ids)
    for t, row in enumerate(ids):
        for k, expert in enumerate(row):
            if expert >= 0:
                owner, local = topology.expert_map[expert]
                position[owner][t][k] = [local, counts[owner][local]]
                counts[owner][local] += 1
                masks[t] |= 1 << owner
    words = [[(mask >> 32 * w) & 0xFFFFFFFF for w in range(-(-topology.ffn_size // 32))] for mask in masks]
    return (
        torch.tensor(position, dtype=torch.int32).reshape(topology.ffn_size, len(ids), topk, 2),
        torch.tensor(counts, dtype=torch.int32),
        torch.tensor(words, dtype=torch.int64).reshape(len(ids), -(-topology.ffn_size // 32)).to(torch.int32),
    )


@settings(max_examples=150, deadline=None)
@given(routings())
def test_the_plan_is_the_obvious_one(routing: tuple[Topology, Tensor]) -> None:
    """faults: -1 divided to rank 0; a duplicate counted once; 32 and 64 bit ids confused; strides ignored."""
    topology, ids = routing
    before = ids.clone()
    for name, got, want in zip(
        ("position", "counts", "masks"), plan(*routing), obvious_plan(topology, ids.tolist(), ids.shape[1]), strict=True
    ):
        assert got.dtype == torch.int32 and got.is_contiguous()
        assert torch.equal(got, want), name
    assert torch.equal(ids, before)


@settings(max_examples=100, deadline=None)
@given(routings())
def test_no_choice_is_lost_or_invented(routing: tuple[Topology, Tensor]) -> None:
    topology, ids = routing
    position, counts, masks = plan(*routing)
    here = position[..., 0] >= 0
    assert torch.equal(here.sum(dim=0), (ids >= 0).long()), "one F rank per choice, none for -1"
    assert int(counts.sum()) == int((ids >= 0).sum())
    for rank in range(topology.ffn_size):
        needed = masks[:, rank // 32] >> (rank % 32) & 1
        assert torch.equal(needed.bool(), here[rank].any(dim=1))
        for local, count in enumerate(counts[rank].tolist()):
            places = position[rank][position[rank][..., 0] == local][:, 1]
            assert places.tolist() == list(range(count)), "places in an expert are 0 .. n-1, token-major"


def assert_outside(ids: Tensor, row: int, column: int) -> None:
    """This id is refused by its place, value and range; or, where no host reads it, it counts as none."""
    topology, bad = Topology(1, 2, 5), int(ids[row, column])
    if harness.host_reads():
        with pytest.raises(RuntimeError) as caught:
            plan(topology, ids)
        error = typed(caught.value)
        assert isinstance(error, ArgumentError)
        assert str(error) == (
            f"Argument in afd::plan: topk_ids[{row}, {column}] is {bad}, expected -1 (no expert) or 0 to 4"
        )
    else:
        got = plan(topology, ids)
        ids[row, column] = -1
        assert all(map(torch.equal, got, plan(topology, ids)))


@pytest.mark.parametrize("width", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-2, 5, 2**31 - 1, -(2**31)])
def test_an_id_out_of_range_is_named_with_its_value_and_the_range(width: torch.dtype, bad: int) -> None:
    """fault: an id out of range indexes past the tables."""
    ids = torch.zeros(3, 2, dtype=width)
    ids[1, 1] = bad
    assert_outside(ids, 1, 1)


@pytest.mark.parametrize("bad", [2**32, 2**32 + 1, -(2**32), 2**40 - 1])
def test_a_64_bit_id_is_not_cut_to_32_bits(bad: int) -> None:
    """fault: the low half of an out-of-range id is a valid expert, and the token goes there."""
    assert_outside(torch.tensor([[bad]]), 0, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(topk_ids=torch.zeros(3)), "topk_ids has 1 dimensions, expected 2"),
        (dict(topk_ids=torch.zeros(3, 2)), "topk_ids is float32, expected int32 or int64"),
        (dict(topk_ids=torch.zeros(3, 2, dtype=torch.int16)), "topk_ids is int16, expected int32 or int64"),
        (dict(expert_map=torch.zeros(5, dtype=torch.int32)), "expert_map has 1 dimensions, expected 2"),
        (dict(expert_map=torch.zeros(5, 3, dtype=torch.int32)), "expert_map has size 3 in dimension 1, expected 2"),
        (dict(expert_map=torch.zeros(5, 2, dtype=torch.int64)), "expert_map is int64, expected int32"),
        (dict(expert_map=torch.zeros(2, 5, dtype=torch.int32).t()), "expert_map is not contiguous"),
        (dict(expert_map=torch.tensor([[0, 0], [2, 1]]).int()), "expert_map[1] is (2, 1), expected below (2, 3)"),
        (dict(expert_map=torch.tensor([[0, 3]]).int()), "expert_map[0] is (0, 3), expected below (2, 3)"),
        (dict(expert_map=torch.tensor([[0, -1]]).int()), "expert_map[0] is (0, -1), expected below (2, 3)"),
        (dict(ffn_size=0), "ffn_size is 0, expected at least 1"),
        (dict(local_experts=0), "expert_map[0] is (0, 0), expected below (2, 0)"),
    ],
)
def test_a_bad_argument_is_named_with_both_values(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(
        topk_ids=torch.zeros(3, 2, dtype=torch.int64),
        expert_map=torch.zeros(5, 2, dtype=torch.int32),
        ffn_size=2,
        local_experts=3,
    )
    if message.startswith("expert_map[") and not harness.host_reads():
        pytest.skip("the kernel skips what lies outside, and has nobody to tell")
    args = [a.to(harness.DEVICE) if isinstance(a, Tensor) else a for a in {**arguments, **change}.values()]
    with pytest.raises(RuntimeError, match=re.escape("Argument in afd::plan: " + message)):
        torch.ops.afd.plan(*args)
