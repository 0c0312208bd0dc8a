"""Test learning-rate multipliers by parameter names: steps of each optimizer, and planned buckets."""

from typing import Any

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.models.shapes import learning_rate
from megalite.parity.trajectory import local_parts
from megalite.partition.buckets import planned_buckets
from megalite.partition.pipeline import plan_stages
from tests.support.ranks import RankContext
from tests.support.tiny import Runner, build, tiny_config

PATTERNS = ["layers.0.*=0.5", "*.out.weight=0", "final_norm.*=3"]
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {},
    "sgd": {"optimizer": "sgd"},
    "lamb": {"optimizer": "lamb"},
    "muon": {"optimizer": "muon"},
    "schedule-free-adamw": {"optimizer": "schedule-free-adamw", "lr_decay_style": "constant"},
}


def changes(settings: dict[str, Any]) -> dict[str, np.ndarray]:
    runner = Runner(build(RankContext(0), tiny_config(1, num_layers=2, **settings)))
    before = local_parts(runner.replica, "weight")
    runner.step()
    return {name: values - before[name][2] for name, (_, _, values) in local_parts(runner.replica, "weight").items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_multipliers_scale_steps_and_decay(optimizer: str) -> None:
    plain, found = (changes({**OPTIMIZERS[optimizer], "lr_multipliers": each}) for each in ([], PATTERNS))
    factors = {}
    for name, step in plain.items():
        config = OptimizerConfig(lr_multipliers=PATTERNS)
        factors[name] = learning_rate(name, step.shape, decay=True, model=ModelConfig(), config=config).multiplier
        np.testing.assert_allclose(found[name], factors[name] * step, rtol=1e-8, atol=1e-12, err_msg=name)
    assert factors["layers.0.attention.out.weight"] == 0.0 and factors["layers.0.mlp.up.bias"] == 0.5
    assert set(factors.values()) == {0.0, 0.5, 1.0, 3.0}


def test_planned_buckets_equal_real_ones() -> None:
    config = tiny_config(1, num_layers=2, lr_multipliers=PATTERNS)
    strategy = build(RankContext(0), config).strategy
    made = [
        (bucket.data.numel(), {each.parameter.info.spec.name for each in bucket.placed})
        for bucket in strategy.all_buckets()
    ]
    stages = plan_stages(config)
    assert made == [(each.elements, set(each.names)) for each in planned_buckets(config, stages[0], stages)]


def test_pattern_without_a_match_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_multipliers has layer\.0\.\*, which matches no parameter"):
        build(RankContext(0), tiny_config(1, lr_multipliers=["layer.0.*=0.5"]))
