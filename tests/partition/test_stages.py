"""The layer cut compared with exhaustive search, for equal and unequal layers."""

import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, combinations, pairwise

import pytest

import megalite.partition.stages as partition
from megalite.partition.stages import partition_layers
from megalite.pipeline.ir.generators import loop_placement, v_placement

Score = tuple[Fraction, Fraction, Fraction, tuple[int, ...]]


def cuts(num_layers: int, num_stages: int, *, last_may_be_empty: bool) -> Iterator[tuple[int, ...]]:
    for bars in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(b - a for a, b in pairwise((0, *bars, num_layers)))
    if last_may_be_empty and num_stages > 1:
        for cut in cuts(num_layers, num_stages - 1, last_may_be_empty=False):
            yield (*cut, 0)


def found_and_best(
    placement: tuple[int, ...], layers: list[str], first: str = "0", last: str = "0"
) -> tuple[Score, Score]:
    """Scores of the cut found and of the best: largest rank, largest stage, evenness, then weight towards the front."""
    costs = [Fraction(cost) for cost in layers]

    def score(cut: tuple[int, ...]) -> Score:
        ends = list(accumulate(cut))
        stages = [sum(costs[end - count : end], Fraction(0)) for end, count in zip(ends, cut, strict=True)]
        stages[0] += Fraction(first)
        stages[-1] += Fraction(last)
        ranks = [Fraction(0)] * (max(placement) + 1)
        for rank, cost in zip(placement, stages, strict=True):
            ranks[rank] += cost
        squares = sum((cost * cost for cost in stages), Fraction(0))
        return max(ranks), max(stages), squares, tuple(-count for count in cut)

    floats = [float(cost) for cost in layers]
    found = partition_layers(len(layers), placement, layer_cost=floats, first_cost=float(first), last_cost=float(last))
    assert sum(found) == len(layers) and min(found[:-1], default=1) >= 1 and len(found) == len(placement)
    every = cuts(len(layers), len(placement), last_may_be_empty=last != "0")
    return score(found), min(map(score, every))


def test_cut_of_equal_layers_equals_exhaustive_search() -> None:
    rng = random.Random(3)
    costs = ["0", "0.3", "0.5", "1", "1.2", "2.5", "4"]
    for _ in range(250):
        num_ranks, chunks = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (2, 3)])
        placement = loop_placement(num_ranks, chunks)
        if rng.random() < 0.3:
            placement = v_placement(num_ranks) if chunks == 2 else tuple(rng.sample(placement, len(placement)))
        layers = [rng.choice(["0.1", "1", "1.7"])] * rng.randint(len(placement), len(placement) + 6)
        ends = rng.choice(costs), rng.choice(costs)
        found, best = found_and_best(placement, layers, *ends)
        assert found == best, (placement, layers, ends)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_cut_of_unequal_layers_equals_exhaustive_search(chunks: int) -> None:
    rng = random.Random(chunks)
    for _ in range(30):
        placement = loop_placement(rng.choice({1: [1, 2, 3, 4, 5], 2: [2, 3], 3: [2]}[chunks]), chunks)
        count = rng.randint(len(placement), len(placement) + 6)
        layers, last = [rng.choice(["1", "1.5", "3", "0.2"]) for _ in range(count)], rng.choice(["0", "0.5", "2.5"])
        found, best = found_and_best(placement, layers, last=last)
        assert found == best, (layers, last, placement)


def test_cut_of_large_models_is_near_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense layers first, then experts in every or every other layer: usually optimal, and never far from it."""
    monkeypatch.setattr(partition, "TRIED_CUTS", 0)
    rng = random.Random(4)
    exact = 0
    for _ in range(60):
        placement = loop_placement(*rng.choice([(2, 2), (3, 2), (2, 3)]))
        count = rng.randint(len(placement), len(placement) + 6)
        every, first, heavy = rng.randint(1, 2), rng.randint(0, 3), rng.choice(["1.4", "0.8", "3"])
        layers = [heavy if layer >= first and (layer - first) % every == 0 else "1" for layer in range(count)]
        found, best = found_and_best(placement, layers, last=rng.choice(["0", "0.5", "2.5"]))
        assert found[0] <= best[0] * Fraction(5, 4), (layers, placement)
        exact += found[0] == best[0]
    assert exact >= 45, exact


@pytest.mark.parametrize(
    ("count", "placement", "costs", "cut"),
    [
        (8, loop_placement(4, 1), {}, (2, 2, 2, 2)),
        (10, loop_placement(4, 1), {}, (3, 3, 2, 2)),
        (10, loop_placement(2, 2), {}, (3, 3, 2, 2)),
        (7, loop_placement(1, 1), {}, (7,)),
        # A head as heavy as two layers and an embedding as heavy as half a layer take layers off their ranks.
        (30, loop_placement(4, 1), {"first_cost": 0.5, "last_cost": 2.0}, (8, 8, 8, 6)),
        # On the last rank all chunks have fewer layers, not only the last chunk.
        (30, loop_placement(4, 2), {"last_cost": 2.0}, (4, 4, 4, 4, 4, 4, 4, 2)),
        # A head heavier than the layers is a stage by itself.
        (4, loop_placement(2, 2), {"last_cost": 2.7}, (2, 1, 1, 0)),
        (4, loop_placement(2, 2), {}, (1, 1, 1, 1)),
        # In a V the head is on the rank of the first stage: that rank has fewer layers.
        (30, v_placement(4), {"last_cost": 2.0}, (4, 4, 4, 4, 4, 4, 4, 2)),
        (31, v_placement(2), {"last_cost": 5.0}, (9, 9, 9, 4)),
        # Layers are weighed, not counted.
        (8, loop_placement(2, 1), {"layer_cost": [1.0, 1.0, *[2.0] * 6]}, (5, 3)),
        (5, loop_placement(2, 1), {"layer_cost": [1.0, 1.0, 1.0, 1.0, 4.0]}, (4, 1)),
    ],
)
def test_expected_cuts(count: int, placement: tuple[int, ...], costs: dict[str, float], cut: tuple[int, ...]) -> None:
    assert partition_layers(count, placement, **costs) == cut


@pytest.mark.parametrize("layers", [1.0, [1.0 if layer < 3 else 1.37 for layer in range(128)]], ids=["alike", "differ"])
def test_cut_of_large_models(layers: float | list[float]) -> None:
    cut = partition_layers(128, loop_placement(16, 4), layer_cost=layers, first_cost=0.37, last_cost=2.9)
    assert sum(cut) == 128 and len(cut) == 64
