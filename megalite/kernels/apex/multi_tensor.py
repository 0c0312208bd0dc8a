"""Adapters to amp_C's optimizer kernels, which read all tensors of a list as the type of the first, without a check."""

import ctypes
from functools import cache
from typing import Unpack

import amp_C
import torch
from torch import Tensor

from megalite.kernels.optimizer_ops import AdamSettings, Direction, MomentSettings, norm

CHUNK = 1 << 16  # elements per block, as in apex's own calls


@cache
def flag(device: torch.device) -> Tensor:
    """Return the int32 [1] that kernels set at a value that is not finite. It is never read here."""
    return torch.zeros(1, dtype=torch.int32, device=device)


_DECOUPLED, _CORRECTED, _UNCORRECTED = 1, 1, 0
"""Modes of amp_C's Adam: decoupled weight decay; moments with or without bias correction."""


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

    The kernel uses fp32 betas: for β₂ = 0.999, 1 - β₂ and the second moments have a relative error of 1.3e-5. The
    factor stays on the device, whereas apex's own scaling requires a host number.
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
"""A step number at which 1 - βᵗ is 1 in fp32 for every β below 1. The actual bias corrections go into eps and decay,
because the kernel's own, in fp32, have an error of 1.5e-5 at the second step with β₂ = 0.999."""

_UNCLIPPED = torch.zeros(1), 1.0
"""Gradient norm and its limit. The kernel's host code reads the norm, so it must be a CPU tensor: a device tensor,
which apex's other functions take, would crash the process."""

_KEEP = 1.0  # a beta that leaves a moment unchanged, except denormal numbers, which apex's build flushes to 0


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

    The second moments have the error described in `adam`. The direction u has not, because it is corrected with the
    same rounded betas.
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
    # The gradient is multiplied by 1 - β = 0, so any tensor works that is finite if the moments are.
    lists = [[exp_avg], [param], [exp_avg], [exp_avg_sq]]
    terms = (rate * direction.scale, _KEEP, _KEEP, direction.eps, 1, _DECOUPLED, _UNCORRECTED)
    amp_C.multi_tensor_adam(CHUNK, flag(param.device), lists, *terms, weight_decay / direction.scale)


def _direction(settings: MomentSettings) -> Direction:
    """Return the direction for the kernels' betas, which are rounded to fp32."""
    beta1, beta2 = (ctypes.c_float(beta).value for beta in (settings["beta1"], settings["beta2"]))
    return Direction.at(settings["step"], beta1=beta1, beta2=beta2, eps=settings["eps"])


def _check(*tensors: Tensor) -> None:
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors), "expected contiguous fp32 pieces"
