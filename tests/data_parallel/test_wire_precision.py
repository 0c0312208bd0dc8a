"""A bf16 wire rounds what travels and nothing else, whatever the run computes in."""

from typing import Any

import pytest
import torch

from tests.data_parallel.toy import NO_DECAY, SHAPES, Toy, ToyRun, gradient
from tests.support.ranks import RankContext, run_ranks

RANKS, STEPS = 3, 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def summed(step: int, name: str, *, twice: bool) -> torch.Tensor:
    """Each rank's part is rounded, the sum made in fp32 by rank, and rounded again where it travels to all."""
    total = rounded(gradient(name, step, 0))
    for rank in range(1, RANKS):
        total = total + rounded(gradient(name, step, rank))
    return rounded(total) if twice else total


def by_hand(precision: str, *, twice: bool) -> list[dict[str, torch.Tensor]]:
    """Torch's AdamW over fp32 parameters; after each step what the model gets of them."""
    toy, dtype = Toy(DTYPES[precision]), DTYPES[precision]
    main = {name: torch.nn.Parameter(getattr(toy, name).detach().float().clone()) for name in SHAPES}
    groups = [
        {"params": [main[name] for name in SHAPES if (name in NO_DECAY) == plain], "weight_decay": decay}
        for plain, decay in ((False, 0.1), (True, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05, fused=True)
    found = []
    for step in range(1, STEPS + 1):
        for name, parameter in main.items():
            parameter.grad = summed(step, name, twice=twice)
        optimizer.step()
        found.append({name: parameter.detach().to(dtype, copy=True) for name, parameter in main.items()})
    return found


def runs(
    context: RankContext, settings: dict[str, Any], loss_scales: list[float]
) -> list[list[dict[str, torch.Tensor]]]:
    """The weights after each step, for each loss scale."""
    torch.set_num_threads(1)
    found = [list[dict[str, torch.Tensor]]() for _ in loss_scales]
    for loss_scale, weights in zip(loss_scales, found, strict=True):
        run = ToyRun(context.topology(dp=RANKS), settings)
        for _ in range(STEPS):
            run.step(loss_scale=loss_scale)
            weights.append(run.weights())
        run.strategy.close()
    return found


@pytest.mark.parametrize("strategy", ["all-reduce", "distributed-optimizer"])
@pytest.mark.parametrize("precision", DTYPES)
def test_only_the_wire_is_rounded(strategy: str, precision: str) -> None:
    """Also with loss scales as large as they come: bf16 has the range of fp32, and powers of 2 lose no digit."""
    settings = {"dp_strategy": strategy, "wire_dtype": "bf16", "precision": precision}
    scales = [1.0, 2.0**32, 2.0**100] if precision == "fp16" else [1.0]
    expected = by_hand(precision, twice=strategy == "all-reduce")
    for rank in run_ranks(RANKS, runs, settings, scales):
        for found in rank:
            for step, (ours, wanted) in enumerate(zip(found, expected, strict=True), start=1):
                for name in SHAPES:
                    assert ours[name].dtype == DTYPES[precision]
                    assert torch.equal(ours[name], wanted[name]), f"{name} after step {step}"


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
