"""Promise 1: parallelism changes the speed, never the numbers.

In float64 each layout of the list trains five steps on samples with uneven masks; loss, gradient norm, every gradient
of every step and every weight after them must equal the one-rank run's to 1e-9 relative.
"""

import functools
from typing import Any

import numpy as np
import pytest

from tests.parity.layouts import FAMILIES, LAYOUTS
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Part, Runner, assemble, build, local_parts, tiny_config

STEPS = 5
TOLERANCE = 1e-9

Trajectory = dict[str, Any]


def trajectory(context: RankContext, world_size: int, settings: dict[str, Any]) -> Trajectory:
    """Train on this rank; its slices of gradients after each step and of weights at the end."""
    runner = Runner(build(context, tiny_config(world_size, **settings)))
    results, grads = [], []
    for _ in range(STEPS):
        results.append(runner.step())
        grads.append(local_parts(runner.replica, "grad"))
    return {
        "loss": [result.loss for result in results],
        "grad_norm": [result.grad_norm for result in results],
        "grads": grads,
        "weights": local_parts(runner.replica, "weight"),
        "evaluation": runner.evaluate(),
    }


@functools.cache
def one_rank(family: str) -> Trajectory:
    """The reference, full tensors."""
    return whole([trajectory(RankContext(0, {}), 1, FAMILIES[family])])


def whole(ranks: list[Trajectory]) -> Trajectory:
    """Assemble full tensors; the scalars must be the same on every rank."""
    for name in ("loss", "grad_norm", "evaluation"):
        for rank in ranks[1:]:
            assert rank[name] == ranks[0][name], f"{name} differs between ranks"
    grads: list[list[dict[str, Part]]] = [[rank["grads"][step] for rank in ranks] for step in range(STEPS)]
    return {
        **{name: ranks[0][name] for name in ("loss", "grad_norm", "evaluation")},
        "grads": [assemble(parts) for parts in grads],
        "weights": assemble([rank["weights"] for rank in ranks]),
    }


def worst_difference(ours: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> tuple[float, str]:
    """Largest |difference| of any element relative to its tensor's largest magnitude, and the tensor's name."""
    assert ours.keys() == reference.keys()
    return max(
        (np.abs(ours[name] - r).max() / max(np.abs(r).max(), 1e-30), name) for name, r in reference.items()
    )


def assert_same_numbers(ours: Trajectory, reference: Trajectory) -> None:
    """Losses, norms, every gradient of every step and every weight after them, to `TOLERANCE`."""
    for name in ("loss", "grad_norm", "evaluation"):
        np.testing.assert_allclose(ours[name], reference[name], rtol=TOLERANCE, err_msg=name)
    for step in range(STEPS):
        difference, tensor = worst_difference(ours["grads"][step], reference["grads"][step])
        assert difference <= TOLERANCE, f"gradient of {tensor} in step {step + 1}: {difference:.2e}"
    difference, tensor = worst_difference(ours["weights"], reference["weights"])
    assert difference <= TOLERANCE, f"{tensor} after {STEPS} steps: {difference:.2e}"


def _name(row: tuple[str, dict[str, Any]]) -> str:
    family, settings = row
    axes = "-".join(f"{axis}{settings[axis]}" for axis in ("tp", "pp", "vpp", "dp") if settings[axis] > 1)
    extra = "-".join(str(value) for key, value in settings.items() if key not in ("tp", "pp", "vpp", "dp"))
    return f"{family}-{axes}" + (f"-{extra}" if extra else "")


def test_the_list_is_long_enough_and_has_no_repeats() -> None:
    assert len(LAYOUTS) >= 60
    names = [_name(row) for row in LAYOUTS]
    assert len(set(names)) == len(names)


def _world(settings: dict[str, Any]) -> int:
    return settings["tp"] * settings["pp"] * settings["dp"]


# By world size: the pool of ranks joins a new job whenever the size changes.
ROWS = sorted(LAYOUTS, key=lambda row: _world(row[1]))


@pytest.mark.parametrize("row", ROWS, ids=map(_name, ROWS))
def test_layout_gives_the_numbers_of_one_rank(row: tuple[str, dict[str, Any]]) -> None:
    family, settings = row
    world = _world(settings)
    ours = whole(run_ranks(world, trajectory, world, {**FAMILIES[family], **settings}))
    assert_same_numbers(ours, one_rank(family))
