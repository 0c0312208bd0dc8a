"""A bf16 wire rounds what travels and nothing else, whatever the run computes in."""

from typing import Any

import pytest
import torch

from tests.data_parallel.toy import STEPS, ToyRun, adam, assert_same, gradient
from tests.support.ranks import RankContext, run_ranks

RANKS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def on_the_wire(name: str, step: int, ranks: int) -> torch.Tensor:
    """Each rank's part is rounded, and the sum made in fp32 by rank."""
    total = rounded(gradient(name, step, 0))
    for rank in range(1, ranks):
        total = total + rounded(gradient(name, step, rank))
    return total


def rounded_twice(name: str, step: int, ranks: int) -> torch.Tensor:
    """An all-reduce rounds the sum too, on its way back; owners and servers use it as it is."""
    return rounded(on_the_wire(name, step, ranks))


STRATEGIES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "distributed-optimizer": {},
    # Chunks and pieces of a few hundred elements: several in each bucket.
    "fused-all-reduce": {"fusion_threshold_mb": 0.002, "reduction_order": "rank"},
    "parameter-server": {"server_chunk_mb": 0.0006},
    "sharded-parameter-server": {"server_chunk_mb": 0.0003},
}


def runs(
    context: RankContext, settings: dict[str, Any], loss_scales: list[float]
) -> list[list[dict[str, torch.Tensor]]]:
    """The weights after each step, for each loss scale."""
    found = [list[dict[str, torch.Tensor]]() for _ in loss_scales]
    for loss_scale, weights in zip(loss_scales, found, strict=True):
        run = ToyRun(context.topology(dp=RANKS), settings)
        for _ in range(STEPS):
            run.step(loss_scale=loss_scale)
            weights.append(run.weights())
        run.strategy.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("precision", DTYPES)
def test_only_the_wire_is_rounded(strategy: str, precision: str) -> None:
    """Also with loss scales as large as they come: bf16 has the range of fp32, and powers of 2 lose no digit."""
    settings = {"dp_strategy": strategy, "wire_dtype": "bf16", "precision": precision, **STRATEGIES[strategy]}
    scales = [1.0, 2.0**32, 2.0**100] if precision == "fp16" else [1.0]
    total = rounded_twice if strategy.endswith("all-reduce") else on_the_wire
    expected = adam(RANKS, total=total, dtype=DTYPES[precision])
    for rank in run_ranks(RANKS, runs, settings, scales):
        for found in rank:
            assert_same(found, expected)
            assert all(values.dtype == DTYPES[precision] for values in found[0].values())


def overflowing(context: RankContext) -> list[float]:
    """Norm terms of a step in which one rank's gradients exceed fp32, and of a good one."""
    found = []
    for scale in (3e38, 1.0):
        run = ToyRun(context.topology(dp=2), {"wire_dtype": "bf16", "precision": "fp16"})
        found += run.gradients(scale=scale if context.rank == 1 else 1.0)
        run.strategy.close()
    return found


def test_what_is_infinite_stays_so_on_every_rank() -> None:
    for bad, good in run_ranks(2, overflowing):
        assert not torch.tensor(bad).isfinite()
        assert torch.tensor(good).isfinite()
