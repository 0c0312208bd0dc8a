"""Optimizer kernels of amp_C. They read all tensors of a list as the type of the first, without a check."""

import ctypes
from functools import cache

import amp_C
import torch

from megalite.kernels.optimizer_ops import Direction, norm

CHUNK = 1 << 16
"""Elements a block takes, as apex's own callers have it."""


@cache
def flag(device: torch.device) -> torch.Tensor:
    """int32 [1], which the kernels set when they meet what is not finite. Nothing here reads it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


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
    """See `optimizer_ops.adam`, for fp32; a gradient of another type is copied to fp32 first.

    The kernel takes the betas as fp32: 1 - β₂ of 0.999 is off by 1.3e-5 of itself, and so are the second moments. The
    factor stays on the device, where apex's own scaling wants a number of the host.
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


_UNCORRECTED = 1 << 30
"""A number of updates at which 1 - βᵗ is 1 in fp32 for every β below 1. The corrections of the step that is under way go
into eps and decay instead: the kernel's own, in fp32, is 1.5e-5 off at the second step with β₂ = 0.999."""

_UNCLIPPED = torch.zeros(1), 1.0
"""A norm of all gradients and the largest that it may be. The norm is read by the host: on the device, where the callers of
apex's other functions have it, reading it would end the process."""

_KEEP = 1.0
"""A beta with which a moment stays as it is, but for denormal numbers, which apex is built to take for 0."""

_DECOUPLED_MODE, _NO_CORRECTION = 1, 0


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
    """See `optimizer_ops.lamb_moments`, for fp32 pieces of less than 2^31 elements.

    The second moments are off as in `adam`. The direction u is not, as it is corrected for the betas that they were made
    with.
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
    """See `optimizer_ops.lamb_step`, for fp32."""
    _check(param, exp_avg, exp_avg_sq)
    if param.numel() == 0:
        return
    direction = _direction(step, beta1, beta2, eps)
    # The gradient is multiplied with 1 - β, which is 0: what stands for it must be finite where the moments are.
    lists = [[exp_avg], [param], [exp_avg], [exp_avg_sq]]
    terms = (rate * direction.scale, _KEEP, _KEEP, direction.eps, 1, _DECOUPLED_MODE, _NO_CORRECTION)
    decay = weight_decay / direction.scale
    amp_C.multi_tensor_adam(CHUNK, flag(param.device), lists, *terms, decay)


def _direction(step: int, beta1: float, beta2: float, eps: float) -> Direction:
    """For the betas that the kernels have: what is left of numbers that go through a C++ float."""
    beta1, beta2 = (ctypes.c_float(beta).value for beta in (beta1, beta2))
    return Direction.at(step, beta1=beta1, beta2=beta2, eps=eps)


def _check(*tensors: torch.Tensor) -> None:
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors), "dense fp32 pieces"
