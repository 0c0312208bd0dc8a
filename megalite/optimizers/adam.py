"""AdamW over flat shards, one tensor a bucket."""

from collections.abc import Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.kernels.registry import Kernels
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update

STATES = ("exp_avg", "exp_avg_sq")
"""Names of the state tensors, each of the shape of its parameter."""


class AdamW(Optimizer):
    """Decoupled weight decay (arXiv 1711.05101), which norms and biases are left out of.

    Args:
        kernels: where the kernel comes from; it also clips, and rounds the new parameters to the model's precision.
    """

    applies_factor = True
    writes_copies = True

    def __init__(
        self,
        parameters: Sequence[FlatParameter],
        config: OptimizerConfig,
        kernels: Kernels | None = None,
    ) -> None:
        self.parameters, self.notes = parameters, []
        self._config, self._updates = config, 0
        # Made at once, not at the first step: memory is then known at the start and loading has a place to go.
        self._states = {
            flat.param: {name: torch.zeros_like(flat.param, requires_grad=False) for name in STATES}
            for flat in parameters
        }
        kernels = kernels or Kernels()
        self._kernels = [
            kernels.get("adam", device=flat.param.device, dtype=flat.param.dtype, size=flat.param.numel())
            for flat in parameters
        ]

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters from their gradients."""
        self._updates += 1
        for flat, kernel in zip(self.parameters, self._kernels, strict=True):
            param = flat.param
            factor = None
            if update.factor != 1.0:
                factor = torch.full((), update.factor, dtype=param.dtype, device=param.device)
            kernel(
                param.data,
                param.grad,
                *(self._states[param][name] for name in STATES),
                lr=update.lr,
                beta1=self._config.adam_beta1,
                beta2=self._config.adam_beta2,
                eps=self._config.adam_eps,
                weight_decay=update.weight_decay if flat.decay else 0.0,
                step=self._updates,
                factor=factor,
                copy=update.copies.get(param),
            )

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments."""
        return self._states[parameter]

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._updates

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        self._updates = updates
