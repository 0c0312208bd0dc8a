"""Test schedule-free AdamW: the paper's three sequences, and which of them is trained, evaluated, saved and resumed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.conversion.native import NativeWeights
from megalite.optimizers.adam import ScheduleFreeAdamW
from megalite.parity.trajectory import local_parts
from megalite.training.replica import consensus
from tests.optimizers.flats import drawn, flats_of, set_gradients, tensors_of, update
from tests.support.ranks import RankContext
from tests.support.state import continued, save_run
from tests.support.tiny import Runner, build, tiny_config

SHAPES = {"matrix": (7, 5), "norm": (5,)}
FREE: dict[str, Any] = {"optimizer": "schedule-free-adamw", "lr_decay_style": "constant"}
BETA1, BETA2, EPS = 0.8, 0.95, 1e-4


def tensors(seed: int) -> dict[str, torch.Tensor]:
    return {name: drawn(seed + i, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def by_the_paper(decayed: str, lrs: list[float]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return y and x after steps with these learning rates, with all sequences stored separately."""
    z, x, v = tensors(0), tensors(0), {name: torch.zeros(shape).double() for name, shape in SHAPES.items()}
    y = {}
    for t, lr in enumerate(lrs, start=1):
        weights = [max(lrs[: i + 1]) ** 2 for i in range(t)]
        c = weights[-1] / sum(weights)
        for name, gradient in tensors(100 * t).items():
            y[name] = (1 - BETA1) * z[name] + BETA1 * x[name]
            v[name] = BETA2 * v[name] + (1 - BETA2) * gradient**2
            direction = gradient / ((v[name] / (1 - BETA2**t)).sqrt() + EPS)
            direction = direction + (update(t).weight_decay * y[name] if name == decayed else 0.0)
            z[name] = z[name] - lr * direction
            x[name] = (1 - c) * x[name] + c * z[name]
            y[name] = (1 - BETA1) * z[name] + BETA1 * x[name]
    return y, x


def test_sequences_equal_the_paper() -> None:
    lrs = [0.01, 0.03, 0.05, 0.05, 0.02]
    config = OptimizerConfig(**FREE, adam_beta1=BETA1, adam_beta2=BETA2, adam_eps=EPS)
    ours = ScheduleFreeAdamW(flats_of(tensors(0), ["matrix"]), config)
    for step, lr in enumerate(lrs, start=1):
        set_gradients(ours.parameters, tensors(100 * step))
        ours.step(type(update(1))(step=step, lr=lr, weight_decay=update(step).weight_decay))
    y, x = by_the_paper("matrix", lrs)
    for flat in ours.parameters:
        for name, values in tensors_of(flat).items():
            torch.testing.assert_close(values, y[name], rtol=1e-12, atol=1e-12)
        for name, values in tensors_of(flat, ours.evaluated(flat.param)).items():
            torch.testing.assert_close(values, x[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_average_is_saved_for_readers_and_training_resumes(precision: str, tmp_path: Path) -> None:
    config = tiny_config(1, **FREE, num_layers=2, precision=precision)
    runner = Runner(build(RankContext(0), config))
    for _ in range(3):
        runner.step()
    save_run(runner, tmp_path)
    replica, read = runner.replica, NativeWeights(tmp_path)
    trained, z = (local_parts(replica, kind) for kind in ("main_param", "z"))
    with consensus(replica):
        evaluated = local_parts(replica, "weight")
    for name, (_, _, y) in trained.items():
        average = (torch.tensor(y) - 0.1 * torch.tensor(z[name][2])) / 0.9
        torch.testing.assert_close(torch.tensor(evaluated[name][2]), average, rtol=1e-2, atol=1e-3)
        assert np.array_equal(read.read(name).float().numpy(), evaluated[name][2]), name
        assert not np.array_equal(evaluated[name][2], local_parts(replica, "weight")[name][2]), name
    changes = {"load": str(tmp_path), "finetune": True, "num_layers": 2, "precision": precision}
    others = continued(RankContext(0), tiny_config(1, **changes), tmp_path).replica
    for name, (_, _, values) in local_parts(others, "weight").items():
        assert np.array_equal(values, evaluated[name][2]), "another optimizer starts from the average"


def test_run_of_adam_continues_with_schedule_free(tmp_path: Path) -> None:
    runner = Runner(build(RankContext(0), tiny_config(1, num_layers=2)))
    runner.step()
    save_run(runner, tmp_path)
    other = continued(RankContext(0), tiny_config(1, **FREE, num_layers=2, load=str(tmp_path)), tmp_path)
    for kind in ("z", "main_param"):
        for name, (_, _, values) in local_parts(other.replica, kind).items():
            assert np.array_equal(values, local_parts(runner.replica, "main_param")[name][2]), name
    other.step()
