"""The meaning of numbers for which one rank and every layout could be wrong in the same way."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.models.moe_router import Router
from megalite.optimizers.schedules import Progress
from tests.parity.factors import FAMILIES, LOSSES, Settings, world_of
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, local_parts, tiny_config

DROPOUT: Settings = {"hidden_dropout": 0.3, "attention_dropout": 0.2}


def with_weights_of(runner: Runner, other: Runner) -> Runner:
    """Load the weights of `other` into `runner`, which has no other copy of its weights."""
    for stage, module in other.replica.stages.items():
        for ours, theirs in zip(runner.replica.stages[stage].parameters(), module.parameters(), strict=True):
            ours.data.copy_(theirs.data)
    return runner


def evaluations(context: RankContext, world: int, settings: Settings) -> dict[str, Any]:
    """Losses of evaluations in a run with dropout, and of the same weights in a model without dropout."""
    dropping = tiny_config(world, **DROPOUT, num_layers=2, **settings)
    plain = tiny_config(world, num_layers=2, **settings)
    ours, undisturbed = Runner(build(context, dropping)), Runner(build(context, dropping))
    evaluated, expected, losses = [], [], []
    for _ in range(2):
        other = with_weights_of(Runner(build(context, plain), ours.progress), ours)
        evaluated.append(ours.evaluate())
        expected.append(other.evaluate())
        losses.append((ours.step().loss, undisturbed.step().loss))
    without = with_weights_of(Runner(build(context, plain)), Runner(build(context, dropping))).step().loss
    return {"evaluated": evaluated, "expected": expected, "losses": losses, "without": without}


@cache
def on_one_rank() -> dict[str, Any]:
    return evaluations(RankContext(0), 1, {})


LAYOUTS: dict[str, Settings] = {
    "one": {},
    "tp2-sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2},
    "dp2-zero1": {"dp": 2, "dp_strategy": "distributed-optimizer"},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_evaluation_does_not_use_dropout(name: str) -> None:
    layout, one = LAYOUTS[name], on_one_rank()
    world = world_of(layout)
    found = one if world == 1 else run_ranks(world, evaluations, world, layout)[0]
    assert found["evaluated"] == found["expected"], "bitwise equal"
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=1e-12, err_msg="the same elements fall")
    assert all(ours == undisturbed for ours, undisturbed in found["losses"]), "evaluation does not change steps"
    assert abs(found["losses"][0][0] - found["without"]) > 1e-3, "the steps use dropout"


MIXTURE: Settings = {**FAMILIES["mixtral"], **LOSSES, "num_layers": 2}
RAMP: Settings = {"rampup_batch_size": [4, 4, 12], "global_batch_size": 12, "micro_batch_size": 2}
SIZES = [4, 4, 8, 12]
"""Losses of the first steps."""


class Seen:
    """Inputs and outputs of a router in all microbatches of a step."""

    def __init__(self, runner: Runner) -> None:
        self.sequences: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Per microbatch and layer: logits and choices, [s, b, E] and [s, b, k]."""
        for stage in runner.replica.stages.values():
            for module in stage.modules():
                if isinstance(module, Router):
                    module.register_forward_hook(self._note)

    def _note(self, router: Router, inputs: tuple[torch.Tensor, ...], routing: Any) -> None:
        self.sequences.append((inputs[0].detach() @ router.weight.detach().t(), routing.chosen))

    def auxiliary(self, batch: int) -> dict[str, float]:
        """Both auxiliary losses by definition, each a mean over the sequences or tokens of the batch."""
        balance = z = 0.0
        for logits, chosen in self.sequences:
            experts = logits.shape[2]
            for sample in range(logits.shape[1]):
                share = torch.bincount(chosen[:, sample].flatten(), minlength=experts).double()
                share /= chosen[:, sample].numel()
                balance += float(experts * (share * logits[:, sample].softmax(-1).mean(0)).sum())
                z += float(logits[:, sample].logsumexp(-1).square().mean())
        coefficients = MIXTURE["moe_aux_loss_coeff"], MIXTURE["moe_z_loss_coeff"]
        return {"load_balancing_loss": coefficients[0] * balance / batch, "z_loss": coefficients[1] * z / batch}


def test_ramp_up_step_equals_a_fixed_batch_with_mean_auxiliary_losses() -> None:
    """Each step compared with a run of that fixed batch size from the same weights and samples, and with the definitions."""
    ramping = Runner(build(RankContext(0), tiny_config(1, **MIXTURE, **RAMP)))
    sizes = []
    for _ in SIZES:
        before = ramping.progress.samples
        size = SIZES[len(sizes)]
        fixed_config = tiny_config(1, **MIXTURE, micro_batch_size=2, global_batch_size=size)
        # The first step of a separate run, so that gradients and not Adam's history are compared.
        fixed = Runner(build(RankContext(0), fixed_config), Progress(ramping.progress.step, before))
        seen = Seen(with_weights_of(fixed, ramping))
        theirs, ours = fixed.step(), ramping.step()
        sizes.append(ramping.progress.samples - before)
        assert (ours.loss, ours.grad_norm, ours.auxiliary) == (theirs.loss, theirs.grad_norm, theirs.auxiliary)
        gradients = [local_parts(runner.replica, "grad") for runner in (ramping, fixed)]
        assert all(np.array_equal(gradients[0][name][2], part[2]) for name, part in gradients[1].items())
        assert ours.auxiliary == pytest.approx(seen.auxiliary(size), rel=1e-12)
    assert sizes == SIZES
