"""A covering set of layouts: every two values of two factors that go together are together in some row.

Greedy over a seeded draw of legal rows: the next row is the one with the most pairs that no row has yet for its price
(pairs matter more); once all pairs are covered, the one with the most new triples of `TRIPLES` for its price, up to the
size wanted. Then every row is left out or made as small as it can be with no pair lost. The same table gives the same rows.

The choice takes minutes, so the rows stand in layouts.txt; `python -m tests.parity.covering` writes them again after
a factor or a rule of the config has changed. Tests see that they are legal and cover what they must."""

import functools
import itertools
import math
import operator
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.parity.factors import AXES, COMPANY, FACTORS, MAX_WORLD, Row, refusal, settings_of, world_of

FILE = Path(__file__).with_name("layouts.txt")
AT_LEAST = 250

SEED = 20
DRAWN = 1500  # Legal rows to choose from
TRIES = 50  # Draws around one pair before it counts as not legal
SIZES = ("layers", "micro", "batch")  # what makes a row large and is in no triple of `TRIPLES`
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
        dict(zip(AXES, sizes, strict=True)) for sizes in choices if math.prod(int(size) for size in sizes) <= MAX_WORLD
    ]


GRIDS = _grids()


def draw(generator: random.Random, fixed: Mapping[str, str]) -> Row | None:
    """A legal row with the fixed values, or None if this draw gave none. Each factor is plain in half of the draws,
    else any of its values: so all rows can come, and most are legal. Where a value needs company, it gets it, or gives
    way if the company is fixed otherwise."""
    row = {}
    for factor, values in FACTORS.items():
        names = list(values)
        plain = factor != "family" and generator.random() < 0.5
        row[factor] = fixed.get(factor, names[0] if plain else generator.choice(names))
    grids = [grid for grid in GRIDS if all(grid.get(axis, value) == value for axis, value in fixed.items())]
    for factor in reversed(FACTORS):  # of two that need one another, the one that needs comes later in the table
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
    return itertools.combinations(row.items(), 2)


def _mask(found: Iterator[tuple[tuple[str, str], ...]], numbers: dict[object, int]) -> int:
    """The set as bits of one number; `numbers` counts what has been seen."""
    mask = 0
    for item in found:
        mask |= 1 << numbers.setdefault(item, len(numbers))
    return mask


def _pool(drawn: int) -> list[Row]:
    """Rows to choose from; each pair that can be is in one of them."""
    generator = random.Random(SEED)
    pool: list[Row] = []
    while len(pool) < drawn:
        row = draw(generator, {})
        if row is not None and row not in pool[-50:]:
            pool.append(row)
    seen = {pair for row in pool for pair in pairs_of(row)}
    return pool + [row for pair in PAIRS if pair not in seen and (row := reachable(pair, SEED))]


def name_of(row: Row) -> str:
    """Family first, then whatever is not plain."""
    plain = {factor: next(iter(values)) for factor, values in FACTORS.items()}
    return " ".join([row["family"], *(f"{k}={v}" for k, v in row.items() if k != "family" and v != plain[k])])


def rows_on_file() -> list[Row]:
    """The rows of layouts.txt."""
    plain = {factor: next(iter(values)) for factor, values in FACTORS.items()}
    named = ((line.split()[0], line.split()[1:]) for line in FILE.read_text().splitlines())
    return [{**plain, "family": family, **dict(word.split("=") for word in words)} for family, words in named]


def covering_rows(at_least: int, drawn: int = DRAWN) -> tuple[Row, ...]:
    """The rows; at least so many, chosen from `drawn`."""
    pool = _pool(drawn)
    numbers: dict[object, int] = {}
    pairs = [_mask(pairs_of(row), numbers) for row in pool]
    numbers = {}
    triples = [_mask(itertools.combinations([(name, row[name]) for name in TRIPLES], 3), numbers) for row in pool]
    prices = [price(row) for row in pool]
    chosen: list[int] = []

    def choose(masks: list[int], worth: Callable[[int, int], float], enough: int | None) -> None:
        """Take the rows of most worth until none has anything new, or there are enough."""
        covered = functools.reduce(operator.or_, (masks[index] for index in chosen), 0)
        while enough is None or len(chosen) < enough:
            new = [(mask & ~covered).bit_count() for mask in masks]
            best = max(range(len(pool)), key=lambda index: worth(new[index], prices[index]))
            if not new[best]:
                return
            chosen.append(best)
            covered |= masks[best]

    choose(pairs, lambda new, paid: new / paid**0.6, None)
    choose(triples, lambda new, paid: new / paid, at_least)
    return tuple(_made_small([pool[index] for index in chosen], at_least))


def _made_small(rows: list[Row], at_least: int) -> list[Row]:
    """The same pairs for less, the dearest row first: a row is left out where others have all its pairs, or is given cheaper
    axes, sizes or another value of one factor; until nothing more can be had. Where there is a pipeline, a rank keeps the
    two microbatches a stage that fill it."""
    rows = list(rows)
    counts = Counter(pair for row in rows for pair in pairs_of(row))
    sizes = [dict(zip(SIZES, values, strict=True)) for values in itertools.product(*(FACTORS[n] for n in SIZES))]
    single = [{factor: value} for factor, values in FACTORS.items() for value in values]
    changes = [*sizes, *GRIDS, *single, *({**grid, **size} for grid in GRIDS for size in sizes)]
    before = math.inf
    while before > (now := sum(map(price, rows))):
        before = now
        for row in sorted(rows, key=price, reverse=True):
            if len(rows) > at_least and all(counts[pair] > 1 for pair in pairs_of(row)):
                rows.remove(row)
                counts.subtract(pairs_of(row))
                continue
            for other in sorted(({**row, **change} for change in changes), key=price):
                if price(other) >= price(row):
                    break
                given_up = set(pairs_of(row)) - set(pairs_of(other))
                if (
                    _fills(other) >= min(_fills(row), 2)
                    and all(counts[pair] > 1 for pair in given_up)
                    and other not in rows
                    and refusal(settings_of(other)) is None
                ):
                    counts.subtract(pairs_of(row))
                    counts.update(pairs_of(other))
                    rows[rows.index(row)] = other
                    break
    return rows


def _fills(row: Row) -> float:
    """Microbatches of a data-parallel rank for each stage; without a pipeline two are plenty."""
    microbatches = int(row["batch"]) / int(row["micro"]) / int(row["dp"])
    return microbatches / int(row["pp"]) if row["pp"] != "1" else min(microbatches, 2)


def price(row: Row) -> int:
    """About how long the row takes; fitted to measured times, a unit is some 7 ms. Each rank costs something. Layers
    and microbatches cost their computation and, above all, the collectives in them, of which one costs the machine the
    square of the ranks in it. To search for a schedule costs each rank time, too."""
    ranks = world_of(settings_of(row))
    passes = int(row["layers"]) * int(row["batch"]) // int(row["micro"])
    search = 13 if row["schedule"] == "auto" else 0
    return ranks * (8 + search) + passes * (4 + (int(row["tp"]) * int(row["cp"])) ** 2)


if __name__ == "__main__":
    FILE.write_text("".join(f"{name_of(row)}\n" for row in covering_rows(AT_LEAST)))
