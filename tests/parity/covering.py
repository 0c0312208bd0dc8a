"""A covering set of layouts: every two values of two factors that go together are together in some row.

Greedy over a seeded draw of legal rows: the next row is the one with the most pairs that no row has yet, of equals the
cheapest; once all pairs are covered, the one with the most new triples of `TRIPLES` for its cost, up to the size
wanted. The same table gives the same rows.
"""

import functools
import itertools
import math
import operator
import random
from collections.abc import Callable, Iterator, Mapping

from tests.parity.factors import AXES, COMPANY, FACTORS, MAX_WORLD, Row, refusal, settings_of, world_of

SEED = 20
DRAWN = 1500
"""Legal rows to choose from."""
TRIES = 150
"""Draws around one pair before it counts as not legal."""
TRIPLES = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "dp", "strategy", "recompute", "family")

Pair = tuple[tuple[str, str], tuple[str, str]]

PAIRS: tuple[Pair, ...] = tuple(
    ((first, a), (second, b))
    for first, second in itertools.combinations(FACTORS, 2)
    for a in FACTORS[first]
    for b in FACTORS[second]
)
"""All pairs of values of two factors, legal or not."""


def _grids() -> list[dict[str, str]]:
    """Every choice of the axes' sizes that fits into the world."""
    choices = itertools.product(*(FACTORS[axis] for axis in AXES))
    return [
        dict(zip(AXES, sizes, strict=True))
        for sizes in choices
        if math.prod(int(size) for size in sizes) <= MAX_WORLD
    ]


GRIDS = _grids()


def draw(generator: random.Random, fixed: Mapping[str, str]) -> Row | None:
    """A legal row with the fixed values, or None if this draw gave none.

    Each factor is plain in half of the draws, else any of its values: so all rows can come, and most are legal. Where a
    value needs company, it gets it, or gives way if the company is fixed otherwise.
    """
    row = {}
    for factor, values in FACTORS.items():
        names = list(values)
        plain = factor != "family" and generator.random() < 0.5
        row[factor] = fixed.get(factor, names[0] if plain else generator.choice(names))
    grids = [grid for grid in GRIDS if all(grid.get(axis, value) == value for axis, value in fixed.items())]
    for factor in reversed(
        FACTORS
    ):  # of two that need one another, the one that needs comes later in the table
        needed, among = COMPANY.get((factor, row[factor]), ("", ()))
        if needed in AXES:
            fitting = [grid for grid in grids if grid[needed] in among]
            possible, grids = bool(fitting), fitting or grids
        elif needed and row[needed] not in among:
            possible = needed not in fixed
            row[needed] = generator.choice(among) if possible else row[needed]
        else:
            continue
        if not possible and factor not in fixed:
            row[factor] = next(iter(FACTORS[factor]))
    if not grids:
        return None
    row.update(generator.choice(grids))
    return row if refusal(settings_of(row)) is None else None


def reachable(pair: Pair, seed: int) -> Row | None:
    """A legal row with this pair, if `TRIES` draws find one."""
    generator = random.Random(f"{seed} {pair}")
    return next((row for _ in range(TRIES) if (row := draw(generator, dict(pair)))), None)


def pairs_of(row: Row) -> Iterator[Pair]:
    """The pairs that a row covers."""
    return itertools.combinations(row.items(), 2)  # type: ignore[return-value]


def _mask(found: Iterator[tuple[tuple[str, str], ...]], numbers: dict[object, int]) -> int:
    """The set as bits of one number; `numbers` counts what has been seen."""
    mask = 0
    for item in found:
        mask |= 1 << numbers.setdefault(item, len(numbers))
    return mask


@functools.cache
def covering_rows(at_least: int) -> tuple[Row, ...]:
    """The rows; at least so many."""
    generator = random.Random(SEED)
    pool = []
    while len(pool) < DRAWN:
        row = draw(generator, {})
        if row is not None and row not in pool[-50:]:
            pool.append(row)
    seen = {pair for row in pool for pair in pairs_of(row)}
    pool += [row for pair in PAIRS if pair not in seen and (row := reachable(pair, SEED))]
    numbers: dict[object, int] = {}
    pairs = [_mask(pairs_of(row), numbers) for row in pool]
    numbers = {}
    triples = [
        _mask(itertools.combinations([(name, row[name]) for name in TRIPLES], 3), numbers) for row in pool
    ]
    costs = [cost(row) for row in pool]
    chosen: list[int] = []

    def choose(masks: list[int], worth: Callable[[int, int], float], enough: int | None) -> None:
        """Take the rows of most worth until none has anything new, or there are enough."""
        covered = functools.reduce(operator.or_, (masks[index] for index in chosen), 0)
        while enough is None or len(chosen) < enough:
            new = [(mask & ~covered).bit_count() for mask in masks]
            best = max(range(len(pool)), key=lambda index: worth(new[index], costs[index]))
            if not new[best]:
                return
            chosen.append(best)
            covered |= masks[best]

    choose(pairs, lambda new, price: new - price / 10_000, None)
    choose(triples, lambda new, price: new / price, at_least)
    return tuple(pool[index] for index in chosen)


def cost(row: Row) -> int:
    """About how long the row takes: microbatches and layers of each rank, and more messages the more ranks there are."""
    return world_of(settings_of(row)) * int(row["layers"]) * int(row["batch"]) // int(row["micro"])
