"""Adapters to the kernels of NVIDIA's apex: norms, RoPE, softmax, cross-entropy, weight gradient, AdamW and LAMB.

They call the extensions' functions directly: apex's Python wrappers silently fall back to torch, have other defaults,
and would run the package's code."""

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from megalite.config.errors import ConfigError
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Function
from megalite.kernels.optimizer_ops import AdamSettings, Direction, MomentSettings, norm
from megalite.kernels.probes import extension, softmax_limit

INT_ELEMENTS = 2**31  # with this many elements the C++ int offsets of most kernels overflow


def check_elements(operation: str, x: Tensor) -> None:
    """Raise ConfigError if the kernel cannot address all of `x` with its strides."""
    if sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) >= INT_ELEMENTS:
        raise ConfigError(
            f"kernels: {operation}=apex supports less than 2^31 elements at once, got {list(x.shape)}; "
            f"use {operation}=torch"
        )


class _Norm(Function):
    """RMSNorm, or LayerNorm with a bias; saves x in its own type, the parameters, and one or two numbers per row.

    It never uses `memory_efficient`, which divides by the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool) -> Tensor:
        check_elements("rmsnorm" if bias is None else "layernorm", x)
        ctx.eps, ctx.zero_centered = eps, zero_centered
        if x.numel() == 0:  # an empty grid cannot be launched
            ctx.save_for_backward(x, weight, bias)
            return torch.empty_like(x)
        kernels, x = extension("fused_layer_norm_cuda"), x.contiguous()
        forward = kernels.rms_forward_affine if bias is None else kernels.forward_affine
        parameters = _parameters(weight, bias, zero_centered)
        y, *statistics = forward(_operand(x, zero_centered), weight.shape, *parameters, eps)
        ctx.save_for_backward(x, weight, bias, *statistics)
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *statistics = ctx.saved_tensors
        if x.numel() == 0:
            grad_bias = None if bias is None else torch.zeros_like(bias)
            return torch.empty_like(x), torch.zeros_like(weight), grad_bias, None, None
        kernels = extension("fused_layer_norm_cuda")
        backward = kernels.rms_backward_affine if bias is None else kernels.backward_affine
        operands = _operand(grad.contiguous(), ctx.zero_centered), _operand(x, ctx.zero_centered)
        parameters = _parameters(weight, bias, ctx.zero_centered)
        found = backward(operands[0], *statistics, operands[1], weight.shape, *parameters, ctx.eps, False)
        grad_x, grad_weight, *grad_bias = found
        grad_x, grad_weight = grad_x.to(x.dtype), grad_weight.to(weight.dtype)
        return grad_x, grad_weight, grad_bias[0].to(bias.dtype) if grad_bias else None, None, None


def _parameters(weight: Tensor, bias: Tensor | None, zero_centered: bool) -> tuple[Tensor, ...]:
    """Return factors and bias for the kernel: 1 + weight is never rounded to a half type."""
    factors = weight.contiguous()
    if zero_centered:
        factors = _operand(factors, zero_centered) + 1.0
    return (factors,) if bias is None else (factors, _operand(bias.contiguous(), zero_centered))


def _operand(x: Tensor, zero_centered: bool) -> Tensor:
    """Cast to fp32 if the factors are fp32: for half inputs the kernel supports only factors of the same type."""
    return x.float() if zero_centered and x.dtype in HALF_TYPES else x


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """See `layer_ops.rms_norm`. Half types with `zero_centered` are copied to fp32.

    Raises ConfigError: 2^31 elements or more."""
    return _Norm.apply(x, weight, None, eps, zero_centered)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """See `layer_ops.layer_norm`; otherwise like `rmsnorm`."""
    return _Norm.apply(x, weight, bias, eps, zero_centered)


_full_tables = WeakTensorKeyDictionary()
"""Table of d/2 columns -> table of d columns, shared by the layers of a stage while the first table exists."""


def _full(table: Tensor) -> Tensor:
    """[s, 1, 1, d/2] -> [s, 1, 1, d]: the kernel requires the angle of a pair at both channels."""
    found = _full_tables.get(table)
    if found is None:
        found = _full_tables[table] = torch.cat((table, table), dim=-1).float()
    return found


class _Rope(Function):
    """RoPE that saves only the tables."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return extension("fused_rotary_positional_embedding").forward_cached(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        check_elements("rope", grad)
        kernels = extension("fused_rotary_positional_embedding")
        return kernels.backward_cached(grad, *ctx.saved_tensors, False), None, None


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `layer_ops.apply_rope`. For half types the kernel rounds the tables, each product and the sum; other backends
    round only the sum.

    Raises ConfigError: a separate table per sequence; 2^31 elements or more."""
    if cos.shape[1] != 1:
        raise ConfigError(
            "kernels: rope=apex supports one table for all sequences, but each sequence has other positions "
            "(reset_position_ids, or packing by documents); use rope=torch"
        )
    check_elements("rope", x)
    return _Rope.apply(x, _full(cos), _full(sin)) if x.numel() else x.clone()


def causal_softmax_forward(scores: Tensor, scale: float) -> Tensor:
    """See `attention.causal_softmax_forward`: computed in fp32 and rounded to the scores' type.

    Args:
        scores: [b, heads, s, s] in bf16 or fp16, may be overwritten.
        scale: multiplied with the scores first if their type cannot represent it, because the kernel would round it.

    Raises ConfigError: the kernel does not support the length, or the number of matrices."""
    matrices, length = scores.shape[0] * scores.shape[1], scores.shape[-1]
    reason = softmax_limit(length)
    per_block = 8 if length <= 128 else 4  # matrices per block of the kernel
    if reason is None and matrices % per_block:
        reason = f"it requires a multiple of {per_block} matrices of {length} x {length} scores, but got {matrices}"
    if reason is not None:
        raise ConfigError(f"kernels: softmax=apex cannot be used: {reason}; use softmax=torch")
    if torch.tensor(scale, dtype=scores.dtype).item() != scale:
        scores, scale = scores.mul_(scale), 1.0
    kernels = extension("scaled_upper_triang_masked_softmax_cuda")
    return kernels.forward(scores.flatten(0, 1).contiguous(), scale).view(scores.shape)


def causal_softmax_backward(grad: Tensor, probabilities: Tensor, scale: float) -> Tensor:
    """See `attention.causal_softmax_backward`; overwrites a gradient of the probabilities' type."""
    kernels, rows = extension("scaled_upper_triang_masked_softmax_cuda"), grad.to(probabilities.dtype)
    return kernels.backward(rows.flatten(0, 1), probabilities.flatten(0, 1), scale).view(probabilities.shape)


