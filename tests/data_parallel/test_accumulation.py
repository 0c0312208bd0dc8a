"""Gradient accumulation: which microbatches communicate. PyTorch's `no_sync` is what all-reduce and ZeRO-1 always do."""

from collections import Counter
from typing import Any

import pytest

from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Z1, Runner, build, tiny_config
from tests.support.traffic import counted

Found = dict[int, tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]]

COUNTS = (1, 2, 3)  # microbatches in a step
BUCKETS: dict[str, Any] = {"num_layers": 2, "ddp_bucket_size": 3000}


def moved(context: RankContext, world: int, settings: dict[str, Any]) -> Found:
    """Microbatches -> bytes and numbers of the collectives over replicas in a step."""
    found: Found = {}
    for count in COUNTS:
        runner = Runner(
            build(context, tiny_config(world, **BUCKETS, **settings, dp=world, global_batch_size=world * count))
        )
        runner.step()
        with counted() as (volumes, calls):
            runner.step()
            runner.replica.strategy.wait_until_idle()
        runner.replica.strategy.close()
        of_replicas = [key for key in volumes if key[0].endswith("dp-cp")]
        found[count] = Counter({k: volumes[k] for k in of_replicas}), Counter({k: calls[k] for k in of_replicas})
    return found


def both(found: Found, group: str, operation: str) -> list[tuple[int, int]]:
    """(bytes, collectives) for 1, 2 and 3 microbatches."""
    return [(volumes[group, operation], calls[group, operation]) for volumes, calls in found.values()]


def times(each: tuple[int, int]) -> list[tuple[int, int]]:
    return [(count * each[0], count * each[1]) for count in COUNTS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"grad_compression": "uint8", "precision": "fp32"},
        {"dp_strategy": "fused-all-reduce"},
        {"dp_strategy": "sharded-parameter-server"},
        Z1,
    ],
    ids=str,
)
def test_gradients_travel_once_a_step(settings: dict[str, Any]) -> None:
    for rank in run_ranks(2, moved, 2, settings):
        first, *others = rank.values()
        assert sum(first[0].values()) > 10_000
        for other in others:
            # Fused gradients are what is ready together: as many bytes, in more or fewer messages.
            assert other[0] == first[0]
            assert other[1] == first[1] or settings.get("dp_strategy") == "fused-all-reduce"


def test_zero_2_reduces_each_microbatch_and_gathers_once() -> None:
    for rank in run_ranks(2, moved, 2, {**Z1, "shard_gradients": True}):
        reduced, gathered = (both(rank, "dp-cp", operation) for operation in ("reduce-scatter", "all-gather"))
        assert reduced == times(reduced[0]) and reduced[0][1] > 2
        assert gathered == [gathered[0]] * 3 and gathered[0][1] > 2


def test_zero_3_reduces_and_gathers_each_microbatch() -> None:
    for rank in run_ranks(2, moved, 2, {"dp_strategy": "fully-sharded"}):
        reduced, gathered = (both(rank, "dp-cp", operation) for operation in ("reduce-scatter", "all-gather"))
        assert reduced == times(reduced[0]) and reduced[0][1] > 2
        (one, _), (two, _), (three, _) = gathered
        assert three - two == two - one > 0.5 * one


def test_between_instances_the_sums_travel_once() -> None:
    for rank in run_ranks(4, moved, 4, {"dp_strategy": "fully-sharded", "dp_instances": 2}):
        inside, across = (
            both(rank, *key) for key in (("intra-dp-cp", "reduce-scatter"), ("inter-dp-cp", "all-reduce"))
        )
        assert inside == times(inside[0])
        assert across == [across[0]] * 3 and across[0][1] > 2
