"""The gradient noise scale against the paper's formulas on gradients that one rank computes for all."""

from typing import Any

import numpy as np
import pytest
import torch

from megalite.data.loader import sample_ids
from megalite.data_parallel.shards import NOISE_STEPS, GradientNoise
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import MOE, Z1, Runner, build, tiny_config

STEPS = 3
LOG: dict[str, Any] = {"log_gradient_noise_scale": True}
EXPERTS = {**MOE, "moe_aux_loss_coeff": 0.0}


def test_noise_scale_of_gaussian_gradients() -> None:
    """For Gaussian gradients S is the trace of their covariance, and |G|² the square of their mean."""
    draw, ranks, samples = torch.Generator().manual_seed(3), 4, 32
    mean = torch.randn(200, generator=draw, dtype=torch.float64)
    spread = torch.rand(200, generator=draw, dtype=torch.float64) * 8
    noise = GradientNoise(ranks)
    for _ in range(600):
        gradients = mean + spread * torch.randn(samples, 200, generator=draw, dtype=torch.float64)
        parts = gradients.view(ranks, -1, 200).sum(dim=1) / samples
        noise.update(float(parts.sum(dim=0).square().sum()), float(parts.square().sum()), samples)
    assert noise.scale == pytest.approx(float(spread.square().sum() / mean.square().sum()), rel=0.03)


def test_no_noise_scale_without_an_estimate() -> None:
    noise = GradientNoise(2)
    assert noise.scale is None
    noise.update(whole=1.0, parts=2.5, samples=4)  # more noise than the total shows: |G|² would be negative
    assert noise.scale is None


class Oracle:
    """Return what a run over `dp` ranks must log, from one rank's gradients of each rank's samples."""

    def __init__(self, dp: int, settings: dict[str, Any]) -> None:
        self._dp, self._runner = dp, Runner(build(RankContext(0, {}), tiny_config(1, **settings)))
        self._signal, self._noise = 0.0, 0.0

    def step(self) -> list[float]:
        runner, first = self._runner, self._runner.progress.samples
        batches = runner.loader.load(first, 8)
        tokens = sum(float(batch.loss_mask.sum()) for batch in batches)
        parameters = list(runner.replica.stages[0].parameters())
        stage, total, squares = runner.replica.stages[0], [torch.zeros_like(p) for p in parameters], []
        for rank in range(self._dp):
            runner.replica.strategy.begin_step(runner.progress.step + 1)
            for index in range(8 // self._dp):
                (sample,) = sample_ids(first, index, dp_rank=rank, dp_size=self._dp, micro_batch_size=1)
                (batch,) = (each for each in batches if each.sample_ids == (sample,))
                losses = stage(batch.tokens, stage.context(batch.sample_ids), labels=batch.labels)
                ((losses * batch.loss_mask).sum() / tokens * self._dp).backward()
                runner.replica.strategy.collect_grads(0)
            own = [parameter.main_grad for parameter in parameters]
            squares.append(sum(float(each.square().sum()) for each in own))
            total = [sum_ + each / self._dp for sum_, each in zip(total, own, strict=True)]
        small, big = sum(squares) / self._dp, sum(float(each.square().sum()) for each in total)
        b_small, b_big = 8 / self._dp, 8
        self._signal += ((b_big * big - b_small * small) / (b_big - b_small) - self._signal) / NOISE_STEPS
        self._noise += ((small - big) / (1 / b_small - 1 / b_big) - self._noise) / NOISE_STEPS
        runner.step()
        return [self._signal, self._noise]


def averages(context: RankContext, world: int, settings: dict[str, Any]) -> list[list[float]]:
    """Return |G|² and S after each step."""
    runner = Runner(build(context, tiny_config(world, **LOG, **settings)))
    found = []
    for _ in range(STEPS):
        result, noise = runner.step(), runner.replica.noise
        assert noise is not None and result.gradient_noise_scale == noise.scale
        found.append(list(noise.state().values()))
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"dp": 4, **Z1, "dp_instances": 2},
        {"dp": 2, "tp": 2, "sequence_parallel": True, **Z1},
        {"dp": 2, "pp": 2, "vpp": 2, "pipeline_schedule": "zb-v"},
        {"dp": 2, "tp": 2, **EXPERTS},
    ],
    ids=str,
)
def test_noise_scale_equals_the_formulas(settings: dict[str, Any]) -> None:
    """Copies on tp ranks, of a tied embedding and of instances count once; tokens are weighted per sample."""
    world = int(np.prod([settings.get(axis, 1) for axis in ("tp", "pp", "dp")]))
    model = EXPERTS if "num_experts" in settings else {}
    oracle = Oracle(settings["dp"], model)
    expected = [oracle.step() for _ in range(STEPS)]
    for ours in run_ranks(world, averages, world, settings):
        np.testing.assert_allclose(ours, expected, rtol=1e-10)


def test_noise_scale_excludes_loss_scale_and_overflows() -> None:
    half = {"dp": 2, "precision": "fp16", "loss_scale": 1024.0}
    full, scaled = (run_ranks(2, averages, 2, each)[0] for each in ({"dp": 2, "precision": "fp32"}, half))
    np.testing.assert_allclose(scaled, full, rtol=0.02)
    overflowing = {"dp": 2, "precision": "fp16", "initial_loss_scale": 2.0**40, "hysteresis": 5}
    assert run_ranks(2, averages, 2, overflowing)[0] == [[0.0, 0.0]] * STEPS
