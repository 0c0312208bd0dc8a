"""Maximal update parametrization: initial values, rates and factors; a step's effect does not grow with the width."""

import math
from typing import Any

import pytest
import torch

from megalite.parity.trajectory import Runner
from megalite.tensor_parallel.parameter import ShardedParameter
from tests.support.ranks import RankContext
from tests.support.tiny import LLAMA, build, tiny_config

WIDTHS = (32, 128, 512)


def runner_of(width: int, **more: Any) -> Runner:
    sizes = {"hidden_size": width, "num_attention_heads": width // 16, "num_query_groups": None, "num_layers": 2}
    config = tiny_config(1, **{**LLAMA, **sizes, "precision": "fp32", "lr": 0.01, "global_batch_size": 4, **more})
    return Runner(build(RankContext(0), config))


def test_initial_values_rates_and_factors() -> None:
    mup = {"use_mup": True, "mup_base_hidden_size": 32, "mup_base_head_dim": 4}
    plain, ours = (runner_of(128, **more).replica for more in ({}, mup))
    values = [dict(next(iter(replica.stages.values())).named_parameters()) for replica in (plain, ours)]
    for name, parameter in values[1].items():
        assert isinstance(parameter, ShardedParameter)
        hidden = parameter.dim() > 1 and not name.startswith(("embedding", "head"))
        factor = 0.5 if hidden else 1.0  # 1 / sqrt(128 / 32)
        torch.testing.assert_close(parameter.data, values[0][name].data * factor)
        assert parameter.info.learning_rate == (False, 0.25 if hidden else 1.0), name
    stage = next(iter(ours.stages.values()))
    assert stage.head is not None and stage.head.logit_scale == 0.25
    attention = stage.layers["0"].attention
    # Besides 1 / sqrt(head size): sqrt(4) / 16 = 1 / 8.
    assert attention.query_scale == pytest.approx(math.sqrt(16) / 8)


def change_of_features(width: int, **more: Any) -> float:
    """Return the root mean square of the change of the last layer's output after three steps on one batch."""
    runner = runner_of(width, **more)
    stage = next(iter(runner.replica.stages.values()))
    seen: list[torch.Tensor] = []
    stage.layers["1"].register_forward_hook(lambda module, inputs, output: seen.append(output.detach().clone()))
    batch = runner.loader.load(0, 4)
    for _ in range(4):
        runner.stepper.step(batch, before=runner.progress, batch_size=4)
    return float((seen[-4] - seen[0]).square().mean().sqrt())  # of the first of four microbatches


def test_effect_of_steps_does_not_grow_with_the_width() -> None:
    mup = {"use_mup": True, "mup_base_hidden_size": 32}
    ours, others = ([change_of_features(width, **more) for width in WIDTHS] for more in (mup, {}))
    assert max(ours) < 2 * min(ours), ours
    assert others[-1] > 3 * others[0], others
