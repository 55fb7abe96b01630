"""A seeded trace of what an FFN rank of a 256-expert, top-6 model gets: the rows of its items, one after the other.

Nine in ten arrivals are decode steps of 1 to 128 tokens, one in ten a prefill chunk of 256 to 8192 (by the logarithm).
One to four arrivals make an item, up to the rows that a window takes. Experts are not equally popular: weights are
log-normal, so FFN ranks with as many experts get different shares. Plain Python: the same numbers everywhere.
"""

from __future__ import annotations

import math
import random

EXPERTS, TOPK, ATTENTION, CAPACITY = 256, 6, 4, 8192
DECODE = range(1, 129)


def prefill_sizes(count: int = 96) -> list[int]:
    """Sizes from 256 to 8192, evenly by the logarithm."""
    return [round(256 * 32 ** (i / (count - 1))) for i in range(count)]


def shares(ffn_size: int, seed: int) -> list[float]:
    """Of all choices, how many fall to each FFN rank."""
    draw = random.Random(seed)
    weights = [math.exp(draw.gauss(0.0, 0.7)) for _ in range(EXPERTS)]
    each, total = EXPERTS // ffn_size, sum(weights)
    return [sum(weights[rank * each : (rank + 1) * each]) / total for rank in range(ffn_size)]


def item_rows(ffn_size: int, ffn_rank: int, *, items: int, seed: int) -> list[int]:
    """Rows of `items` items of one FFN rank."""
    share, draw = shares(ffn_size, seed)[ffn_rank], random.Random(f"{seed} {ffn_size} {ffn_rank}")
    rows = []
    for _ in range(items):
        total = 0
        for _ in range(draw.randint(1, ATTENTION)):
            decode = draw.random() < 0.9
            tokens = draw.choice(DECODE) if decode else round(256 * 32 ** draw.random())
            choices = tokens * TOPK
            # The binomial distribution, by the normal one that is like it.
            drawn = round(draw.gauss(choices * share, math.sqrt(choices * share * (1 - share))))
            drawn = min(choices, max(0, drawn))
            if total + drawn > CAPACITY * TOPK:
                break
            total += drawn
        rows.append(total)
    return rows
