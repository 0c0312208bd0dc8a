"""AdamW over flat shards: torch's fused kernel, one tensor a bucket."""

from collections.abc import Iterable

import torch

from megalite.config.optimizer import OptimizerConfig

STATES = ("exp_avg", "exp_avg_sq")
"""Names of the state tensors, each of the shape of its parameter."""


class AdamW:
    """Decoupled weight decay (arXiv 1711.05101), which norms and biases are left out of.

    Args:
        decayed, undecayed: flat main parameters whose `.grad` is set.
    """

    def __init__(
        self,
        decayed: Iterable[torch.nn.Parameter],
        undecayed: Iterable[torch.nn.Parameter],
        config: OptimizerConfig,
    ) -> None:
        groups = [{"params": list(decayed), "decay": True}, {"params": list(undecayed), "decay": False}]
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
    def step(self, *, lr: float, weight_decay: float) -> None:
        """Update all parameters from their gradients."""
        for group in self._adam.param_groups:
            group["lr"] = lr
            group["weight_decay"] = weight_decay if group["decay"] else 0.0
        self._adam.step()

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state tensors of one parameter, by name; writing into them changes the state."""
        return {name: self._adam.state[parameter][name] for name in STATES}

    @property
    def updates(self) -> int:
        """Updates made so far; bias correction depends on it. With fp16 it is less than the number of steps."""
        group = self._adam.param_groups[0]
        return int(self._adam.state[group["params"][0]]["step"].item())

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        for state in self._adam.state.values():
            state["step"].fill_(float(updates))
