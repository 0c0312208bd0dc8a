"""A covering set of layouts: each compatible pair of values of two factors is in some row.

Existing rows stay while they are legal. Rows are added for missing pairs, those with most ranks first: from a few
random legal rows with the pair, the one with the most new pairs per price is chosen. Then rows are removed and made
cheaper without losing a pair, and rows with new triples are added up to the wanted number.

The search takes minutes, so layouts.txt stores the rows; `python -m tests.parity.covering` writes them again after
a factor or a rule of the config has changed. Tests check that they are legal and cover all pairs."""

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tests.parity.factors import AXES, COMPANY, FACTORS, MAX_WORLD, MOE, Row, refusal, settings_of

FILE = Path(__file__).with_name("layouts.txt")
AT_LEAST = 202

SEED = 20
DRAWN = 30  # legal rows per choice
ROUNDS = 20  # rounds of removing and changing rows
SIZES = ("layers", "micro", "batch")  # factors that set a row's size
TRIPLES = ("tp", "sp", "cp", "ep", "etp", "pp", "vpp", "dp", "strategy", "recompute", "family")

Part = tuple[tuple[str, str], ...]  # (factor, value) of some factors; a pair has two
Parts = Callable[[Row], Iterator[Part]]

PLAIN: Row = {factor: next(iter(values)) for factor, values in FACTORS.items()}

SEVERAL_CHUNKS = ("grouped", "looped-bfs", "zb-v", "dualpipe-v")
ONE_CHUNK = ("pb", "gpipe", "zb-h1", "zb-h2")


def _stages(values: Mapping[str, str]) -> int:
    """The fewest virtual stages of a pipeline with these values and more than one stage."""
    several = values.get("vpp") == "2" or values.get("schedule") in SEVERAL_CHUNKS
    return int(values.get("pp", "2")) * (2 if several else 1)


def cannot_be(pair: Part) -> bool:
    """Whether no legal layout has the pair, for one of these reasons."""
    values = dict(pair)
    dense = values.get("family", MOE[0]) not in MOE
    fewest = dict.fromkeys(AXES, "1") | ({"cp": "4"} if values.get("cp_comm") == "a2a+p2p" else {})
    whole_messages = values.get("messages") == "whole"
    fewest |= {"tp": "2", "pp": "2"} if whole_messages else {}
    of_experts = {factor for factor in ("ep", "etp", "moe") if values.get(factor) in list(FACTORS[factor])[1:]}
    return (
        math.prod(int(values.get(axis, least)) for axis, least in fewest.items()) > MAX_WORLD
        or pair == (("ep", "4"), ("pp", "4"))  # each stage needs four ranks
        or (values.get("strategy", "").startswith("hybrid") and "4" in (values.get("tp"), values.get("pp")))
        or pair == (("tp", "1"), ("sp", "on"))
        or (whole_messages and ("1" in (values.get("tp"), values.get("pp")) or values.get("sp") == "on"))
        or (whole_messages and values.get("strategy", "").startswith("hybrid"))
        or (values.get("cp_comm", "p2p") != "p2p" and values.get("cp") == "1")
        or pair == (("cp", "2"), ("cp_comm", "a2a+p2p"))
        or (values.get("mask") == "balanced" and values.get("cp") == "1")
        or pair in ((("cp_comm", "a2a"), ("mask", "balanced")), (("mask", "balanced"), ("dropout", "both")))
        or pair == (("pp", "1"), ("vpp", "2"))
        or (values.get("schedule") in SEVERAL_CHUNKS and "1" in (values.get("pp"), values.get("vpp")))
        or (values.get("schedule") in ONE_CHUNK and values.get("vpp") == "2")
        or (values.get("layers") == "2" and _stages(values) > 2)
        or pair in ((("pp", "1"), ("schedule", "pb")), (("pp", "1"), ("recompute", "ahead")))
        or (dense and (bool(of_experts) or values.get("recompute") == "moe"))
        or (values.get("recompute") == "latents" and values.get("family", "deepseek-v3") != "deepseek-v3")
        or pair == (("strategy", "zero2-late-host"), ("optimizer", "schedule-free"))
        or pair == (("strategy", "server"), ("optimizer", "rates"))
        or (values.get("optimizer") == "mup" and values.get("family") in ("gemma2", "gemma3"))
        or (values.get("optimizer") == "clipped" and values.get("family") in ("qwen", "gemma3", "olmo2"))
        # No dense MLP.
        or (values.get("recompute") == "mlp-host-modules" and values.get("family") in ("mixtral", "gpt-oss"))
    )


