"""One AdamW update of a flat tensor."""

import torch
from torch.optim.adamw import adamw


def adam(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    factor: torch.Tensor | None,
    copy: torch.Tensor | None,
) -> None:
    """In place: AdamW with decoupled decay (arXiv 1711.05101), by torch's fused kernel.

    Args:
        param, grad, exp_avg, exp_avg_sq: [n] of one type.
        step: number of this update, from 1.
        factor: [], multiplied to the gradient, which it may change; None: 1.
        copy: [n], gets the new parameters, rounded to its type.
    """
    if factor is not None:
        grad.mul_(factor)
    adamw(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.full((), step - 1, dtype=torch.float32, device=param.device)],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=lr,
        weight_decay=weight_decay,
        eps=eps,
        maximize=False,
    )
    if copy is not None:
        copy.copy_(param)
