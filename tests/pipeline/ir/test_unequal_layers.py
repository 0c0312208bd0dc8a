"""The cut of layers that differ in cost against exhaustive search."""

import random
import time
from fractions import Fraction
from itertools import accumulate

import pytest

import megalite.pipeline.ir.partition as unequal_layers
from megalite.config.errors import ConfigError
from megalite.pipeline.ir.generators.one_chunk import loop_placement
from megalite.pipeline.ir.partition import partition_layers
from tests.pipeline.ir.test_partition import cuts


def score(
    cut: tuple[int, ...], num_ranks: int, costs: list[Fraction], last: Fraction
) -> tuple[Fraction, Fraction, Fraction, tuple[int, ...]]:
    """Largest rank, largest stage, evenness, then weight towards the front."""
    ends = list(accumulate(cut))
    stages = [sum(costs[end - count : end], Fraction(0)) for end, count in zip(ends, cut, strict=True)]
    stages[-1] += last
    ranks = [sum(stages[rank::num_ranks], Fraction(0)) for rank in range(num_ranks)]
    squares = sum((cost * cost for cost in stages), Fraction(0))
    return max(ranks), max(stages), squares, tuple(-count for count in cut)


def drawn(rng: random.Random, num_stages: int) -> tuple[list[str], str]:
    layers = rng.randint(num_stages, num_stages + 6)
    return [rng.choice(["1", "1.5", "3", "0.2"]) for _ in range(layers)], rng.choice(["0", "0.5", "2.5"])


def both(costs: list[str], last: str, num_stages: int, num_ranks: int) -> tuple[tuple, tuple]:
    """Score of the cut found and of the best."""
    found = partition_layers(
        len(costs),
        loop_placement(num_ranks, num_stages // num_ranks),
        layer_cost=[float(cost) for cost in costs],
        last_cost=float(last),
    )
    assert sum(found) == len(costs) and min(found[:-1], default=1) >= 1 and len(found) == num_stages
    exact = (num_ranks, [Fraction(cost) for cost in costs], Fraction(last))
    every = cuts(len(costs), num_stages, last_may_be_empty=last != "0")
    return score(found, *exact), min(score(cut, *exact) for cut in every)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_equals_exhaustive_search(chunks: int) -> None:
    rng = random.Random(chunks)
    for _ in range(30):
        num_ranks = rng.choice({1: [1, 2, 3, 4, 5], 2: [2, 3], 3: [2]}[chunks])
        costs, last = drawn(rng, num_ranks * chunks)
        found, best = both(costs, last, num_ranks * chunks, num_ranks)
        assert found == best, (costs, last, num_ranks)


def test_what_is_too_large_to_try_is_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers first, then experts in every or every other layer: mostly the best pace, never far off."""
    monkeypatch.setattr(unequal_layers, "TRIED_CUTS", 0)
    rng = random.Random(4)
    exact = 0
    for _ in range(60):
        num_ranks, chunks = rng.choice([(2, 2), (3, 2), (2, 3)])
        layers = rng.randint(num_ranks * chunks, num_ranks * chunks + 6)
        every, first, heavy = rng.randint(1, 2), rng.randint(0, 3), rng.choice(["1.4", "0.8", "3"])
        moe = [layer >= first and (layer - first) % every == 0 for layer in range(layers)]
        costs = [heavy if experts else "1" for experts in moe]
        found, best = both(costs, rng.choice(["0", "0.5", "2.5"]), num_ranks * chunks, num_ranks)
        assert found[0] <= best[0] * Fraction(5, 4), (costs, num_ranks, chunks)
        exact += found[0] == best[0]
    assert exact >= 45, exact


def test_equal_costs_in_a_list_are_the_equal_cut() -> None:
    assert partition_layers(10, loop_placement(2, 2), layer_cost=[2.0] * 10) == partition_layers(
        10, loop_placement(2, 2)
    )


def test_layers_that_differ_are_weighed_not_counted() -> None:
    assert partition_layers(8, loop_placement(2, 1), layer_cost=[1.0, 1.0, *[2.0] * 6]) == (5, 3)
    assert partition_layers(5, loop_placement(2, 1), layer_cost=[1.0, 1.0, 1.0, 1.0, 4.0]) == (4, 1)


def test_large_is_quick() -> None:
    start = time.process_time()
    costs = [1.0 if layer < 3 else 1.37 for layer in range(128)]
    assert sum(partition_layers(128, loop_placement(16, 4), layer_cost=costs, last_cost=2.9)) == 128
    assert time.process_time() - start < 5.0


def test_a_layer_must_cost_something() -> None:
    with pytest.raises(ConfigError, match=r"layer 0\.0"):
        partition_layers(3, loop_placement(1, 1), layer_cost=[1.0, 0.0, 2.0])
