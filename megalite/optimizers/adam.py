"""AdamW over flat shards: torch's fused kernel, one tensor a bucket."""

from collections.abc import Sequence

import torch

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update

STATES = ("exp_avg", "exp_avg_sq")
"""Names of the state tensors, each of the shape of its parameter."""


class AdamW(Optimizer):
    """Decoupled weight decay (arXiv 1711.05101), which norms and biases are left out of."""

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig) -> None:
        self.parameters, self.notes = parameters, []
        groups = [
            {"params": [flat.param for flat in parameters if flat.decay == decay], "decay": decay}
            for decay in (True, False)
        ]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        # Made at once, not at the first step: memory is then known at the start and loading has a place to go.
        for group in self._adam.param_groups:
            for parameter in group["params"]:
                self._adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    **{name: torch.zeros_like(parameter, requires_grad=False) for name in STATES},
                }

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters from their gradients."""
        for group in self._adam.param_groups:
            group["lr"] = update.lr
            group["weight_decay"] = update.weight_decay if group["decay"] else 0.0
        self._adam.step()

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments."""
        return {name: self._adam.state[parameter][name] for name in STATES}

    @property
    def updates(self) -> int:
        """Updates made so far."""
        group = self._adam.param_groups[0]
        return int(self._adam.state[group["params"][0]]["step"].item())

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        for state in self._adam.state.values():
            state["step"].fill_(float(updates))