PAIRS: tuple[Part, ...] = tuple(
    pair
    for first, second in itertools.combinations(FACTORS, 2)
    for pair in itertools.product(
        ((first, value) for value in FACTORS[first]), ((second, value) for value in FACTORS[second])
    )
    if not cannot_be(pair)
)
"""All pairs to cover."""
GRIDS = [
    dict(zip(AXES, sizes, strict=True))
    for sizes in itertools.product(*(FACTORS[axis] for axis in AXES))
    if math.prod(map(int, sizes)) <= MAX_WORLD
]
ALL_SIZES = [dict(zip(SIZES, values, strict=True)) for values in itertools.product(*(FACTORS[name] for name in SIZES))]


def _ranks(row: Row) -> int:
    return math.prod(int(row[axis]) for axis in AXES)


def _grids(generator: random.Random, row: Row, fixed: Mapping[str, str]) -> list[Row]:
    """The grids that a row with the fixed values may have. A value that requires another value gets it, or is replaced
    if that conflicts with a fixed one."""
    grids = [grid for grid in GRIDS if all(grid.get(axis, value) == value for axis, value in fixed.items())]
    for factor in reversed(FACTORS):  # a factor that requires another comes later in the table
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
            row[factor] = PLAIN[factor]
    return grids


def draw(generator: random.Random, fixed: Mapping[str, str]) -> Row | None:
    """A random row with the fixed values, or None if it is not legal. Each factor is plain and sizes are minimal in half of
    the draws, so that all rows are possible and most are legal."""
    row = {}
    for factor, values in FACTORS.items():
        plain = factor != "family" and generator.random() < 0.5
        row[factor] = fixed.get(factor, PLAIN[factor] if plain else generator.choice(list(values)))
    grids = _grids(generator, row, fixed)
    if not grids:
        return None
    row.update(min(generator.choices(grids, k=2), key=_ranks))
    if generator.random() < 0.5:
        row = min(filter(_fills, ({**row, **sizes, **fixed} for sizes in ALL_SIZES)), key=price, default=row)
    return row if _is_legal(row) else None


def pairs_of(row: Row) -> Iterator[Part]:
    return itertools.combinations(row.items(), 2)


def _triples_of(row: Row) -> Iterator[Part]:
    return itertools.combinations([(name, row[name]) for name in TRIPLES], 3)


def name_of(row: Row) -> str:
    """A row's name: its family, then all values that are not plain."""
    return " ".join([row["family"], *(f"{k}={v}" for k, v in row.items() if k != "family" and v != PLAIN[k])])


def rows_on_file() -> list[Row]:
    """The rows of layouts.txt."""
    named = ((line.split()[0], line.split()[1:]) for line in FILE.read_text().splitlines())
    return [{**PLAIN, "family": family, **dict(word.split("=") for word in words)} for family, words in named]


def covering_rows(at_least: int) -> list[Row]:
    generator, seen = random.Random(SEED), set[Part]()

    def chosen(fixed: Mapping[str, str], parts: Parts) -> Row:
        legal = filter(None, (draw(generator, fixed) for _ in range(100 * DRAWN)))
        some = itertools.islice(legal, DRAWN)
        best = max(some, key=lambda row: len(set(parts(row)) - seen) / price(row) ** 2)
        seen.update(parts(best))
        return best

    def ranks(pair: Part) -> int:
        fixed = dict(pair)
        return min(map(_ranks, _grids(generator, PLAIN | fixed, fixed)))

    table = Table(row for row in rows_on_file() if _is_row(row) and _is_legal(row))
    seen = set(+table.counts)
    for pair in sorted(PAIRS, key=ranks, reverse=True):
        if pair not in seen:
            table.add(chosen(dict(pair), pairs_of))
    for _ in range(ROUNDS):
        for row in sorted(table.rows, key=lambda row: table.alone(row) / price(row) ** 0.5):
            table.leave_out(row)
        table.wander(generator)
    seen = {triple for row in table.rows for triple in _triples_of(row)}
    return table.rows + [chosen({}, _triples_of) for _ in range(at_least - len(table.rows))]


