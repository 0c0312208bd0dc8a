"""AdamW by amp_C.multi_tensor_adam.

apex's FusedAdam is not used: it leaves the step to the group, ignores `master_weights` of bf16 parameters, and takes a
gradient of another type than its parameter for one of the same.
"""

import amp_C
import torch

from megalite.kernels.apex.multi_tensor import CHUNK, flag

_DECOUPLED = 1
"""Mode: decay is no part of the gradient."""


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
    """In place: AdamW with decoupled decay (arXiv 1711.05101).

    The kernel takes the betas as fp32: 1 - β₂ of 0.999 is off by 1.3e-5 of itself, and so are the second moments.

    Args:
        param, exp_avg, exp_avg_sq: [n] in fp32.
        grad: [n]; another type is copied to fp32 first.
        step: number of this update, from 1.
        factor: [], multiplied to the gradient, which it may change; None: 1. On the device, where apex's own scaling
            wants a number of the host.
        copy: [n], gets the new parameters, rounded to its type.
    """
    assert param.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32, param.dtype
    if param.numel() == 0:
        return
    grad = grad.float()
    if factor is not None:
        grad.mul_(factor)
    lists = [[grad.contiguous()], [param], [exp_avg], [exp_avg_sq]]
    settings = (lr, beta1, beta2, eps, step, _DECOUPLED, 1, weight_decay)
    amp_C.multi_tensor_adam(CHUNK, flag(param.device), lists, *settings)
    if copy is not None:
        copy.copy_(param)
