"""Test elements with only rounding noise as gradient, such as key biases, to which softmax is invariant."""

import functools
from typing import Any

import pytest
import torch

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.optimizers.adam import AdamW
from megalite.optimizers.lamb import TensorSums
from megalite.optimizers.onebit import FreezePoint, bound_moments
from megalite.topology.group import Group
from tests.optimizers.flats import flat_of, tensors_of
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

FREEZE, STEPS = 10, 25
MODEL: dict[str, Any] = {
    "num_layers": 1,
    "precision": "fp32",
    "init_method_std": 0.02,
    "train_iters": 2 * (FREEZE + STEPS),
    "lr": 1e-3,
    "weight_decay": 0.0,
    "dp": 2,
    "reduction_order": "rank",
    "micro_batch_size": 4,
}


def moved(context: RankContext, settings: dict[str, Any]) -> dict[str, float]:
    """Return the largest change of an element of each parameter in the steps after the warm-up."""
    runner = Runner(build(context, tiny_config(2, **MODEL, **settings)))
    placed = [each for bucket in runner.replica.strategy.all_buckets() for each in bucket.placed]
    for _ in range(FREEZE):
        runner.step()
    start = [each.parameter.detach().clone() for each in placed]
    farthest = dict.fromkeys((each.parameter.info.spec.name for each in placed), 0.0)
    for _ in range(STEPS):
        runner.step()
        for each, before in zip(placed, start, strict=True):
            far = float((each.parameter.detach() - before).abs().max())
            farthest[each.parameter.info.spec.name] = max(far, farthest[each.parameter.info.spec.name])
    runner.replica.strategy.close()
    return farthest


@functools.cache
def moved_by_adam() -> dict[str, float]:
    return run_ranks(2, moved, {})[0]


KINDS: dict[str, dict[str, Any]] = {
    "onebit-adam": {"optimizer": "onebit-adam", "freeze_step": FREEZE},
    "zero-one-adam": {
        "optimizer": "zero-one-adam",
        "freeze_step": FREEZE,
        "local_step_scaler": 8,
        "local_step_clipper": 8,
    },
    "gradients-by-signs": {"grad_compression": "onebit"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_elements_with_noise_gradients_do_not_move(kind: str) -> None:
    """Compare steps by signs, or by compressed gradients, with as many steps of Adam."""
    found, adam = run_ranks(2, moved, KINDS[kind])[0], moved_by_adam()
    for name, far in found.items():
        assert far <= 10.0 * adam[name], f"{name}: {far:.3g}, with Adam {adam[name]:.3g}"


def test_bounded_moment() -> None:
    """v below a hundredth of its tensor's mean is raised to that, or set to 0 if Adam would hardly move the element."""
    eps, beta2, updates = 1e-8, 0.999, 3
    correction = 1.0 - beta2**updates
    moments = {
        "bias": torch.tensor([4.0, 1e-24, 0.0, 1e-3, 2.0, 1.0]) * correction,
        "quiet": torch.tensor([1e-20, 1e-20, 1e-23]) * correction,
    }
    flat = flat_of(moments, decay=False)
    config = replace(RunConfig(), optimizer="onebit-adam", freeze_step=3, adam_eps=eps, adam_beta2=beta2)
    optimizer = AdamW([flat], config.optimizer)
    state = optimizer.state(flat.param)["exp_avg_sq"]
    state.copy_(flat.param.data)
    freeze = FreezePoint(config, world=Group.solo("world"))
    sums = TensorSums([flat], group=Group.solo("world"), device=torch.device("cpu"))

    def bound() -> dict[str, torch.Tensor]:
        bound_moments(optimizer, sums, freeze, updates=updates, by_bucket=False)
        return {name: values / correction for name, values in tensors_of(flat, state).items()}

    found = bound()
    lowest = 0.01 * 7.001 / 6
    torch.testing.assert_close(found["bias"], torch.tensor([4.0, 0.0, 0.0, lowest, 2.0, 1.0]))
    torch.testing.assert_close(found["quiet"], torch.tensor([1e-20, 1e-20, 0.0]), rtol=1e-5, atol=0.0)
    assert all(torch.equal(values, found[name]) for name, values in bound().items()), "once is enough"
    again = FreezePoint(config, world=Group.solo("world"))
    again.load_counters(freeze.counters())
    assert again.bounded == updates, "a resumed run must not bound them again"
