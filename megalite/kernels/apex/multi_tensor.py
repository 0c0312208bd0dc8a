"""Optimizer kernels of amp_C. They read all tensors of a list as the type of the first, without a check."""

import ctypes
from functools import cache
from typing import Unpack

import amp_C
import torch
from torch import Tensor

from megalite.kernels.optimizer_ops import AdamSettings, Direction, MomentSettings, norm

CHUNK = 1 << 16  # elements a block takes, as apex's own callers have it


@cache
def flag(device: torch.device) -> Tensor:
    """int32 [1], which the kernels set when they meet what is not finite. Nothing here reads it."""
    return torch.zeros(1, dtype=torch.int32, device=device)


_DECOUPLED, _CORRECTED, _UNCORRECTED = 1, 1, 0
"""Of amp_C's Adam: decay is no part of the gradient; moments are bias-corrected, or not."""


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    factor: Tensor | None,
    copy: Tensor | None,
    **settings: Unpack[AdamSettings],
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
    numbers = (settings[name] for name in ("lr", "beta1", "beta2", "eps", "step"))
    modes = _DECOUPLED, _CORRECTED, settings["weight_decay"]
    amp_C.multi_tensor_adam(CHUNK, flag(param.device), lists, *numbers, *modes)
    if copy is not None:
        copy.copy_(param)


_LATE = 1 << 30
"""A number of updates at which 1 - βᵗ is 1 in fp32 for every β below 1. The corrections of the step that is under way go
into eps and decay instead: the kernel's own, in fp32, is 1.5e-5 off at the second step with β₂ = 0.999."""

_UNCLIPPED = torch.zeros(1), 1.0
"""A norm of all gradients and the largest that it may be. The norm is read by the host: on the device, where the callers of
apex's other functions have it, reading it would end the process."""

_KEEP = 1.0  # a beta with which a moment stays as it is, but for denormal numbers, which apex is built to take for 0


def lamb_moments(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    norms: bool,
    weight_decay: float,
    **settings: Unpack[MomentSettings],
) -> tuple[Tensor, ...]:
    """See `optimizer_ops.lamb_moments`, for fp32 pieces of less than 2^31 elements.

    The second moments are off as in `adam`. The direction u is not, as it is corrected for the betas that they were made
    with.
    """
    _check(param, grad, exp_avg, exp_avg_sq)
    direction = _direction(settings)
    u = torch.empty_like(param)  # u/scale
    if param.numel() > 0:
        decay = torch.full((1,), weight_decay / direction.scale, dtype=torch.float32, device=param.device)
        lists = [[grad], [param], [exp_avg], [exp_avg_sq], [u]]
        terms = (decay, _LATE, settings["beta1"], settings["beta2"], direction.eps, *_UNCLIPPED)
        amp_C.multi_tensor_lamb_stage1_cuda(CHUNK, flag(param.device), lists, *terms)
    return (norm(param), norm(u) * direction.scale) if norms else ()


def lamb_step(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    rate: float,
    weight_decay: float,
    **settings: Unpack[MomentSettings],
) -> None:
    """See `optimizer_ops.lamb_step`, for fp32."""
    _check(param, exp_avg, exp_avg_sq)
    if param.numel() == 0:
        return
    direction = _direction(settings)
    # The gradient is multiplied with 1 - β, which is 0: what stands for it must be finite where the moments are.
    lists = [[exp_avg], [param], [exp_avg], [exp_avg_sq]]
    terms = (rate * direction.scale, _KEEP, _KEEP, direction.eps, 1, _DECOUPLED, _UNCORRECTED)
    amp_C.multi_tensor_adam(CHUNK, flag(param.device), lists, *terms, weight_decay / direction.scale)


def _direction(settings: MomentSettings) -> Direction:
    """For the betas that the kernels have: what is left of numbers that go through a C++ float."""
    beta1, beta2 = (ctypes.c_float(beta).value for beta in (settings["beta1"], settings["beta2"]))
    return Direction.at(settings["step"], beta1=beta1, beta2=beta2, eps=settings["eps"])


def _check(*tensors: Tensor) -> None:
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors), "dense fp32 pieces"
