"""The layer cut where layers differ in cost, as where some have experts."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

TRIED_CUTS = 5_000
"""With no more cuts than this all of them are tried (about 0.1 s)."""


def cut_unequal(
    costs: Sequence[Fraction], extra: Sequence[Fraction], placement: Sequence[int], least: Sequence[int]
) -> tuple[int, ...]:
    """Layers per stage, in order, for `costs` of each layer and `extra` of each stage.

    Stage s is on rank `placement[s]` and has at least `least[s]` layers. Minimised as `partition_layers` says. With
    one stage a rank the answer is the cut with the smallest largest stage and, of those, the smallest sum of squares.
    With more, a small problem is solved by trying all cuts; a large one starts from that same cut and moves layers one
    by one from any stage to another, those in between handing one on each, as long as that makes it better.
    """
    # Whole numbers of a common unit: exact, and much faster than fractions.
    unit = math.lcm(*(value.denominator for value in (*costs, *extra)))
    layers, extras = [int(cost * unit) for cost in costs], [int(cost * unit) for cost in extra]
    sums = [0, *accumulate(layers)]
    stages = len(extras)
    if stages == len(set(placement)):
        return _even_cut(sums, extras, least)
    spare = len(layers) - sum(least)
    if math.comb(spare + stages - 1, stages - 1) <= TRIED_CUTS:
        every = (_cut_at(bars, spare, least) for bars in combinations(range(spare + stages - 1), stages - 1))
        return min(every, key=lambda cut: _score(cut, sums, extras, placement))
    return _improved(_even_cut(sums, extras, least), sums, extras, placement, least)


def _cut_at(bars: tuple[int, ...], spare: int, least: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage where `bars` stand between the spare ones of neighbouring stages."""
    ends = (-1, *bars, spare + len(bars))
    return tuple(low + b - a - 1 for low, (a, b) in zip(least, pairwise(ends), strict=True))


def _even_cut(sums: list[int], extra: list[int], least: Sequence[int]) -> tuple[int, ...]:
    """By dynamic programming from the last stage: (largest, counts) first, then squares under that bound."""
    bound = _smallest_bound(sums, extra, least)
    last = len(sums) - 1
    # best[i]: (sum of squares, counts with the earliest largest first) of the stages after, from layer i on.
    best: dict[int, tuple[int, tuple[int, ...]]] = {last: (0, ())}
    for stage in reversed(range(len(extra))):
        before: dict[int, tuple[int, tuple[int, ...]]] = {}
        for end, (squares, counts) in best.items():
            for start in range(end - least[stage], -1, -1):
                cost = sums[end] - sums[start] + extra[stage]
                if cost > bound:
                    break
                found = (
                    squares + cost * cost,
                    (start - end, *counts),
                )  # negative: more layers early sort first
                if start not in before or found < before[start]:
                    before[start] = found
        best = before
    return tuple(-count for count in best[0][1])


def _smallest_bound(sums: list[int], extra: list[int], least: Sequence[int]) -> int:
    """The smallest cost of the largest stage."""
    largest = {len(sums) - 1: 0}
    for stage in reversed(range(len(extra))):
        before: dict[int, int] = {}
        for end, so_far in largest.items():
            for start in range(end - least[stage], -1, -1):
                cost = max(so_far, sums[end] - sums[start] + extra[stage])
                if start not in before or cost < before[start]:
                    before[start] = cost
        largest = before
    return largest[0]


Score = tuple[int, int, int, tuple[int, ...]]


def _score(cut: tuple[int, ...], sums: list[int], extra: list[int], placement: Sequence[int]) -> Score:
    ends = list(accumulate(cut))
    stages = [sums[end] - sums[end - count] + more for end, count, more in zip(ends, cut, extra, strict=True)]
    ranks = [0] * (max(placement) + 1)
    for rank, cost in zip(placement, stages, strict=True):
        ranks[rank] += cost
    squares = sum(cost * cost for cost in stages)
    return max(ranks), max(stages), squares, tuple(-count for count in cut)


def _improved(
    cut: tuple[int, ...], sums: list[int], extra: list[int], placement: Sequence[int], least: Sequence[int]
) -> tuple[int, ...]:
    """Move layers between two stages at a time, the best such move first, until none helps."""
    best = _score(cut, sums, extra, placement)
    while True:
        moves = []
        for giver in range(len(cut)):
            if cut[giver] > least[giver]:
                for taker in range(len(cut)):
                    if taker != giver:
                        moved = list(cut)
                        moved[giver] -= 1
                        moved[taker] += 1
                        moves.append(tuple(moved))
        scored = min((_score(move, sums, extra, placement), move) for move in moves) if moves else (best, cut)
        if scored[0] >= best:
            return cut
        best, cut = scored
