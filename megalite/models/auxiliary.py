"""Terms that layers add to the objective beside the token loss."""

from typing import Any

import torch

LOAD_BALANCING_LOSS = "load_balancing_loss"
Z_LOSS = "z_loss"
NAMES = (LOAD_BALANCING_LOSS, Z_LOSS)
"""Every term there is, in the order in which they are reported."""


class AuxiliaryLosses:
    """What the layers of this rank have added to the objective in one step, and how they add to it.

    A term is a sum over the sequences or tokens of this rank alone, times `per_sequence` or `per_token`: so plain
    sums over microbatches and ranks make the whole, as they do for the token loss.

    Args:
        per_sequence: 1 / sequences of the global batch.
        per_token: 1 / tokens of the global batch, masked or not.
        scale: what the step's loss is multiplied with (fp16).
    """

    def __init__(self, per_sequence: float, per_token: float, scale: float, device: torch.device) -> None:
        self.per_sequence, self.per_token, self.scale = per_sequence, per_token, scale
        self.totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in NAMES}
        """By name, this rank's part of the unscaled term, of all layers and microbatches whose backward has run."""

    def attach(self, x: torch.Tensor, name: str, value: torch.Tensor) -> torch.Tensor:
        """Add the scalar `value`, already weighted, to the objective; returns x, which must take part in the loss.

        Its gradient enters when that of x passes. That is also when the value is counted: the backward runs once
        for each microbatch, also where recompute runs the forward twice.

        Collectives: none.
        """
        return _Attach.apply(x, value, self, name)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, value: torch.Tensor, losses: AuxiliaryLosses, name: str
    ) -> torch.Tensor:
        ctx.save_for_backward(value)
        ctx.losses, ctx.name = losses, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        (value,), losses = ctx.saved_tensors, ctx.losses
        losses.totals[ctx.name] += value.detach().double()
        return grad, torch.full_like(value, losses.scale), None, None