_NO_SMOOTHING = 0.0


def cross_entropy_forward(logits: Tensor, labels: Tensor, first: int | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """See `cross_entropy.cross_entropy_forward`, for fp32 and fp16 logits. For bf16 the kernel rounds the log-sum-exp.

    The statistics contain log Σ exp z as the maximum, and 1 as the sum. apex.contrib.xentropy is not used, because it
    treats token 0 as padding without a loss."""
    if logits.numel() == 0:
        zeros = logits.new_zeros(logits.shape[0], dtype=torch.float32)
        return torch.stack((zeros, zeros + 1.0, zeros)), (logits, zeros)
    local = labels - (first or 0)
    outside = (local < 0) | (local >= logits.shape[1])
    # The kernel reads the logit at the label without a bounds check.
    logits, inside = logits.contiguous(), local.masked_fill(outside, 0).contiguous()
    kernels = extension("xentropy_cuda")
    losses, log_sum = kernels.forward(logits, inside, _NO_SMOOTHING, logits.dtype == torch.float16)
    picked = losses.neg().masked_fill_(outside, 0.0)
    return torch.stack((log_sum, torch.ones_like(log_sum), picked)), (logits, log_sum)


def cross_entropy_backward(
    saved: Sequence[Tensor], labels: Tensor, first: int | None, logsumexp: Tensor | None, grad: Tensor
) -> Tensor:
    """See `cross_entropy.cross_entropy_backward`; the result is new memory."""
    logits, log_sum = saved
    if logits.numel() == 0:
        return torch.empty_like(logits)
    local = labels - (first or 0)
    # The kernel only compares labels with column numbers, so -1 matches none.
    local = local.masked_fill((local < 0) | (local >= logits.shape[1]), -1).contiguous()
    total = log_sum if logsumexp is None else logsumexp.contiguous()
    kernels = extension("xentropy_cuda")
    return kernels.backward(grad.float().contiguous(), logits, total, local, _NO_SMOOTHING)


def accumulate_weight_grad(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """See `matmul.accumulate_weight_grad`: summed in fp32, added to a main gradient in fp32 or in the type of x.

    The kernel requires contiguous memory; other inputs are copied."""
    assert main_grad.is_contiguous(), main_grad.stride()
    if x.shape[0] == 0:
        return
    kernels = extension("fused_weight_gradient_mlp_cuda")
    wide = main_grad.dtype == torch.float32
    accumulate = kernels.wgrad_gemm_accum_fp32 if wide else kernels.wgrad_gemm_accum_fp16
    accumulate(x.contiguous(), grad_y.contiguous(), main_grad)


CHUNK = 1 << 16  # elements per block, as in apex's own calls


@cache
def flag(device: torch.device) -> Tensor:
    """Return the int32 [1] that kernels set at a value that is not finite. It is never read here."""
    return torch.zeros(1, dtype=torch.int32, device=device)


# amp_C's optimizer kernels read all tensors of a list as the type of the first, without a check.
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
    factor stays on the device, whereas apex's own scaling requires a host number."""
    assert param.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32, param.dtype
    if param.numel() == 0:
        return
    grad = grad.float()
    if factor is not None:
        grad.mul_(factor)
    lists = [[grad.contiguous()], [param], [exp_avg], [exp_avg_sq]]
    numbers = (settings[name] for name in ("lr", "beta1", "beta2", "eps", "step"))
    modes = _DECOUPLED, _CORRECTED, settings["weight_decay"]
    extension("amp_C").multi_tensor_adam(CHUNK, flag(param.device), lists, *numbers, *modes)
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
    same rounded betas."""
    _check(param, grad, exp_avg, exp_avg_sq)
    direction = _direction(settings)
    u = torch.empty_like(param)  # u/scale
    if param.numel() > 0:
        decay = torch.full((1,), weight_decay / direction.scale, dtype=torch.float32, device=param.device)
        lists = [[grad], [param], [exp_avg], [exp_avg_sq], [u]]
        terms = (decay, _LATE, settings["beta1"], settings["beta2"], direction.eps, *_UNCLIPPED)
        extension("amp_C").multi_tensor_lamb_stage1_cuda(CHUNK, flag(param.device), lists, *terms)
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
    extension("amp_C").multi_tensor_adam(CHUNK, flag(param.device), lists, *terms, weight_decay / direction.scale)


def _direction(settings: MomentSettings) -> Direction:
    """Return the direction for the kernels' betas, which are rounded to fp32."""
    beta1, beta2 = (ctypes.c_float(beta).value for beta in (settings["beta1"], settings["beta2"]))
    return Direction.at(settings["step"], beta1=beta1, beta2=beta2, eps=settings["eps"])


def _check(*tensors: Tensor) -> None:
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors), "expected contiguous fp32 pieces"
