"""Ubatches: where a batch of requests is cut. The oracle tries every boundary and follows the rule as it is written."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd_ops import attention_costs, choose_ubatches, split_requests, split_step

LENGTHS = st.lists(
    st.one_of(st.integers(0, 3), st.integers(0, 70), st.sampled_from([16, 32, 48, 256, 8192])), max_size=12
)
PARTS = st.integers(1, 5)
ALIGNMENT = st.sampled_from([1, 2, 3, 16, 64])


@st.composite
def batches_with_costs(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(LENGTHS)
    return lengths, draw(st.lists(st.integers(0, 1000), min_size=len(lengths), max_size=len(lengths)))


def by_every_boundary(
    lengths: list[int], parts: int, alignment: int, costs: list[int], start: int = 0
) -> list[slice] | None:
    """The rule of `split_requests`, over all boundaries, in fractions. start: of this batch in a larger one."""
    live = [(length, cost) for length, cost in zip(lengths, costs, strict=True) if length]
    tokens, cost = sum(length for length, _ in live), Fraction(sum(cost for _, cost in live))
    if len(live) < parts:
        return None
    if parts == 1:
        return [slice(start, start + tokens)]
    options: list[tuple[Fraction, int, int, int]] = []  # distance + padding, padding, tokens and requests before
    for requests in range(1, len(live)):
        if len(live) - requests >= parts - 1:
            before = sum(length for length, _ in live[:requests])
            padding = -(-before // alignment) * alignment - before
            distance = abs(sum(c for _, c in live[:requests]) - cost / parts)
            options.append((distance + padding * cost / tokens, padding, before, requests))
    _, _, before, requests = min(options)
    rest = by_every_boundary(
        [length for length, _ in live[requests:]], parts - 1, alignment, [c for _, c in live[requests:]], start + before
    )
    assert rest is not None
    return [slice(start, start + before), *rest]


@given(LENGTHS, PARTS, ALIGNMENT)
def test_the_boundaries_are_those_of_the_rule(lengths: list[int], parts: int, alignment: int) -> None:
    assert split_requests(lengths, parts, alignment=alignment) == by_every_boundary(lengths, parts, alignment, lengths)


@given(batches_with_costs(), PARTS, ALIGNMENT)
def test_the_boundaries_are_those_of_the_rule_in_cost(
    batch: tuple[list[int], list[int]], parts: int, alignment: int
) -> None:
    lengths, costs = batch
    exact: Any = [Fraction(cost) for cost in costs]  # floats would round, and decide ties by that
    assert split_requests(lengths, parts, alignment=alignment, costs=exact) == by_every_boundary(
        lengths, parts, alignment, costs
    )


@given(LENGTHS, PARTS, ALIGNMENT)
def test_ubatches_are_whole_requests_in_order_and_none_is_empty(lengths: list[int], parts: int, alignment: int) -> None:
    """fault: half of the padded batch lies behind the last request, and the second ubatch is padding alone."""
    ubatches = split_requests(lengths, parts, alignment=alignment)
    if ubatches is None:
        return
    ends = {sum(lengths[:count]) for count in range(len(lengths) + 1)}
    assert len(ubatches) == parts
    assert [u.start for u in ubatches] + [sum(lengths)] == [0] + [u.stop for u in ubatches]
    assert all(u.start < u.stop and u.stop in ends and u.step is None for u in ubatches)


@given(LENGTHS, PARTS)
def test_none_means_fewer_requests_than_ubatches(lengths: list[int], parts: int) -> None:
    assert (split_requests(lengths, parts) is None) == (sum(length > 0 for length in lengths) < parts)


@given(LENGTHS, ALIGNMENT)
def test_two_halves_differ_by_no_more_than_the_longest_request_and_twice_the_padding(
    lengths: list[int], alignment: int
) -> None:
    ubatches = split_requests(lengths, alignment=alignment)
    if ubatches is not None:
        first, second = (u.stop - u.start for u in ubatches)
        assert abs(first - second) <= max(lengths) + 2 * (alignment - 1)


@given(st.integers(2, 2000), ALIGNMENT)
def test_a_batch_of_decodes_is_cut_at_a_multiple(tokens: int, alignment: int) -> None:
    """Every token is a request of its own, so the nearest multiple that leaves something on either side is there."""
    ubatches = split_requests([1] * tokens, alignment=alignment)
    assert ubatches is not None
    if tokens >= 2 * alignment:
        assert ubatches[0].stop % alignment == 0 and abs(2 * ubatches[0].stop - tokens) <= alignment


@given(batches_with_costs(), PARTS, ALIGNMENT, st.sampled_from([0.125, 1, 3, 1024]))
def test_requests_without_tokens_and_the_unit_of_cost_change_nothing(
    batch: tuple[list[int], list[int]], parts: int, alignment: int, unit: float
) -> None:
    lengths, _ = batch
    plain = split_requests(lengths, parts, alignment=alignment)
    assert split_requests([x for length in lengths for x in (0, length, 0)], parts, alignment=alignment) == plain
    assert split_requests(lengths, parts, alignment=alignment, costs=[unit * n for n in lengths]) == plain


@pytest.mark.parametrize(
    ("lengths", "parts", "alignment", "ends"),
    [
        ([10, 10], 2, 16, [10, 20]),  # the only boundary is taken, multiple or not
        ([32, 9, 39], 2, 16, [32, 80]),  # half is 40: 32 is 8 away, 41 is 1 away and needs 7 of padding: the multiple
        ([32, 10, 42], 2, 16, [42, 84]),  # a boundary at half that needs 6 of padding beats a multiple 10 away
        ([32, 6, 38], 2, 16, [32, 76]),  # half, 38, would need 10; a multiple 6 away beats it
        ([32, 64, 32], 2, 16, [32, 128]),  # 32 and 96 are equally far: the earlier
        ([100, 1, 1], 3, 1, [100, 101, 102]),  # a boundary is left for each ubatch that follows
        ([1, 1, 100], 3, 1, [1, 2, 102]),
        ([16] * 9, 3, 16, [48, 96, 144]),
        ([20] * 6, 3, 16, [40, 80, 120]),
        ([5], 1, 16, [5]),
    ],
)
def test_examples_of_the_rule(lengths: list[int], parts: int, alignment: int, ends: list[int]) -> None:
    ubatches = split_requests(lengths, parts, alignment=alignment)
    assert ubatches is not None and [u.stop for u in ubatches] == ends


def test_decodes_over_long_contexts_weigh_more_than_their_tokens() -> None:
    """Tokens alone would put the four long decodes, and with them nearly all reading of contexts, into one ubatch."""
    lengths, contexts = [1, 1, 1, 1, 64], [8000, 8000, 8000, 8000, 32]
    costs = attention_costs(lengths, contexts, per_token=1.0, per_context=0.01)
    assert costs == pytest.approx([81, 81, 81, 81, 84.48])
    assert split_requests(lengths, alignment=1) == [slice(0, 4), slice(4, 68)]
    assert split_requests(lengths, alignment=1, costs=costs) == [slice(0, 3), slice(3, 68)]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 10**6)), max_size=8), st.integers(0, 9))
def test_a_cost_is_tokens_times_a_plus_b_times_context(requests: list[tuple[int, int]], a: int) -> None:
    costs = attention_costs([n for n, _ in requests], [c for _, c in requests], per_token=a, per_context=2)
    assert costs == [n * (a + 2 * c) for n, c in requests]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lengths=[1, 2], parts=0), "parts is 0, expected 1 or more"),
        (dict(lengths=[1, 2], alignment=0), "alignment is 0, expected 1 or more"),
        (dict(lengths=[1, -2]), r"lengths\[1\] is -2, expected 0 or more, and finite"),
        (dict(lengths=[1, 2], costs=[1.0]), "costs has 1 entries, but lengths has 2; one per request"),
        (dict(lengths=[1, 2], costs=[1.0, float("nan")]), r"costs\[1\] is nan, expected 0 or more, and finite"),
    ],
)
def test_a_bad_argument_is_named_with_both_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_requests(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(contexts=[1], per_token=1, per_context=1), "contexts has 1 entries, but lengths has 2; one per request"),
        (dict(contexts=[1, -1], per_token=1, per_context=1), r"contexts\[1\] is -1, expected 0 or more, and finite"),
        (dict(contexts=[1, 1], per_token=1, per_context=-1), "per_context is -1, expected 0 or more, and finite"),
    ],
)
def test_a_bad_cost_is_named_with_both_values(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_costs([1, 2], **arguments)


# When splitting pays.


def pipeline(attention: float, round_trip: float, layers: int, ubatches: int) -> float:
    """The schedule, event by event: one attention rank that takes the ubatches in turn, one FFN rank that takes what
    has arrived first."""
    clock = busy = 0.0
    answered = [0.0] * ubatches
    for _ in range(layers):
        for ubatch in range(ubatches):
            clock = max(clock, answered[ubatch]) + attention
            busy = max(busy, clock) + round_trip
            answered[ubatch] = busy
    return max(clock, *answered)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 60), st.integers(2, 4))
def test_a_split_step_is_a_pipeline_of_two(attention: int, round_trip: int, layers: int, ubatches: int) -> None:
    pieces = ubatches * layers
    estimate = split_step(attention * pieces, round_trip * pieces, pieces)
    assert estimate == pytest.approx(pipeline(attention, round_trip, layers, ubatches))


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 1000), st.integers(1, 60))
def test_no_split_is_chosen_that_is_expected_to_gain_less_than_5_percent(
    attention: int, round_trip: int, half_attention: int, half_round_trip: int, layers: int
) -> None:
    step = layers * (attention + round_trip)
    splits = {2: (2 * layers * half_attention, 2 * layers * half_round_trip)}
    split = pipeline(half_attention, half_round_trip, layers, 2)
    if split != pytest.approx(0.95 * step):
        assert choose_ubatches(step, splits, layers) == (2 if split < 0.95 * step else 1)


def test_examples_of_the_choice() -> None:
    layers = 10
    assert choose_ubatches(200, {2: (100, 100), 3: (110, 110)}, layers) == 2
    assert choose_ubatches(200, {2: (130, 130), 3: (120, 120)}, layers) == 3
    assert choose_ubatches(200, {2: (200, 100)}, layers) == 1, "halves of attention take as long as the whole"
    assert choose_ubatches(200, {2: (100, 200)}, layers) == 1, "the experts' weights are read twice"
    assert choose_ubatches(200, {}, layers) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(layers=0), "layers is 0, expected 1 or more"),
        (dict(step=float("nan")), "step is nan, expected 0 or more, and finite"),
        (dict(splits={1: (1.0, 1.0)}), "splits has 1 ubatches, expected 2 or more"),
        (dict(splits={2: (1.0, -1.0)}), r"splits\[2\]\[1\] is -1.0, expected 0 or more, and finite"),
    ],
)
def test_a_bad_time_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_ubatches(**{"step": 1.0, "splits": {}, "layers": 1, **arguments})
