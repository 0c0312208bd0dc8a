"""A LAMB step over a piece of one tensor, in two halves: between them norms are summed over whole tensors and all ranks."""

import math
from dataclasses import dataclass

import torch

ROW = 1 << 10
"""Elements whose squares are added up in their own precision."""


def norm(values: torch.Tensor) -> torch.Tensor:
    """‖v‖ of a flat tensor, fp64 []. Row by row, as a plain fp32 sum on a CPU loses digits, most where all are alike."""
    whole = values.numel() // ROW * ROW
    rows = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1)
    if whole < values.numel():
        rows = torch.cat([rows, torch.linalg.vector_norm(values[whole:]).view(1)])
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


@dataclass(frozen=True, kw_only=True)
class Direction:
    """m̂/(√v̂ + ε) = scale·m/(√v + eps) in one update."""

    scale: float
    """√(1 - β₂ᵗ)/(1 - β₁ᵗ)"""
    eps: float
    """ε·√(1 - β₂ᵗ)"""

    @classmethod
    def at(
        cls, step: int, *, beta1: float, beta2: float, eps: float, frozen: int | None = None
    ) -> "Direction":
        """With the bias corrections of update number `step`, from 1.

        Args:
            frozen: updates that v has had, where it has not had all.
        """
        below = math.sqrt(1.0 - beta2 ** (step if frozen is None else frozen))
        return cls(scale=below / (1.0 - beta1**step), eps=eps * below)

    def add_to(
        self, values: torch.Tensor, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor, *, factor: float = 1.0
    ) -> torch.Tensor:
        """In place: values + factor·m̂/(√v̂ + ε)."""
        return values.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(self.eps), value=factor * self.scale)


def lamb_moments(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    norms: bool,
) -> tuple[torch.Tensor, ...]:
    """In place: both moments take the gradient, which stays as it is. The direction u = m̂/(√v̂ + ε) + weight_decay·x is
    not kept: it would be as large as the parameters, so `lamb_step` makes it again.

    Args:
        param, grad, exp_avg, exp_avg_sq: [n] of one type; a piece of flat buffers.
        step: number of this update, from 1.

    Returns:
        (‖x‖, ‖u‖) of the piece, fp64 [] on its device, if `norms` are wanted; else nothing.
    """
    exp_avg.lerp_(grad, 1.0 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    if not norms:
        return ()
    direction = Direction.at(step, beta1=beta1, beta2=beta2, eps=eps)
    u = direction.add_to(param * weight_decay, exp_avg, exp_avg_sq)
    return norm(param), norm(u)


def lamb_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """In place: x - rate·u, with u of the moments as `lamb_moments` has left them.

    Args:
        param, exp_avg, exp_avg_sq: [n] of one type; a piece of flat buffers.
        rate: learning rate times trust ratio.
        step: number of this update, from 1.
    """
    if weight_decay != 0.0:
        param.mul_(1.0 - rate * weight_decay)
    direction = Direction.at(step, beta1=beta1, beta2=beta2, eps=eps)
    direction.add_to(param, exp_avg, exp_avg_sq, factor=-rate)
