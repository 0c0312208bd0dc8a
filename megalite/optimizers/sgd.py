"""SGD with momentum over flat shards: torch's fused kernel, one tensor a bucket."""

from collections.abc import Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update

BUFFER = "momentum_buffer"


class SGD(Optimizer):
    """b = μb + g,  x = (1 - lr·λ)x - lr·b; Nesterov's form steps by g + μb instead of b.

    Weight decay is decoupled, as in AdamW here, and norms and biases are left out of it. torch's SGD adds λx to the
    gradient instead, where momentum piles it up to λ/(1-μ); decoupled, `--weight-decay` means the same with every
    optimizer. The buffer starts at 0 and gradients enter it whole (no dampening), as in torch.
    """

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig) -> None:
        self.parameters, self.notes = parameters, []
        self._updates = 0
        self._has_buffer = config.sgd_momentum != 0.0
        self._sgd = torch.optim.SGD(
            [flat.param for flat in parameters],
            lr=config.lr,
            momentum=config.sgd_momentum,
            nesterov=config.sgd_nesterov,
            fused=True,
        )
        if self._has_buffer:
            for flat in parameters:
                self._sgd.state[flat.param] = {BUFFER: torch.zeros_like(flat.param, requires_grad=False)}

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters from their gradients."""
        assert exchange is None, "SGD goes by reduced gradients"
        self._sgd.param_groups[0]["lr"] = update.lr
        if update.weight_decay != 0.0:
            for flat in self.parameters:
                if flat.decay:
                    flat.param.data.mul_(1.0 - update.lr * update.weight_decay)
        self._sgd.step()
        self._updates += 1

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The momentum; nothing without."""
        return {BUFFER: self._sgd.state[parameter][BUFFER]} if self._has_buffer else {}

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._updates

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made; nothing in the step depends on it."""
        self._updates = updates
