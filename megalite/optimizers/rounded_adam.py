"""AdamW with bf16 moments: 2 bytes of each instead of 4, updated in fp32 and rounded, a piece at a time."""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from megalite.config.optimizer import OptimizerConfig
from megalite.optimizers.adam import STATES
from megalite.optimizers.base import Exchange, Optimizer
from megalite.optimizers.flat import FlatParameter, Update
from megalite.optimizers.rounding import random_bits, round_to

CPU_PIECE, DEVICE_PIECE = 1 << 18, 1 << 23
"""Elements that are worked on at a time: what fits into a cache, or what keeps a device busy."""


class RoundedAdamW(Optimizer):
    """The arithmetic is that of `AdamW`, torch's fused kernel in fp32. A bf16 moment is rounded once an update.

    To the nearest, a second moment with beta2 above 1 - 2^-8 stands still: an update changes it by less than half of its
    last bit. Stochastic rounding keeps its expectation (arXiv 2010.06192).

    Args:
        seed: of the random bits.
    """

    def __init__(self, parameters: Sequence[FlatParameter], config: OptimizerConfig, *, seed: int) -> None:
        self.parameters, self.notes = parameters, []
        self._config, self._seed = config, seed
        self._updates = 0
        dtypes = (config.exp_avg_dtype, config.exp_avg_sq_dtype)
        self._states = {
            flat.param: {
                name: torch.zeros_like(
                    flat.param, dtype=torch.bfloat16 if dtype == "bf16" else None, requires_grad=False
                )
                for name, dtype in zip(STATES, dtypes, strict=True)
            }
            for flat in parameters
        }

    @torch.no_grad()
    def step(self, update: Update, exchange: Exchange | None = None) -> None:
        """Update all parameters from their gradients."""
        for flat in self.parameters:
            piece = CPU_PIECE if flat.param.device.type == "cpu" else DEVICE_PIECE
            for start in range(0, flat.param.numel(), piece):
                self._step_piece(flat, start, min(start + piece, flat.param.numel()), update)
        self._updates += 1

    def _step_piece(self, flat: FlatParameter, start: int, stop: int, update: Update) -> None:
        config, grad = self._config, flat.param.grad
        assert grad is not None
        kept = [values[start:stop] for values in self._states[flat.param].values()]
        moments = [values.float() if values.dtype == torch.bfloat16 else values for values in kept]
        adamw(
            [flat.param.data[start:stop]],
            [grad[start:stop]],
            [moments[0]],
            [moments[1]],
            [],
            [torch.tensor(float(self._updates), device=grad.device)],
            fused=True,
            amsgrad=False,
            beta1=config.adam_beta1,
            beta2=config.adam_beta2,
            lr=update.lr,
            weight_decay=update.weight_decay if flat.decay else 0.0,
            eps=config.adam_eps,
            maximize=False,
        )
        if not config.stochastic_rounding:
            for target, values in zip(kept, moments, strict=True):
                if target.dtype != values.dtype:
                    target.copy_(values)
            return
        bits = torch.zeros(stop - start, dtype=torch.int32, device=grad.device)
        random_bits(flat, start, stop, seed=self._seed, step=update.step, out=bits)
        # One half of the bits for each moment.
        for target, values, shift in zip(kept, moments, (0, 16), strict=True):
            if target.dtype != values.dtype:
                round_to(target, values, bits.bitwise_right_shift(shift))

    def state(self, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The two moments."""
        return dict(self._states[parameter])

    @property
    def updates(self) -> int:
        """Updates made so far."""
        return self._updates

    def set_updates(self, updates: int) -> None:
        """Go on as if `updates` updates had been made."""
        self._updates = updates
