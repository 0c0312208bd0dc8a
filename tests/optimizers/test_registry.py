"""Test every registered optimizer: it loads by name, has its registered states, and resumes from them."""

from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.config.optimizer import ONEBIT_OPTIMIZERS, OPTIMIZERS, state_formats
from tests.data_parallel.toy import ToyRun
from tests.support.ranks import RankContext

CASES: dict[str, dict[str, Any]] = {name: {"optimizer": name} for name in OPTIMIZERS.builtin}
CASES |= {name: {"optimizer": name, "freeze_step": 2} for name in ONEBIT_OPTIMIZERS}
CASES |= {
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
    "average": {"ema_decay": 0.9},
    "bf16 moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
}


def made(case: str) -> ToyRun:
    return ToyRun(RankContext(0, {}).topology(dp=1), CASES[case])


def test_unknown_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer is 'adamw'; it must be one of adam, sgd"):
        OPTIMIZERS.get("adamw")


@pytest.mark.parametrize("case", CASES)
def test_states_equal_the_registration(case: str) -> None:
    run = made(case)
    for flat in run.optimizer.parameters:
        state = run.optimizer.state(flat.param)
        assert tuple(state) == tuple(state_formats(run.config.optimizer, hidden_matrix=flat.orthogonal))
        for name, values in state.items():
            first = flat.param.data if name in run.optimizer.from_parameters else torch.zeros_like(values)
            assert torch.equal(values, first), name
    assert run.optimizer.updates == 0


@pytest.mark.parametrize("case", CASES)
def test_states_and_counters_determine_the_steps(case: str) -> None:
    """Another optimizer with these values takes bit-equal steps."""
    one, other = made(case), made(case)
    for _ in range(4):
        one.step()
    for source, target in zip(one.optimizer.parameters, other.optimizer.parameters, strict=True):
        target.param.data.copy_(source.param.data)
        for name, values in other.optimizer.state(target.param).items():
            values.copy_(one.optimizer.state(source.param)[name])
    tensors = one.optimizer.tensor_state()
    for key, values in other.optimizer.tensor_state().items():
        values.copy_(tensors[key])
    other.strategy.load_counters(one.strategy.counters())
    other.steps, other.optimizer.updates = one.steps, one.optimizer.updates
    other.optimizer.load_counters(one.optimizer.counters())
    for run in (one, other):
        run.step()
        run.step()
    assert one.optimizer.updates == other.optimizer.updates == 6
    for name, values in one.weights().items():
        assert torch.equal(values, other.weights()[name]), name
