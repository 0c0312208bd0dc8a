"""Compare learning rates with values computed by hand; test_megatron_schedules.py has the built-in
schedules and weight decay."""

from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.optimizer import LR_SCHEDULES
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.optimizers.schedules import Decay, Progress, Schedules
from tests.support.plugins import registered
from tests.support.tiny import words

BASE: dict[str, Any] = words("vocab_size=100 train_iters=100 micro_batch_size=1 global_batch_size=4 lr=1.0 min_lr=0.2")


def schedules(**changes: Any) -> Schedules:
    return Schedules(validate(replace(RunConfig(), **{**BASE, **changes}), 1))


def lr(at: int, **changes: Any) -> float:
    return schedules(**changes).lr(Progress(at, 4 * at))


def test_separate_learning_rate_of_embedding_and_head() -> None:
    """The curve is the same between other limits; the lower limit is min_lr unless it is set."""
    made = schedules(lr_decay_style="linear", lr_warmup_iters=20, decoupled_lr=5.0)
    assert [made.decoupled_lr(Progress(step, 4 * step)) for step in (10, 20, 60, 100, 130)] == [2.5, 5.0, 2.6, 0.2, 0.2]
    made = schedules(lr_decay_style="linear", lr_warmup_iters=20, decoupled_lr=5.0, decoupled_min_lr=1.0)
    assert [made.decoupled_lr(Progress(step, 4 * step)) for step in (60, 100)] == [3.0, 1.0]
    assert made.lr(Progress(60, 240)) == pytest.approx(0.6)
    assert schedules().decoupled_lr(Progress(60, 240)) is None


@pytest.mark.parametrize("rate", [None, float("nan")])
def test_custom_schedule_must_return_a_number(rate: Any) -> None:
    says = f"lr_decay_style broken returned {rate}; it must return a finite number"
    with registered(LR_SCHEDULES, "broken", lambda decay: rate), pytest.raises(ConfigError, match=says):
        lr(50, lr_decay_style="broken")


def test_custom_schedule_has_the_common_warm_up_and_limits() -> None:
    def steps_down(decay: Decay) -> float:
        return decay.between(1.0 if decay.ratio < 0.5 else 0.25)

    with registered(LR_SCHEDULES, "steps-down", steps_down):
        mine = {"lr_decay_style": "steps-down", "lr_warmup_iters": 20, "lr_decay_iters": 80}
        assert [lr(at, **mine) for at in (10, 20, 49, 50, 80, 81)] == [0.5, 1.0, 1.0, 0.4, 0.4, 0.2]
        assert schedules(**mine, decoupled_lr=5.0).decoupled_lr(Progress(20, 80)) == 5.0
    with pytest.raises(ConfigError, match="cannot be 'steps-down'"):
        schedules(lr_decay_style="steps-down")
