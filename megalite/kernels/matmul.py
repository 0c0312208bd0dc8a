"""Matrix products of linear layers and of experts: output, input gradient, weight gradient; by torch, oneDNN or in fp8."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """a [..., i] · b [i, o] + bias [o] -> [..., o], in one type; b may be a transposed view. Into `out` for a [n, i]."""
    if out is None:
        return F.linear(a, b.t(), bias)
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


class Matmul(Protocol):
    """A kernel of the operation `matmul`."""

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """See `matmul`."""


class Products:
    """How a layer multiplies: in the type of the tensors, by one kernel."""

    def __init__(self, matmul: Matmul) -> None:
        self._matmul = matmul

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., i] · weight [o, i]ᵀ + bias [o] -> [..., o]."""
        return self._matmul(x, weight.t(), bias)

    def input_grad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """grad_y [..., o] · weight [o, i] -> [..., i], in new memory."""
        return self._matmul(grad_y, weight)


PLAIN = Products(matmul)  # by torch's kernel


def accumulate_weight_grad(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """main_grad [o, i] += grad_yᵀ · x for grad_y [n, o], x [n, i].

    With one dtype the GEMM itself accumulates (beta = 1): no temporary, no zero fill. bf16 and fp16 inputs with an
    fp32 main gradient use cuBLAS's fp32 output on CUDA, which keeps the product unrounded; on CPU the product is
    rounded to the input type before it is added.
    """
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(grad_y.t(), x)
    elif x.is_cuda:
        torch.addmm(main_grad, grad_y.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(grad_y.t() @ x)


LEAST_ROWS = 64
"""Below, a weight gradient's product is cheaper than the pass over the main gradient that adding it takes."""


def onednn_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`matmul` in fp32 by oneDNN; `out` costs a copy.

    For fp32 torch's builds for x86 ask MKL, which has its code for AVX-512 run on Intel's processors alone: on an AMD EPYC
    with AVX-512 it reaches less than half of oneDNN's rate. The operator is the one that torch.compile puts in the place
    of a linear layer.
    """
    y = _onednn_product(a, b, bias)
    return y if out is None else out.copy_(y)


def onednn_accumulate_weight_grad(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """`accumulate_weight_grad` in fp32 by oneDNN; makes a temporary as large as main_grad."""
    if x.shape[0] < LEAST_ROWS:
        main_grad.addmm_(grad_y.t(), x)
    else:
        main_grad.add_(_onednn_product(grad_y.t(), x, None))


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # The operator wants b as a layer's weight, [o, i]: a transposed view will do.
    rows: Tensor = torch.ops.mkldnn._linear_pointwise(a.flatten(0, -2), b.t(), bias, "none", [], "")
    # A plain view could not leave an autograd function and be changed in place by the all-reduce behind it.
    return rows if a.dim() == 2 else torch.ops.aten._unsafe_view(rows, (*a.shape[:-1], rows.shape[1]))


_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None)
"""One launch for all groups, in bf16 alone; its rows must be multiples of 16 bytes long."""


def grouped_matmul(x: Tensor, weight: Tensor, counts: Sequence[int], multiply: Matmul = matmul) -> Tensor:
    """y[rows of e] = x[rows of e] · weight[e] for x [n, i], weight [E, i, o] and Σ counts = n -> [n, o].

    An expert's rows are consecutive, if it has any. `multiply` does one expert's, where they are not fused.
    """
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    if _grouped_mm is not None and x.is_cuda and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0:
        return grouped_matmul_fused(x, weight, counts)
    y = x.new_empty(x.shape[0], weight.shape[2])
    for expert, rows in _groups(counts):
        multiply(x[rows], weight[expert], out=y[rows])
    return y


def grouped_matmul_fused(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """`grouped_matmul` by torch's fused kernel, for bf16."""
    assert _grouped_mm is not None
    # Summed on the host and copied from pinned memory: the host waits for nothing.
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32, pin_memory=x.is_cuda)
    return _grouped_mm(x, weight, offs=ends.to(x.device, non_blocking=True))


def accumulate_grouped_weight_grad(
    main_grad: Tensor,
    grad_y: Tensor,
    x: Tensor,
    counts: Sequence[int],
    add_product: Callable[[Tensor, Tensor, Tensor], None] = accumulate_weight_grad,
) -> None:
    """main_grad[e] [o, i] += grad_y[rows of e]ᵀ · x[rows of e] for grad_y [n, o], x [n, i].

    A GEMM for each expert, also on CUDA: the fused kernel has no form that adds in the main gradient's precision.
    """
    for expert, rows in _groups(counts):
        add_product(main_grad[expert], grad_y[rows], x[rows])


def _groups(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its rows) of those that have any."""
    for expert, (stop, count) in enumerate(zip(accumulate(counts), counts)):
        if count:
            yield expert, slice(stop - count, stop)


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16  # both dimensions of a weight must be multiples: 16-byte rows of what is multiplied
Quantise = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]  # as `quantise`
_SMALLEST = 2.0**-100  # where the largest element is below it (all are 0, say), its scale


def why_not_fp8(device: torch.device) -> str | None:
    """Why the device cannot multiply in fp8, or None."""
    if device.type != "cuda":
        return f"{device.type} has no matrix products in fp8"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"it takes compute capability 8.9 or more, and this device has {major}.{minor}"
    return None


def quantise(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x·2^k in fp8, and 2^-k as an fp32 scalar on its device, with the largest k that fits.

    What is infinite or NaN makes the tensor NaN, which the step's check of loss and norm then sees.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).clamp(min=_SMALLEST)
    _, exponent = torch.frexp(torch.finfo(dtype).max / largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    # The difference is 0, or NaN where it is of infinities.
    scale = scale + (largest - largest)
    return (x * scale.to(x.dtype)).to(dtype), scale.reciprocal()


class Fp8Products(Products):
    """Of bf16 tensors through torch's scaled matrix product (fp32 sums). `quantise` passes over the tensor four times
    unless it is compiled."""

    def __init__(self, quantise: Quantise = quantise) -> None:
        self._quantise = quantise

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Both in e4m3."""
        x8, undo_x = self._quantise(x.flatten(0, -2).contiguous(), E4M3)
        weight8, undo_weight = self._quantise(weight, E4M3)
        # Fast sums keep fewer bits of partial results, as is usual forward.
        y = torch._scaled_mm(
            x8, weight8.t(), undo_x, undo_weight, bias=bias, out_dtype=x.dtype, use_fast_accum=x.is_cuda
        )
        return y.view(*x.shape[:-1], weight.shape[0])

    def input_grad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        """The gradient in e5m2, the weight in e4m3 as forward; it is made again rather than kept."""
        grad8, undo_grad = self._quantise(grad_y.flatten(0, -2).contiguous(), E5M2)
        weight8, undo_weight = self._quantise(weight, E4M3)
        # The second factor is wanted column by column.
        columns = weight8.view(torch.uint8).t().contiguous().view(E4M3)
        grad_x = torch._scaled_mm(grad8, columns.t(), undo_grad, undo_weight, out_dtype=grad_y.dtype)
        return grad_x.view(*grad_y.shape[:-1], weight.shape[1])
