"""Calls of every Triton kernel at the sizes of real models, on tensors without memory."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalite.kernels.quantization import E4M3, E5M2
from megalite.kernels.triton.cross_entropy import cross_entropy_backward, cross_entropy_forward
from megalite.kernels.triton.delta_scan import delta_scan
from megalite.kernels.triton.elementwise import bias_gelu, dropout_mask, geglu, rope, swiglu
from megalite.kernels.triton.fp8 import cast, cast_rows, largest
from megalite.kernels.triton.norms import add_norm, layernorm, rmsnorm
from megalite.kernels.triton.optimizer_ops import adam, l2norm, lamb_moments, lamb_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
S, B = 2048, 8


def empty(*shape: int, dtype: torch.dtype = BF16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad and dtype.is_floating_point)


def run_backward(*outputs: Tensor) -> None:
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])


def norms(n: int, dtype: torch.dtype = BF16) -> None:
    x, weight, bias = empty(S, B, n, dtype=dtype), empty(n, dtype=dtype), empty(n, dtype=dtype)
    run_backward(rmsnorm(x, weight, 1e-5))
    run_backward(layernorm(x, weight, bias, 1e-5, zero_centered=True))


def add_norms(n: int, *, rms: bool, dropout: float = 0.0) -> None:
    branch, residual, weight = empty(S, B, n), empty(S, B, n), empty(n)
    bias, norm_bias = (None, None) if rms else (empty(n), empty(n))
    keep = empty(S, B, n, dtype=torch.bool) if dropout else None
    run_backward(*add_norm(branch, bias, keep, dropout, residual, weight, norm_bias, 1e-5))


def gelus(f: int, dtype: torch.dtype = BF16) -> None:
    run_backward(bias_gelu(empty(S, B, f, dtype=dtype), empty(f, dtype=dtype)))
    run_backward(bias_gelu(empty(S, B, f, dtype=dtype), None, tanh=True))


def gated(f: int, dtype: torch.dtype = BF16) -> None:
    run_backward(swiglu(empty(S, B, 2 * f, dtype=dtype)))
    run_backward(geglu(empty(S, B, 2 * f, dtype=dtype)))


def rotations(heads: int, size: int, dtype: torch.dtype = BF16) -> None:
    angles = (empty(S, 1, 1, size // 2, dtype=FP32, grad=False) for _ in range(2))
    run_backward(rope(empty(S, B, heads, size, dtype=dtype), *angles))


def masks(rows: int, width: int, heads: int = 1) -> None:
    keep = empty(B, heads, rows, width, dtype=torch.bool)
    dropout_mask(keep, empty(rows, dtype=torch.int64), key=1 << 62, samples=range(B), first_head=0, p=0.1)


def scans(dk: int, dv: int) -> None:
    heads, chunks, tokens = 32, S // 64, 64
    each = {"dtype": FP32, "grad": False}
    written, read = empty(heads, chunks, tokens, dv + dk, **each).split((dv, dk), dim=-1)
    keys, states = empty(heads, chunks, tokens, dk, **each), empty(heads, chunks, dk, dv, **each)
    delta_scan(written, read, keys, empty(heads, chunks, **each), states[:, 0])
    delta_scan(written, read, keys, empty(heads, chunks, **each), states[:, 0], states)


def fp8_casts(n: int, i: int) -> None:
    x = empty(n, i, grad=False)
    for each, dtype in ((x, E4M3), (x.t(), E5M2)):
        cast(each, largest(each), dtype)
        cast_rows(each, dtype)


def losses(n: int, v: int, dtype: torch.dtype = BF16) -> None:
    labels = empty(n, dtype=torch.int64)
    stats, saved = cross_entropy_forward(empty(n, v, dtype=dtype, grad=False), labels, v)
    cross_entropy_backward(saved, labels, v, stats[0], stats[1])


def adam_updates(n: int, grad: torch.dtype, copy: torch.dtype | None) -> None:
    param, exp_avg, exp_avg_sq = (empty(n, dtype=FP32, grad=False) for _ in range(3))
    adam(
        *(param, empty(n, dtype=grad, grad=False), exp_avg, exp_avg_sq),
        lr=1e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=3,
        factor=None if copy is None else empty(dtype=FP32, grad=False),
        copy=None if copy is None else empty(n, dtype=copy, grad=False),
    )


def lamb_updates(n: int, *, norms: bool) -> None:
    param, grad, exp_avg, exp_avg_sq = (empty(n, dtype=FP32, grad=False) for _ in range(4))
    terms = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-6, "weight_decay": 0.1, "step": 3}
    lamb_moments(param, grad, exp_avg, exp_avg_sq, **terms, norms=norms)
    lamb_step(param, exp_avg, exp_avg_sq, **terms, rate=1e-3)


CALLS: Mapping[str, Callable[[], object]] = {
    "norms 1024 fp32": lambda: norms(1024, FP32),
    "norms 16384": lambda: norms(16384),
    "add_norm 2048 layer dropout": lambda: add_norms(2048, rms=False, dropout=0.1),
    "add_norm 8192 rms": lambda: add_norms(8192, rms=True),
    "gelu 8192": lambda: gelus(8192),
    "swiglu and geglu 28672": lambda: gated(28672),
    "rope 64 fp32": lambda: rotations(16, 64, FP32),
    "rope 128": lambda: rotations(32, 128),
    "dropout_mask 4096": lambda: masks(S, 4096),
    "dropout_mask of attention, odd": lambda: masks(127, 127, heads=16),
    "delta_scan 128": lambda: scans(128, 128),
    "fp8 4096": lambda: fp8_casts(S * B, 4096),
    "cross_entropy 131072": lambda: losses(S * B, 131072),
    "cross_entropy 50304/8, few rows": lambda: losses(64, 6288),
    "adam": lambda: adam_updates(1 << 30, FP32, BF16),
    "adam bf16 gradients": lambda: adam_updates(1 << 30, BF16, None),
    "lamb": lambda: lamb_updates(1 << 24, norms=True),
    "lamb, no norms": lambda: lamb_updates(1 << 24, norms=False),
    "l2norm": lambda: l2norm([empty(1 << 30, dtype=dtype) for dtype in (FP32, BF16)]),
}  # name -> call; each compiles one to six kernels, at 0.25 s per kernel
