"""What a peer writes is checked word by word before it is used. Fuzzers and guard pages are in test_hostile.py."""

from __future__ import annotations

from typing import Any

import harness
import pytest
from flights import AT_ONCE, Flight, ask, poisoned, raises, server_of, within
from torch import Tensor

import afd_ops
from afd_ops import _C, ExpertServer, Topology

pytestmark = [pytest.mark.usefixtures("seed"), pytest.mark.usefixtures("device")]


@pytest.mark.parametrize(
    ("word", "value"),
    [("magic", 1), ("version", 99), ("generation", -1), ("sequence", 2**33 + 1), ("layer", 4), ("num_tokens", 3)],
)
def test_a_reply_with_a_wrong_word_is_a_protocol_error(word: str, value: int) -> None:
    with harness.windows(Topology(1, 2, 2)) as (attention, *ffn):
        flight = ask(attention, layer=3)
        assert [server_of(window).step() for window in ffn] == [1, 1]
        before = harness.poke(attention, 1 * attention.geometry.depth, word, value)  # region 1, ring 0
        text = f"rank 2 (ffn 1) broke the protocol: {word} is {value}, expected {before}"
        with raises(attention, afd_ops.ProtocolError, text) as caught:
            flight.combine()
        assert (caught.value.op, caught.value.peer, caught.value.layer) == ("combine", 1, 3)
        with raises(attention, afd_ops.ProtocolError, text):
            ask(attention)
        assert [poisoned(window) for window in ffn] == [[True], [True]]


@pytest.mark.parametrize(
    ("word", "index", "value", "text"),
    [
        ("magic", 0, 0, f"magic is 0, expected {_C.HEADER_MAGIC}"),
        ("version", 0, 1, f"version is 1, expected {_C.WIRE_VERSION}"),
        ("generation", 0, 1, "generation is 1, expected 0"),
        ("flags", 0, 1, "flags is 1, expected 0"),
        ("sequence", 0, 1, "ring is 1, expected 0"),  # belongs in ring 1, and lies in ring 0
        ("sequence", 0, -2, "sequence is -2"),
        ("layer", 0, -1, "layer is -1"),
        ("num_tokens", 0, 9, "num_tokens is 9, expected 8"),
        ("num_tokens", 0, -1, "num_tokens is -1"),
        ("routed", 0, 1000, "counts is"),
        ("counts", 0, 1000, "counts is 1000"),
        ("counts", 0, -1, "counts is -1"),
        ("counts", 1, 2**31 - 1, "counts is 2147483647"),
        ("counts", 2, 1, "counts is 1, expected 0"),  # an expert that this rank does not own
        ("position", 0, 2, "position is 2"),  # not owned
        ("position", 0, -2, "position is -2"),
        ("position", 0, 2**31 - 1, "position is 2147483647"),
        ("position", 1, 1000, "position is 0"),  # past the rows of that expert
        ("position", 1, -1, "position is 0"),
    ],
)
def test_a_dispatch_with_a_wrong_word_closes_its_region_only(word: str, index: int, value: int, text: str) -> None:
    """fault: an index from the wire is used before it is checked, and writes or reads outside the item's rows."""
    topology = Topology(2, 2, 5, ((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)))  # ffn 0 owns 2 of at most 3
    with harness.windows(topology, tokens=8) as windows:
        broken, sound, ffn, other = windows
        flights = [ask(window, layer=2) for window in (broken, sound)]
        harness.poke(ffn, 0, word, value, index)
        for server in (server_of(ffn), server_of(other)):
            assert server.step() >= 1
        harness.synchronize()
        (error,) = ffn.errors()
        assert (error["kind"], error["peer"]) == ("Protocol", 0)
        assert f"rank 0 (attention 0) broke the protocol: {text}" in error["message"]
        assert _C.regions(ffn.id) == (_C.POISONED, _C.ALIVE)
        flights[1].assert_answered()
        with within(0.0, AT_ONCE), raises(broken, afd_ops.PeerFailedError, "rank 2 (ffn 0)"):
            flights[0].combine()
        flight = ask(sound)
        assert [server_of(window).step() for window in (ffn, other)] == [1, 1]
        flight.assert_answered()


@pytest.mark.parametrize("choice", [0, 31, 32, 39])
@pytest.mark.parametrize("broken", [0, 1])
def test_every_choice_is_checked_by_whoever_copies_a_piece_of_the_token(choice: int, broken: int) -> None:
    """fault: of a wide row, of more than 32 choices, or of an item's second slot, a wrong position passes."""
    sizes: dict[str, Any] = dict(hidden=4096, topk=40)
    with harness.windows(Topology(2, 1, 3), tokens=8, **sizes) as (*attention, ffn):
        modules = [harness.remote(window) for window in attention]
        steps = [harness.random_step(ffn.topology, 3, **sizes) for _ in attention]
        flights = [
            Flight(window, module, module.dispatch(*step[:3]), step)
            for window, module, step in zip(attention, modules, steps, strict=True)
        ]
        harness.settle(ffn)
        harness.poke(ffn, broken * ffn.geometry.layout["slots_per_region"], "position", 1000, 2 * (1 * 40 + choice))
        assert server_of(ffn).step() == 2
        harness.synchronize()
        (error,) = ffn.errors()
        assert (error["peer"], "position is 1000" in error["message"]) == (broken, True)
        flights[1 - broken].assert_answered()
        with within(0.0, AT_ONCE), raises(attention[broken], afd_ops.PeerFailedError, "(ffn 0)"):
            flights[broken].combine()


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("alone", [True, False])
def test_a_slot_with_wrong_counts_is_no_part_of_an_item(broken: int, alone: bool) -> None:
    """fault: the server is told of the slot before its counts are found wrong, and computes rows that nobody sent."""
    with harness.windows(Topology(2, 1, 4)) as (*attention, ffn):
        flights = [ask(window) for rank, window in enumerate(attention) if rank == broken or not alone]
        harness.poke(ffn, broken * ffn.geometry.layout["slots_per_region"], "counts", 1000)
        items: list[int] = []
        sound = harness.experts_of(ffn.topology, 0)

        def experts(rows: Tensor, scales: Tensor, offsets: Tensor, layer: int) -> Tensor:
            items.append(rows.shape[0])
            assert int(offsets[-1]) == rows.shape[0]
            return sound(rows, scales, offsets, layer)

        assert ExpertServer(ffn, experts).step() == len(flights) - 1
        harness.synchronize()
        assert len(items) == len(flights) - 1
        assert [error["peer"] for error in ffn.errors()] == [broken]
        for flight in flights:
            if flight.window is attention[broken]:
                with raises(flight.window, afd_ops.PeerFailedError, "(ffn 0)"):
                    flight.combine()
            else:
                flight.assert_answered()
