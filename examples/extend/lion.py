"""A custom optimizer: Lion (Chen et al. 2023, arXiv 2302.06675), with one state where Adam has two."""

import torch

from megalite import OPTIMIZERS, Optimizer
from megalite.optimizers.base import Exchange, Update


@OPTIMIZERS.register("lion", states=("exp_avg",), settings="adam_beta1 adam_beta2")
class Lion(Optimizer):
    """x ← (1 - lr·λ)x - lr·sign(β₁m + (1-β₁)g), then m ← β₂m + (1-β₂)g.

    It gets flat parameters, each with pieces of many tensors: what works element by element gives the same numbers on
    every layout. The state is made, sharded, saved and loaded by megalite; `states` is what dry run and planner count.
    """

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        for flat in self.parameters:
            values, rate = flat.param.data, update.rate(flat)
            momentum = self.state(flat.param)["exp_avg"]
            if flat.decay:
                values.mul_(1.0 - rate * update.weight_decay)
            values.add_(torch.lerp(flat.grad, momentum, beta1).sign_(), alpha=-rate)
            momentum.lerp_(flat.grad, 1.0 - beta2)
        self.updates += 1
