"""Test that a narrow wire rounds only sent values, in every precision, and by how much."""

import functools
from typing import Any

import pytest
import torch

from megalite.data_parallel.wire import Background, Channel, WireCounter
from tests.data_parallel.toy import STEPS, ToyRun, adam, assert_same, gradient
from tests.support.ranks import RankContext, run_ranks

RANKS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(values: torch.Tensor, wire: str, scale: float) -> torch.Tensor:
    return (values * scale).to(DTYPES[wire]).float() / scale


def on_the_wire(name: str, step: int, ranks: int, *, wire: str, scale: float, twice: bool) -> torch.Tensor:
    """Each rank's part is rounded, and the sum made in fp32 by rank. An all-reduce rounds the sum too, on its way back;
    owners and servers use it as it is."""
    total = rounded(gradient(name, step, 0), wire, scale)
    for rank in range(1, ranks):
        total = total + rounded(gradient(name, step, rank), wire, scale)
    return rounded(total, wire, scale) if twice else total


STRATEGIES: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "distributed-optimizer": {},
    # Chunks and pieces have a few hundred elements: several per bucket.
    "fused-all-reduce": {"fusion_threshold_mb": 0.002, "reduction_order": "rank"},
    "parameter-server": {"server_chunk_mb": 0.0006},
    "sharded-parameter-server": {"server_chunk_mb": 0.0003},
}


def runs(
    context: RankContext, settings: dict[str, Any], loss_scales: list[float]
) -> list[list[dict[str, torch.Tensor]]]:
    """Return the weights after each step, for each loss scale."""
    found = [list[dict[str, torch.Tensor]]() for _ in loss_scales]
    for loss_scale, weights in zip(loss_scales, found, strict=True):
        run = ToyRun(context.topology(dp=RANKS), settings)
        for _ in range(STEPS):
            run.step(loss_scale=loss_scale)
            weights.append(run.weights())
        run.strategy.close()
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("precision", "wire"), [("fp32", "fp16"), ("fp16", "bf16")])
def test_only_sent_values_are_rounded(strategy: str, precision: str, wire: str) -> None:
    """This includes very large loss scales: bf16 has the range of fp32, and powers of 2 are exact."""
    settings = {"dp_strategy": strategy, "wire_dtype": wire, "precision": precision, **STRATEGIES[strategy]}
    scales = [1.0, 2.0**-12, 2.0**12] if wire == "fp16" else [1.0, 2.0**32, 2.0**100] if precision == "fp16" else [1.0]
    twice = strategy.endswith("all-reduce")
    for rank in run_ranks(RANKS, runs, settings, scales):
        for scale, found in zip(scales, rank, strict=True):
            total = functools.partial(on_the_wire, wire=wire, scale=scale, twice=twice)
            assert_same(found, adam(RANKS, total=total, dtype=DTYPES[precision]))
            assert all(values.dtype == DTYPES[precision] for values in found[0].values())


def overflowing(context: RankContext, wire: str, too_large: float) -> list[float]:
    """Return the norm terms of a step with gradients beyond the wire's range on one rank, and of a good step."""
    found = []
    for scale in (too_large, 1.0):
        run = ToyRun(context.topology(dp=2), {"wire_dtype": wire, "precision": "fp16"})
        found += run.gradients(scale=scale if context.rank == 1 else 1.0)
        run.strategy.close()
    return found


@pytest.mark.parametrize(("wire", "too_large"), [("bf16", 3e38), ("fp16", 65504.0)])
def test_infinite_values_stay_infinite_on_all_ranks(wire: str, too_large: float) -> None:
    for bad, good in run_ranks(2, overflowing, wire, too_large):
        assert not torch.tensor(bad).isfinite()
        assert torch.tensor(good).isfinite()


SCALE = 2.0**10


def spread(rank: int) -> torch.Tensor:
    """Return gradients of all sizes that an fp16 wire can represent with this loss scale, and smaller ones."""
    source = torch.Generator().manual_seed(rank)
    size = 64 * RANKS
    return torch.randn(size, generator=source) * 2.0 ** torch.randint(-45, 3, (size,), generator=source)


def summed(context: RankContext) -> torch.Tensor:
    group = context.topology(dp=RANKS).dp
    channel = Channel(group, WireCounter(), Background(torch.device("cpu")), wire_dtype=torch.float16)
    values = spread(context.rank) * SCALE
    channel.all_reduce_async(values).wait()
    return values / SCALE


def test_error_of_an_fp16_wire_is_bounded() -> None:
    """Each sent number x loses at most max(2^-11·|x|, 2^-25/scale): the parts, and their sum again."""

    def lost(x: torch.Tensor) -> torch.Tensor:
        return torch.maximum(2.0**-11 * x.abs(), torch.tensor(2.0**-25 / SCALE))

    parts = torch.stack([spread(rank) for rank in range(RANKS)]).double()
    bound = lost(parts).sum(dim=0)
    bound += lost(parts.sum(dim=0).abs() + bound)
    for found in run_ranks(RANKS, summed):
        error = (found.double() - parts.sum(dim=0)).abs()
        assert (error <= bound).all()
        assert (error > bound / 8).any(), "the bound is not trivial"
