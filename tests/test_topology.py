"""Who is who: pure arithmetic, no transport."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd_ops import Topology, expected_rows

topologies = st.builds(Topology, st.integers(1, 9), st.integers(1, 9), st.integers(1, 40))


@pytest.mark.parametrize(
    ("ffn", "num_experts", "owned"),
    [
        (1, 3, [[0, 1, 2]]),
        (2, 4, [[0, 1], [2, 3]]),
        (2, 5, [[0, 1, 2], [3, 4]]),  # uneven: the last block is short
        (3, 4, [[0, 1], [2, 3], []]),  # blocks of two are gone before the last rank
        (4, 2, [[0], [1], [], []]),  # fewer experts than ranks
    ],
)
def test_experts_lie_in_contiguous_blocks_by_default(ffn: int, num_experts: int, owned: list[list[int]]) -> None:
    topology = Topology(2, ffn, num_experts)
    assert [topology.experts_of(rank) for rank in range(ffn)] == owned
    assert topology.local_experts == max(map(len, owned))


@settings(deadline=None)
@given(topologies)
def test_every_expert_has_exactly_one_owner(topology: Topology) -> None:
    owned = [topology.experts_of(rank) for rank in range(topology.ffn_size)]
    assert sorted(expert for experts in owned for expert in experts) == list(range(topology.num_experts))
    for rank, experts in enumerate(owned):
        assert [topology.expert_map[expert] for expert in experts] == [(rank, local) for local in range(len(experts))]


@settings(deadline=None)
@given(topologies)
def test_world_ranks_are_attention_first_and_round_trip(topology: Topology) -> None:
    ranks = range(topology.world_size)
    assert [topology.role(rank) for rank in ranks] == ["attention"] * topology.attention_size + [
        "ffn"
    ] * topology.ffn_size
    for rank in ranks:
        assert topology.world_rank(topology.role(rank), topology.role_rank(rank)) == rank
        assert {topology.role(peer) for peer in topology.peers(rank)} == {"attention", "ffn"} - {topology.role(rank)}
        assert [topology.role_rank(peer) for peer in topology.peers(rank)] == list(range(len(topology.peers(rank))))
        assert rank in topology.peers(topology.peers(rank)[0])


def test_a_rank_says_who_it_is() -> None:
    topology = Topology(2, 3, 4)
    assert [topology.describe(rank) for rank in (1, 2)] == ["rank 1 (attention 1)", "rank 2 (ffn 0)"]


@settings(deadline=None)
@given(topologies, st.randoms(use_true_random=False))
def test_any_complete_expert_map_is_accepted(topology: Topology, random: Any) -> None:
    shuffled = list(topology.expert_map)
    random.shuffle(shuffled)
    custom = Topology(topology.attention_size, topology.ffn_size, topology.num_experts, tuple(shuffled))
    for rank in range(custom.ffn_size):
        experts = custom.experts_of(rank)
        assert [custom.expert_map[expert] for expert in experts] == [(rank, local) for local in range(len(experts))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), "attention_size is 0, expected at least 1"),
        ((1, -2, 1), "ffn_size is -2, expected at least 1"),
        ((1, 1, 0), "num_experts is 0, expected at least 1"),
        ((1, 2, 2, ((0, 0),)), "expert_map has 1 entries, expected num_experts = 2"),
        ((1, 2, 2, ((0, 0), (2, 0))), "expert_map[1] names ffn rank 2, but ffn_size is 2"),
        ((1, 2, 2, ((-1, 0), (1, 0))), "expert_map[0] names ffn rank -1, but ffn_size is 2"),
        ((1, 2, 2, ((0, 0), (1, -1))), "expert_map[1] names local expert -1, expected at least 0"),
        ((1, 2, 2, ((0, 0), (0, 0))), "expert_map gives ffn rank 0 the local experts [0, 0], expected 0 .. n-1"),
        ((1, 2, 2, ((0, 0), (1, 1))), "expert_map gives ffn rank 1 the local experts [1], expected 0 .. n-1"),
    ],
)
def test_a_bad_field_is_named_with_its_value(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Topology(*arguments)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.role(4), "world rank is 4, expected 0 to 3"),
        (lambda t: t.role_rank(-1), "world rank is -1, expected 0 to 3"),
        (lambda t: t.world_rank("attention", 3), "attention rank is 3, expected 0 to 2"),
        (lambda t: t.world_rank("ffn", -1), "ffn rank is -1, expected 0 to 0"),
        (lambda t: t.experts_of(3), "ffn rank is 3, expected 0 to 0"),  # a world rank
        (lambda t: expected_rows(t, 1, topk=1, tokens=[1], share=0.5), "ffn rank is 1, expected 0 to 0"),
    ],
)
def test_a_rank_outside_its_group_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Topology(3, 1, 2))


def test_a_topology_is_a_value() -> None:
    """Two launches compare and ship it: equal by content, hashable, frozen."""
    topology = Topology(1, 2, 4)
    assert topology == Topology(1, 2, 4, ((0, 0), (0, 1), (1, 0), (1, 1)))
    assert hash(topology) == hash(pickle.loads(pickle.dumps(topology)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology.ffn_size = 3  # type: ignore[misc]
