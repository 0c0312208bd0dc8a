"""The layer cut against exhaustive search."""

import itertools
import random
import time
from collections.abc import Iterator
from fractions import Fraction

import pytest

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.generators.one_chunk import loop_placement, v_placement
from megalite.pipeline.ir.partition import partition_layers


def cuts(num_layers: int, num_stages: int, *, last_may_be_empty: bool) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(1, num_layers), num_stages - 1):
        edges = (0, *bars, num_layers)
        yield tuple(b - a for a, b in itertools.pairwise(edges))
    if last_may_be_empty and num_stages > 1:
        for cut in cuts(num_layers, num_stages - 1, last_may_be_empty=False):
            yield (*cut, 0)


def score(
    cut: tuple[int, ...], placement: tuple[int, ...], layer: Fraction, first: Fraction, last: Fraction
) -> tuple[Fraction, Fraction, Fraction, tuple[int, ...]]:
    """What is minimised: largest rank, largest stage, evenness, then weight towards the front."""
    stages = [layer * count for count in cut]
    stages[0] += first
    stages[-1] += last
    ranks = [Fraction(0)] * (max(placement) + 1)
    for rank, cost in zip(placement, stages, strict=True):
        ranks[rank] += cost
    return (max(ranks), max(stages), sum((cost * cost for cost in stages), Fraction(0)), tuple(-count for count in cut))


def test_equals_exhaustive_search() -> None:
    rng = random.Random(3)
    costs = ["0", "0.3", "0.5", "1", "1.2", "2.5", "4"]
    for _ in range(250):
        num_ranks, chunks = rng.choice([(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (2, 3)])
        num_stages = num_ranks * chunks
        placement = loop_placement(num_ranks, chunks)
        if rng.random() < 0.3:
            placement = v_placement(num_ranks) if chunks == 2 else tuple(rng.sample(placement, num_stages))
        num_layers = rng.randint(num_stages, num_stages + 6)
        layer, first, last = rng.choice(["0.1", "1", "1.7"]), rng.choice(costs), rng.choice(costs)
        found = partition_layers(
            num_layers, placement, layer_cost=float(layer), first_cost=float(first), last_cost=float(last)
        )
        assert sum(found) == num_layers and min(found[:-1], default=1) >= 1 and len(found) == num_stages
        exact = (placement, Fraction(layer), Fraction(first), Fraction(last))
        best = min(score(cut, *exact) for cut in cuts(num_layers, num_stages, last_may_be_empty=last != "0"))
        assert score(found, *exact) == best, (num_layers, placement, layer, first, last)


def test_examples() -> None:
    assert partition_layers(8, loop_placement(4, 1)) == (2, 2, 2, 2)
    assert partition_layers(10, loop_placement(4, 1)) == (3, 3, 2, 2)
    assert partition_layers(10, loop_placement(2, 2)) == (3, 3, 2, 2)
    # A head worth two layers and an embedding worth half of one take layers off their ranks.
    assert partition_layers(30, loop_placement(4, 1), first_cost=0.5, last_cost=2.0) == (8, 8, 8, 6)
    # On the last rank all chunks share the relief, not only the last one.
    assert partition_layers(30, loop_placement(4, 2), last_cost=2.0) == (4, 4, 4, 4, 4, 4, 4, 2)
    assert partition_layers(7, loop_placement(1, 1)) == (7,)
    # A head worth more than layers is a stage by itself.
    assert partition_layers(4, loop_placement(2, 2), last_cost=2.7) == (2, 1, 1, 0)
    assert partition_layers(4, loop_placement(2, 2)) == (1, 1, 1, 1)
    # In a V the head is with the first stage: its rank sheds the layers.
    assert partition_layers(30, v_placement(4), last_cost=2.0) == (4, 4, 4, 4, 4, 4, 4, 2)
    assert partition_layers(31, v_placement(2), last_cost=5.0) == (9, 9, 9, 4)


def test_large_is_quick() -> None:
    start = time.process_time()
    cut = partition_layers(128, loop_placement(16, 4), first_cost=0.37, last_cost=2.9)
    assert time.process_time() - start < 0.5
    assert sum(cut) == 128
    assert len(cut) == 64


@pytest.mark.parametrize(
    ("layers", "costs", "message"),
    [
        (3, {}, r"num_layers is 3, fewer than the 4 pipeline stages \(on 2 ranks\).*4 layers or more.*most 3"),
        (8, {"layer_cost": 0.0}, "layer 0.0"),
        (8, {"last_cost": -1.0}, "last -1.0"),
    ],
)
def test_what_cannot_be_cut(layers: int, costs: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        partition_layers(
            layers, loop_placement(2, 2), layer_cost=costs.get("layer_cost", 1.0), last_cost=costs.get("last_cost", 0.0)
        )
