"""Test when the warm-up of 1-bit optimizers ends."""

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.kernels.optimizer_ops import Direction
from megalite.optimizers.onebit import FreezePoint, exchanges, updates_variance, warmup_steps, zero_without_moment
from megalite.topology.group import Group
from tests.support.tiny import words

WORLD = Group.solo("world")


def made(**settings: Any) -> FreezePoint:
    common = words("global_batch_size=4 optimizer=onebit-adam train_iters=100 adam_beta2=0.9 freeze_threshold=0.96")
    return FreezePoint(replace(RunConfig(), **{**common, **settings}), world=WORLD)


def feed(point: FreezePoint, norms: Sequence[float], first: int = 1) -> dict[int, str]:
    said = {}
    for step, norm in enumerate(norms, start=first):
        line = point.observe(step, lambda norm=norm: torch.tensor(norm, dtype=torch.float64))  # type: ignore[misc]
        if line is not None:
            said[step] = line
    return said


def test_given_step_is_the_last_of_the_warm_up() -> None:
    point = made(freeze_step=7)
    assert not feed(point, [1.0] * 30), "there is no step to find"
    assert [step for step in range(1, 10) if point.frozen(step, step - 1)] == [8, 9]


def test_skipped_steps_do_not_count_in_a_given_warm_up() -> None:
    """The first 5 of 12 steps are skipped, so the warm-up's 3 updates are in steps 6 to 8."""
    point = made(freeze_step=3)
    assert [step for step in range(1, 13) if point.frozen(step, max(step - 6, 0))] == [9, 10, 11, 12]


def test_warm_up_ends_once_the_norm_is_stable() -> None:
    """With beta2 0.9 the interval is 10 steps: the norm falls to half from step 10 to 20, and to 0.97 of it at 30."""
    point = made()
    norms = [1.0] * 10 + [0.5] * 10 + [0.485] * 20
    said = feed(point, norms)
    assert list(said) == [30]
    assert "step 30" in said[30] and "0.9700" in said[30] and "step 31" in said[30]
    assert [step for step in (29, 30, 31) if point.frozen(step, step - 1)] == [31]


def test_growing_moment_is_not_stable() -> None:
    point = made()
    assert not feed(point, [1.0] * 10 + [2.0] * 10 + [4.0] * 10)
    assert list(feed(point, [4.0] * 10, first=31)) == [40]


def test_warm_up_waits_for_the_learning_rate() -> None:
    assert list(feed(made(lr_warmup_iters=25), [1.0] * 50)) == [30]
    assert list(feed(made(lr_warmup_iters=30), [1.0] * 50)) == [40]
    samples = replace(RunConfig(), train_samples=800, lr_warmup_samples=203, global_batch_size=8)
    assert warmup_steps(samples) == 26


def test_skipped_step_is_not_compared() -> None:
    """fp16 skips step 20, so step 30 has no norm of 10 steps before."""
    point = made()
    feed(point, [1.0] * 19)
    feed(point, [1.0] * 18, first=21)
    assert point.step is None
    assert list(feed(point, [1.0] * 5, first=39)) == [40]


def test_found_freeze_step_is_restored() -> None:
    norms = [1.0] * 10 + [0.5] * 10 + [0.49] * 20
    for stop in range(1, 36):
        point, other = made(), made()
        feed(point, norms[:stop])
        other.load_counters(json.loads(json.dumps(point.counters())))
        feed(other, norms[stop:], first=stop + 1)
        assert other.step == 30, f"stopped after {stop}"


def test_freeze_step_in_the_past_cannot_be_changed() -> None:
    point = made(freeze_step=7)
    before = point.counters()
    point.updates = 6
    made(freeze_step=9).load_counters(before)
    made(freeze_step=7).load_counters(point.counters())
    with pytest.raises(ConfigError, match=r"freeze_step is 9.*after step 7.*--freeze-step 7"):
        made(freeze_step=9).load_counters(point.counters())
    other = made()
    other.load_counters(point.counters())
    assert other.frozen(8, 7) and other.updates == 6
    other.load_counters({"something": "else"})
    assert other.frozen(8, 7)


def test_frozen_moment_has_bias_correction_and_no_zeros() -> None:
    """v had 2 updates, m 3."""
    direction = Direction.at(3, beta1=0.9, beta2=0.9, eps=1e-3, frozen=2)
    moment = torch.tensor([0.04, 0.0])
    momentum = zero_without_moment(torch.tensor([-5.0, 7.0]), moment)
    values = direction.add_to(torch.ones(2), momentum, moment, factor=-0.1)
    below = math.sqrt(0.04 / (1.0 - 0.9**2)) + 1e-3
    assert values.tolist() == [pytest.approx(1.0 + 0.1 * 5.0 / (1.0 - 0.9**3) / below), 1.0]


def test_exchange_intervals_of_zero_one_adam() -> None:
    assert [step for step in range(1, 40) if updates_variance(step, 3)] == [
        *(1, 2, 3),
        *(5, 7, 9),
        *(13, 17, 21),
        *(29, 37),
    ]
    assert [local for local in range(1, 40) if exchanges(local, scaler=4, clipper=6)] == [
        *(1, 2, 3, 4),
        *(6, 8),
        *(12, 18, 24, 30, 36),
    ]
    assert exchanges(1 << 60, scaler=2, clipper=16)
