"""Splitting a batch into ubatches between requests, so that each ubatch can travel on a stage of its own, and when that
pays. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

LEAST_GAIN = 0.05  # of an unsplit step, that a split must promise


def split_requests(
    lengths: Sequence[int], parts: int = 2, *, alignment: int = 16, costs: Sequence[float] | None = None
) -> list[slice] | None:
    """Cuts a batch of requests, whose tokens lie one request after the other, into ubatches of about equal size.

    The first ubatch ends at a request boundary near 1 / parts of the batch; what is left is cut into parts - 1 by the
    same rule. The boundary taken is the one with the least sum of

    * its distance from 1 / parts, in tokens, or in cost where `costs` are given, and
    * the padding of the ubatch, in tokens up to the next multiple of `alignment`; in cost, as tokens of average cost.

    So a multiple of `alignment` wins over a nearer boundary where it is farther by no more than the padding that it
    saves, which is always less than `alignment` tokens. Of equal sums the one with less padding wins, then the earlier.

    Every ubatch holds at least one token, so that none consists of padding (id -1) alone; whoever pads the whole batch
    extends the last slice. A request of length 0 changes nothing.

    Args:
        lengths: tokens of each request in this step, 0 or more.
        parts: ubatches wanted, 1 or more.
        alignment: tokens to whose multiples the engine pads an ubatch; 1 = only nearness counts.
        costs: of each request, in any unit; see `attention_costs`. The tokens themselves if left out.

    Returns:
        One slice of tokens per ubatch, in order, together slice(0, sum(lengths)); None if there are fewer than `parts`
        requests with tokens, so that there is no boundary to cut at.

    Raises:
        ValueError: names the argument, its value and what was expected.
    """
    for name, value in (("parts", parts), ("alignment", alignment)):
        if value < 1:
            raise ValueError(f"{name} is {value}, expected 1 or more")
    _require_amounts("lengths", lengths)
    if costs is not None:
        _require_amounts("costs", costs)
        _require_as_many("costs", costs, lengths)
    live = [request for request, length in enumerate(lengths) if length]
    if len(live) < parts:
        return None
    # Ends of the requests, and the cost up to there; a request without tokens has no end of its own.
    ends = [0, *accumulate(lengths[request] for request in live)]
    spent = ends if costs is None else [0, *accumulate(costs[request] for request in live)]
    cuts = [0]
    for left in range(parts, 1, -1):
        cuts.append(_end_of_first(ends, spent, cuts[-1], left, alignment))
    cuts.append(len(ends) - 1)
    return [slice(ends[start], ends[stop]) for start, stop in pairwise(cuts)]


def attention_costs(
    lengths: Sequence[int], contexts: Sequence[float], *, per_token: float, per_context: float
) -> list[float]:
    """What attention costs per request: tokens x (per_token + per_context x context), for `split_requests`.

    A decode over a long context costs far more than its one token; the two coefficients come from timing an attention
    layer at two contexts, and only their ratio matters.

    Args:
        lengths: tokens of each request in this step.
        contexts: how many tokens each of them attends to, on average: all so far for a decode, half of its length for a
            prefill from nothing.
        per_token: cost of a token without its context, in any unit.
        per_context: cost of a token per token of context, in the same unit.

    Raises:
        ValueError: names the argument, its value and what was expected.
    """
    _require_amounts("lengths", lengths)
    _require_amounts("contexts", contexts)
    _require_as_many("contexts", contexts, lengths)
    for name, value in (("per_token", per_token), ("per_context", per_context)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, expected 0 or more, and finite")
    return [length * (per_token + per_context * context) for length, context in zip(lengths, contexts, strict=True)]


def split_step(attention: float, round_trips: float, pieces: int) -> float:
    """About how long a step takes whose ubatches take turns: attention and the FFN ranks as a pipeline of two.

    max(attention, round trips), and of the shorter the one piece that has nothing to hide behind: the first attention,
    or the last round trip. Left out: what dispatch and combine take of the attention rank's own time.

    Args:
        attention: of all ubatches in all layers, one after the other, with nothing sent.
        round_trips: of all ubatches in all layers, one after the other, with nothing computed meanwhile.
        pieces: ubatches x layers, 1 or more.

    Raises:
        ValueError: pieces is less.
    """
    if pieces < 1:
        raise ValueError(f"pieces is {pieces}, expected 1 or more")
    return max(attention, round_trips) + min(attention, round_trips) / pieces


def choose_ubatches(step: float, splits: Mapping[int, tuple[float, float]], layers: int) -> int:
    """How many ubatches a batch of this size is to be cut into, from what can be timed without running it cut.

    The number whose `split_step` is least, if that is at least 5 % below `step`, for what it leaves out; else 1.

    Splitting loses where halves take nearly as long as the whole: attention of few tokens, which reads weights, and FFN
    ranks likewise, since each ubatch reads the experts' weights again.

    Args:
        step: of the batch as one, measured; all times in one unit.
        splits: per number of ubatches (2 or more) `attention` and `round_trips` as for `split_step`.
        layers: round trips of an unsplit step.

    Raises:
        ValueError: names the argument, its value and what was expected.
    """
    if layers < 1:
        raise ValueError(f"layers is {layers}, expected 1 or more")
    if not 0 <= step < math.inf:
        raise ValueError(f"step is {step}, expected 0 or more, and finite")
    best, least = 1, step * (1 - LEAST_GAIN)
    for ubatches, times in sorted(splits.items()):
        if ubatches < 2:
            raise ValueError(f"splits has {ubatches} ubatches, expected 2 or more")
        _require_amounts(f"splits[{ubatches}]", times)
        expected = split_step(*times, ubatches * layers)
        if expected < least:
            best, least = ubatches, expected
    return best


def _end_of_first(ends: Sequence[int], spent: Sequence[float], start: int, parts: int, alignment: int) -> int:
    """The index of the boundary at which the first of `parts` ubatches ends that start at index `start`."""
    last = len(ends) - 1
    total = spent[last] - spent[start]
    average = total / (ends[last] - ends[start])

    def key(end: int) -> tuple[float, int]:
        distance = abs(parts * (spent[end] - spent[start]) - total)  # times parts: in tokens, integers
        padding = (ends[start] - ends[end]) % alignment
        return distance + parts * padding * average, padding

    return min(range(start + 1, last - parts + 2), key=key)  # a boundary is left for each ubatch that follows


def _require_amounts(name: str, amounts: Sequence[float]) -> None:
    for index, amount in enumerate(amounts):
        if not 0 <= amount < math.inf:
            raise ValueError(f"{name}[{index}] is {amount}, expected 0 or more, and finite")


def _require_as_many(name: str, amounts: Sequence[float], lengths: Sequence[int]) -> None:
    if len(amounts) != len(lengths):
        raise ValueError(f"{name} has {len(amounts)} entries, but lengths has {len(lengths)}; one per request")
