"""Stand-in for apex's extension fused_layer_norm_cuda: csrc/layer_norm_cuda.cpp and layer_norm_cuda_kernel.cu."""

from typing import Any

import torch

from tests.kernels.apex.signatures import FLOATS, HALF_TYPES, check_kinds, contiguous, not_empty, of_type, require


def _rows(x: torch.Tensor, sizes: tuple[int, ...], *factors: torch.Tensor) -> torch.Tensor:
    contiguous(x, *factors)
    require(len(sizes) == 1 and tuple(x.shape[-1:]) == tuple(sizes), f"expected input with shape [*, {sizes}]")
    of_type(x, *FLOATS)
    for factor in factors:
        require(tuple(factor.shape) == tuple(sizes), "gamma.sizes().equals(normalized_shape)")
        # For half types, the kernels support only outputs, and so factors, of the inputs' type.
        of_type(factor, x.dtype)
    not_empty(x.numel() // sizes[0])
    require(x.numel() < 2**31, "offsets overflow")
    return x.float().view(-1, sizes[0])


def _statistics(x: torch.Tensor, eps: float, centered: bool) -> tuple[torch.Tensor, torch.Tensor]:
    mean = x.mean(-1) if centered else torch.zeros(x.shape[0])
    return mean, ((x - mean.unsqueeze(-1)).square().mean(-1) + eps).rsqrt()


def _saved(statistic: torch.Tensor, rows: int) -> torch.Tensor:
    contiguous(statistic)
    of_type(statistic, torch.float32)
    require(tuple(statistic.shape) == (rows,), "expected one number per row")
    return statistic.unsqueeze(-1)


def forward_affine(*arguments: Any) -> list[torch.Tensor]:
    check_kinds(arguments, "tsttf")
    x, sizes, gamma, beta, eps = arguments
    rows = _rows(x, sizes, gamma, beta)
    mean, inverse = _statistics(rows, eps, centered=True)
    y = (rows - mean.unsqueeze(-1)) * inverse.unsqueeze(-1) * gamma.float() + beta.float()
    return [y.view(x.shape).to(x.dtype), mean, inverse]


def rms_forward_affine(*arguments: Any) -> list[torch.Tensor]:
    check_kinds(arguments, "tstf")
    x, sizes, gamma, eps = arguments
    rows = _rows(x, sizes, gamma)
    _, inverse = _statistics(rows, eps, centered=False)
    return [(rows * inverse.unsqueeze(-1) * gamma.float()).view(x.shape).to(x.dtype), inverse]


def backward_affine(*arguments: Any) -> list[torch.Tensor]:
    check_kinds(arguments, "tottsttfb")
    grad, mean, inverse, x, sizes, gamma, beta, _, memory_efficient = arguments
    require(not memory_efficient and mean is not None, "expected x and its mean")
    rows, grads = _rows(x, sizes, gamma, beta), _grads(grad, x, gamma)
    normed = (rows - _saved(mean, rows.shape[0])) * _saved(inverse, rows.shape[0])
    inner = grads * gamma.float()
    grad_x = inner - inner.mean(-1, keepdim=True) - normed * (inner * normed).mean(-1, keepdim=True)
    grad_x = (grad_x * inverse.unsqueeze(-1)).view(x.shape).to(x.dtype)
    return [grad_x, (grads * normed).sum(0).to(gamma.dtype), grads.sum(0).to(gamma.dtype)]


def rms_backward_affine(*arguments: Any) -> list[torch.Tensor]:
    check_kinds(arguments, "tttstfb")
    grad, inverse, x, sizes, gamma, _, memory_efficient = arguments
    require(not memory_efficient, "expected x")
    rows, grads = _rows(x, sizes, gamma), _grads(grad, x, gamma)
    normed = rows * _saved(inverse, rows.shape[0])
    inner = grads * gamma.float()
    grad_x = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * inverse.unsqueeze(-1)
    return [grad_x.view(x.shape).to(x.dtype), (grads * normed).sum(0).to(gamma.dtype)]


def _grads(grad: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    contiguous(grad)
    of_type(grad, gamma.dtype)
    require(grad.shape == x.shape, "expected a gradient of the shape of x")
    assert gamma.dtype in (*HALF_TYPES, torch.float32)
    return grad.float().view(-1, x.shape[-1])
