"""Both halves of a LAMB step by functions of amp_C.

apex's FusedLAMB is not used: its ratio has no bounds and its norms are of what one rank holds. It is made of two functions
that do not mind. The first, `multi_tensor_lamb_stage1_cuda`, makes moments and direction. The second reads the direction
of all parameters, which would be four bytes more for each of them, or apex's way, in the place of the gradients. It is made
again instead, and `multi_tensor_adam` does that if its betas are 1.
"""

import amp_C
import torch

from megalite.kernels.apex.multi_tensor import CHUNK, as_float, flag
from megalite.kernels.lamb import Direction, norm

_UNCORRECTED = 1 << 30
"""A number of updates at which 1 - βᵗ is 1 in fp32 for every β below 1. The corrections of the step that is under way go
into eps and decay instead: the kernel's own, in fp32, is 1.5e-5 off at the second step with β₂ = 0.999."""

_UNCLIPPED = torch.zeros(1), 1.0
"""A norm of all gradients and the largest that it may be. The norm is read by the host: on the device, where the callers of
apex's other functions have it, reading it would end the process."""

_KEEP = 1.0
"""A beta with which a moment stays as it is, but for denormal numbers, which apex is built to take for 0."""

_DECOUPLED, _NO_CORRECTION = 1, 0


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
    """In place: both moments take the gradient, which stays as it is.

    The kernel takes the betas as fp32: 1 - β₂ of 0.999 is off by 1.3e-5 of itself, and so are the second moments. The
    direction u = m̂/(√v̂ + ε) + weight_decay·x is not, as it is corrected for the betas that they were made with.

    Args:
        param, grad, exp_avg, exp_avg_sq: [n] in fp32; a piece of flat buffers, of less than 2^31 elements.
        step: number of this update, from 1.

    Returns:
        (‖x‖, ‖u‖) of the piece, fp64 [] on its device, if `norms` are wanted; else nothing.
    """
    _check(param, grad, exp_avg, exp_avg_sq)
    direction = _direction(step, beta1, beta2, eps)
    u = torch.empty_like(param)  # u/scale
    if param.numel() > 0:
        decay = torch.full((1,), weight_decay / direction.scale, dtype=torch.float32, device=param.device)
        lists = [[grad], [param], [exp_avg], [exp_avg_sq], [u]]
        terms = (decay, _UNCORRECTED, beta1, beta2, direction.eps, *_UNCLIPPED)
        amp_C.multi_tensor_lamb_stage1_cuda(CHUNK, flag(param.device), lists, *terms)
    return (norm(param), norm(u) * direction.scale) if norms else ()


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
        param, exp_avg, exp_avg_sq: [n] in fp32; a piece of flat buffers.
        rate: learning rate times trust ratio.
        step: number of this update, from 1.
    """
    _check(param, exp_avg, exp_avg_sq)
    if param.numel() == 0:
        return
    direction = _direction(step, beta1, beta2, eps)
    # The gradient is multiplied with 1 - β, which is 0: what stands for it must be finite where the moments are.
    lists = [[exp_avg], [param], [exp_avg], [exp_avg_sq]]
    terms = (rate * direction.scale, _KEEP, _KEEP, direction.eps, 1, _DECOUPLED, _NO_CORRECTION)
    decay = weight_decay / direction.scale
    amp_C.multi_tensor_adam(CHUNK, flag(param.device), lists, *terms, decay)


def _direction(step: int, beta1: float, beta2: float, eps: float) -> Direction:
    """For the betas that the kernels have."""
    return Direction.at(step, beta1=as_float(beta1), beta2=as_float(beta2), eps=eps)


def _check(*tensors: torch.Tensor) -> None:
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors), "dense fp32 pieces"
