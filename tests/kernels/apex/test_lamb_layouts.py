"""Whole steps with LAMB by apex's functions, as the registry hands them out, in several layouts."""

from typing import Any

import numpy as np
import pytest
import torch

from megalite.optimizers.lamb import LAMB
from megalite.parity.tensors import Part, assemble, local_parts
from tests.kernels.apex.conftest import RECORDED, forget
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config

STEPS = 4
SMALL: dict[str, Any] = {
    "num_layers": 2,
    "global_batch_size": 4,
    "optimizer": "lamb",
    "adam_eps": 1e-4,
    "precision": "fp32",
}
ZERO = {"dp_strategy": "distributed-optimizer"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "dp2-zero": (2, ZERO),
    "tp2": (2, {"tp": 2, "sequence_parallel": True}),
    "tp2-dp2-zero": (4, {"tp": 2, **ZERO}),
}

Found = tuple[list[float], dict[str, float], dict[str, Part], str]


def steps(context: RankContext, world: int, settings: dict[str, Any]) -> Found:
    """Losses and norms, the last trust ratios (of LAMB alone), this rank's weights, and what served LAMB."""
    torch.set_num_threads(1)
    runner = Runner(build(context, tiny_config(world, **settings)))
    numbers = []
    for _ in range(STEPS):
        result = runner.step()
        numbers += [result.loss, result.grad_norm]
    optimizer = runner.replica.optimizer
    ratios = optimizer.trust_ratios if isinstance(optimizer, LAMB) else {}
    served = runner.replica.kernels.summary()["lamb"]
    return numbers, ratios, local_parts(runner.replica, "weight"), served


def with_apex(context: RankContext, world: int, settings: dict[str, Any]) -> Found:
    """The same on the stand-ins of apex, which take the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        forget()
        patch.syspath_prepend(RECORDED)
        patch.setattr("megalite.kernels.registry.why_not_apex", lambda device: None)
        found = steps(context, world, {**settings, "kernels": ["lamb=apex"]})
    forget()
    return found


def largest(tensors: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(tensor).max()) for tensor in tensors.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_those_of_one_rank_in_float64(layout: str) -> None:
    """Tensors are cut, and each rank knows the ratios of whole ones."""
    world, settings = LAYOUTS[layout]
    losses, ratios, weights, _ = steps(RankContext(0), 1, {**SMALL, "precision": "fp64"})
    exact = assemble([weights])
    ranks = run_ranks(world, with_apex, world, {**SMALL, **settings})
    assert {served for *_, served in ranks} == {"apex"}
    for ours, our_ratios, _, _ in ranks:
        assert ours == pytest.approx(losses, rel=2e-5)
        assert our_ratios == pytest.approx(ratios, rel=1e-4)
        assert our_ratios == ranks[0][1]
    found = assemble([parts for _, _, parts, _ in ranks])
    assert found.keys() == exact.keys()
    for name, tensor in found.items():
        assert np.abs(tensor - exact[name]).max() < 2e-4 * largest(exact), name


def test_the_warm_up_of_1_bit_lamb_goes_by_it_too() -> None:
    """And the frozen steps go on from its moments: by signs, of which rounding may turn one."""
    settings = {**SMALL, "optimizer": "onebit-lamb", "freeze_step": 2}
    wanted = run_ranks(2, steps, 2, settings)
    found = run_ranks(2, with_apex, 2, settings)
    assert {served for *_, served in wanted} == {"torch"} and {served for *_, served in found} == {"apex"}
    assert found[0][0][:6] == pytest.approx(wanted[0][0][:6], rel=1e-5)
    assert found[0][0][6:] == pytest.approx(wanted[0][0][6:], rel=1e-2)
