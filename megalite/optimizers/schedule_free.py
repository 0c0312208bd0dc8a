"""Implement schedule-free AdamW, which averages all steps instead of decaying the learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import CPU_PIECE, DEVICE_PIECE
from megalite.optimizers.base import Exchange, FlatParameter, Optimizer, Update


class ScheduleFreeAdamW(Optimizer):
    """Steps as in arXiv 2405.15682 and its authors' package `schedulefree` (bias correction of v, w = largest lr so far):

        y = (1-β₁)z + β₁x                            the trained parameters, at which gradients g are taken
        v = β₂v + (1-β₂)g²,   u = g/(√(v/(1-β₂ᵗ)) + ε) + λy
        z ← z - lr·u,   x ← (1-c)x + c·z,   c = w²/Σw²

    The parameters are y, and z is a state; x = (y - (1-β₁)z)/β₁ is evaluated, saved and exported. Checkpoints contain x as
    the weights, and y as the state `train_param`: a run resumes bit for bit, and other readers of weights get x.
    """

    from_parameters = Optimizer.from_parameters | {"z", "train_param"}

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig) -> None:
        super().__init__(parameters, config)
        for flat in parameters:
            self._states[flat.param]["z"].copy_(flat.param.data)
        self._largest_lr = self._squares = 0.0  # w and Σw²

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        assert exchange is None, "schedule-free AdamW needs reduced gradients"
        c = self.config
        self.updates += 1
        self._largest_lr = max(self._largest_lr, update.lr)
        self._squares += self._largest_lr**2
        share = self._largest_lr**2 / self._squares if self._squares else 0.0
        for flat in self.parameters:
            piece = CPU_PIECE if flat.param.device.type == "cpu" else DEVICE_PIECE
            states, lr = self._states[flat.param], update.rate(flat)
            flats = (flat.param.data, flat.grad, states["z"], states["exp_avg_sq"])
            for y, grad, z, v in zip(*(values.split(piece) for values in flats), strict=True):
                v.mul_(c.adam_beta2).addcmul_(grad, grad, value=1.0 - c.adam_beta2)
                step = torch.div(v, 1.0 - c.adam_beta2**self.updates).sqrt_().add_(c.adam_eps).reciprocal_().mul_(grad)
                if flat.decay and update.weight_decay:
                    step.add_(y, alpha=update.weight_decay)
                y.lerp_(z, share).add_(step, alpha=lr * (c.adam_beta1 * (1.0 - share) - 1.0))
                z.sub_(step, alpha=lr)

    def evaluated(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        return parameter.data.lerp(self._states[parameter]["z"], 1.0 - 1.0 / self.config.adam_beta1)

    def counters(self) -> dict[str, Any]:
        return {"largest_lr": self._largest_lr, "squares_of_lr": self._squares}

    def load_counters(self, counters: Mapping[str, Any]) -> None:
        self._largest_lr = float(counters.get("largest_lr", 0.0))
        self._squares = float(counters.get("squares_of_lr", 0.0))