class Table:
    """Rows, with the number of rows per pair."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows: list[Row] = []
        self.counts = Counter[Part]()
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.counts.update(pairs_of(row))

    def replace(self, row: Row, other: Row) -> None:
        self.counts.subtract(pairs_of(row))
        self.counts.update(pairs_of(other))
        self.rows[self.rows.index(row)] = other

    def alone(self, row: Row) -> int:
        """The number of pairs that only this row has."""
        return sum(self.counts[pair] == 1 for pair in pairs_of(row))

    def may_replace(self, row: Row, other: Row) -> bool:
        given_up = (pair for pair in pairs_of(row) if any(other[factor] != value for factor, value in pair))
        return all(self.counts[pair] != 1 for pair in given_up) and other not in self.rows and _is_legal(other)

    def leave_out(self, row: Row) -> None:
        """Replace a row if other rows can take over its unique pairs for less than its price."""
        if row not in self.rows:  # changed in this round
            return
        before, left = (list(self.rows), self.counts.copy()), price(row)
        self.rows.remove(row)
        self.counts.subtract(pairs_of(row))
        for pair in pairs_of(row):
            if self.counts[pair]:
                continue
            changes = [(other, other | dict(pair)) for other in self.rows]
            changes.sort(key=lambda change: price(change[1]) - price(change[0]))
            old, new = next((change for change in changes if self.may_replace(*change)), (row, row))
            left -= price(new) - price(old)
            if old is row or left <= 0:
                self.rows, self.counts = before
                return
            self.replace(old, new)

    def wander(self, generator: random.Random) -> None:
        """Change values at random if no pair is lost and the price hardly grows: then other rows may become redundant."""
        singles = [(factor, value) for factor, values in FACTORS.items() for value in values]
        for _ in range(30 * len(self.rows)):
            row = generator.choice(self.rows)
            other = row | dict(generator.sample(singles, generator.randint(1, 2)))
            if price(other) <= price(row) + generator.choice((0, 0, 2)) and self.may_replace(row, other):
                self.replace(row, other)


def _is_row(row: Row) -> bool:
    """Whether the row's factors and values are still in the table."""
    return row.keys() == FACTORS.keys() and all(row[factor] in values for factor, values in FACTORS.items())


def _is_legal(row: Row) -> bool:
    return _legal(tuple(row.items()))


@functools.cache
def _legal(items: Part) -> bool:
    row = dict(items)
    return _fills(row) and not any(map(cannot_be, pairs_of(row))) and refusal(settings_of(row)) is None


def _fills(row: Row) -> bool:
    """Whether each stage has a layer, and each data-parallel rank two microbatches if the batch allows it. A pipeline
    needs one microbatch per stage, or two if that is cheap: on eight ranks and in deep pipelines one is enough for the
    pair, and `ODD` in test_parity has complete ones."""
    samples, stages = int(row["batch"]) // int(row["dp"]), int(row["pp"])
    enough = min(2, samples) if stages == 1 else max(stages, 4 if _ranks(row) < MAX_WORLD else 2)
    return samples // int(row["micro"]) >= enough and int(row["layers"]) >= stages * int(row["vpp"])


def price(row: Row) -> float:
    """Estimated duration of a row, fitted to measured times in units of about 10 ms. Each rank has a cost, with
    additions for several chunks, matrix products in the optimizer and a schedule search. Each layer of a microbatch
    costs its computation and, above all, its collectives, which grow with the square of their ranks."""
    group, passes = int(row["tp"]) * int(row["cp"]), int(row["layers"]) * int(row["batch"]) // int(row["micro"])
    rank = 7 + 3 * (row["vpp"] == "2") + 2.5 * (row["optimizer"] in ("muon", "soap")) + 12 * (row["schedule"] == "auto")
    layer = 1 + group + group**2 / 2 + 1.5 * (int(row["cp"]) - 1)
    layer += 1.2 * (row["family"] in MOE) + 3.8 * (row["family"] == "deepseek-v3")
    layer += 1.7 * row["recompute"].startswith(("full", "block", "ahead"))
    return _ranks(row) * rank + passes * layer


if __name__ == "__main__":
    FILE.write_text("".join(f"{name_of(row)}\n" for row in covering_rows(AT_LEAST)))
