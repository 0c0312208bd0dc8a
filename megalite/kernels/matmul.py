"""Matrix products of linear layers and of experts: output, input gradient, weight gradient; by torch or oneDNN."""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Compute a [..., i] · b [i, o] + bias [o] -> [..., o] in one type; b may be a transposed view; `out`: a is 2-D."""
    if out is None:
        return torch.matmul(a, b) if bias is None else F.linear(a, b.t(), bias)
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


WeightProduct = Callable[[Tensor, Tensor], Tensor]


class Matmul(Protocol):
    """A kernel of the operation `matmul`."""

    def __call__(self, a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
        """See `matmul`."""


class Products:
    """Matrix products of a layer, by one kernel in the tensors' type. `stacked`: weights have over two dimensions."""

    measures = False
    """Whether `measure` and `weight_grad` may return something other than None."""
    _blocks = False  # the kernel is torch's, with which `output_alone` may multiply in blocks
    output: Callable[..., Tensor]
    """x [..., i] · weight [..., i]ᵀ + bias [o] -> [..., o]; if `measures`, `measure(x)` may be a fourth argument."""
    input_grad: Callable[..., Tensor]
    """grad_y [..., o] · weight [..., i] -> new [..., i]; if `measures`, `measure(grad_y)` may be a third argument."""

    def __init__(self, kernel: Matmul, *, stacked: bool = False) -> None:
        self._kernel = kernel
        self.output, self.input_grad = self._flat_output, self._flat_input_grad
        if kernel is matmul and not stacked:  # call torch's functions directly
            self.output, self.input_grad = F.linear, torch.matmul
        self._blocks = kernel is matmul

    def output_alone(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `output` outside autograd.

        MKL copies a weight into another memory order before it multiplies 4 rows or more by it. A batch of small
        products avoids the copy: with 8 rows it takes 0.5 to 0.65 of the time on a Xeon."""
        width = x.shape[-1]
        rows = x.numel() // width
        few = self._blocks and 4 <= rows <= 16 and x.is_cpu and x.dtype == torch.float32
        if not few or weight.numel() % (BLOCK * width):
            return self.output(x, weight, bias)
        parts = weight.reshape(-1, BLOCK, width).mT
        spread = x.reshape(1, rows, width).expand(len(parts), rows, width)
        y = torch.bmm(spread, parts) if bias is None else torch.baddbmm(bias.view(-1, 1, BLOCK), spread, parts)
        return y.transpose(0, 1).reshape(*x.shape[:-1], -1)

    def measure(self, x: Tensor) -> Tensor | None:
        """Return a statistic of a factor that all its products share (fp8: the largest magnitude), or None."""
        return None

    def _flat_output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernel(x, weight.flatten(0, -2).t(), bias)

    def _flat_input_grad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        return self._kernel(grad_y, weight.flatten(0, -2))

    def weight_grad(self, of_x: Tensor | None, of_grad: Tensor | None) -> WeightProduct | None:
        """Return the product (grad_y [n, o], x [n, i]) -> grad_yᵀ · x [o, i]; None: use `accumulate_weight_grad`."""
        return None


BLOCK = 16  # outputs per small product of `output_alone`
PLAIN = Products(matmul)  # products by torch's kernel


def accumulate_weight_grad(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """Add grad_yᵀ · x to main_grad [o, i], for grad_y [n, o], x [n, i].

    With one dtype the GEMM itself accumulates (beta = 1): no temporary, no zero fill. bf16 and fp16 inputs with an
    fp32 main gradient use cuBLAS's fp32 output on CUDA, which keeps the product unrounded; on CPU the product is
    rounded to the input type before it is added."""
    if main_grad.dtype == x.dtype:
        main_grad.addmm_(grad_y.t(), x)
    elif x.is_cuda:
        torch.addmm(main_grad, grad_y.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(grad_y.t() @ x)


LEAST_ROWS = 64
"""With fewer rows, a weight gradient's product costs less than the extra pass that adds it to the main gradient."""


def onednn_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Compute `matmul` in fp32 by oneDNN; `out` costs a copy.

    For fp32, torch's x86 builds use MKL, which runs its AVX-512 code only on Intel processors: on an AMD EPYC with
    AVX-512 it reaches less than half of oneDNN's rate. torch.compile uses the same operator for linear layers."""
    y = _onednn_product(a, b, bias)
    return y if out is None else out.copy_(y)


def onednn_accumulate_weight_grad(main_grad: Tensor, grad_y: Tensor, x: Tensor) -> None:
    """Compute `accumulate_weight_grad` in fp32 by oneDNN; allocates a temporary as large as main_grad."""
    if x.shape[0] < LEAST_ROWS:
        main_grad.addmm_(grad_y.t(), x)
    else:
        main_grad.add_(_onednn_product(grad_y.t(), x, None))


def _onednn_product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    # The operator requires b in the shape of a layer's weight, [o, i], which may be a transposed view.
    rows: Tensor = torch.ops.mkldnn._linear_pointwise(a.flatten(0, -2), b.t(), bias, "none", [], "")
    # autograd would not allow an in-place all-reduce of a plain view that an autograd function returned.
    return rows if a.dim() == 2 else torch.ops.aten._unsafe_view(rows, (*a.shape[:-1], rows.shape[1]))


class GroupSizes:
    """Number of rows of each group of a product, on the device, and on the host for kernels that need it there.

    Args:
        on_device: [E], int64.
        read: returns the same numbers as a list; the host may have to wait."""

    def __init__(self, on_device: Tensor, read: Callable[[], list[int]]) -> None:
        self.on_device, self._read = on_device, read

    @cached_property
    def ends(self) -> Tensor:
        """End of each group's rows, [E] int32 on the device."""
        return self.on_device.cumsum(0, dtype=torch.int32)

    @cached_property
    def on_host(self) -> list[int]:
        """[E]."""
        return self._read()

    def owners(self, rows: int) -> Tensor:
        """Return the group of each row [rows], without waiting on the host."""
        groups = torch.arange(self.on_device.numel(), device=self.on_device.device)
        return groups.repeat_interleave(self.on_device, output_size=rows)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """Yield (group, its rows) for every group that has rows."""
        for group, (stop, count) in enumerate(zip(accumulate(self.on_host), self.on_host)):
            if count:
                yield group, slice(stop - count, stop)


def grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes, multiply: Matmul = matmul) -> Tensor:
    """Compute y[rows of e] = x[rows of e] · weight[e] for x [n, i], weight [E, i, o] -> [n, o], n over all groups.

    An expert's rows are consecutive. `multiply` computes the product of one expert if the fused kernel is not used."""
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    on_device = x.device.type != "cpu"  # also on the rehearsal's meta device
    if on_device and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0:
        return grouped_matmul_fused(x, weight, sizes)
    y = x.new_empty(x.shape[0], weight.shape[2])
    if x.shape[0] > 0:
        for expert, rows in sizes.slices():
            multiply(x[rows], weight[expert], out=y[rows])
    return y


def grouped_matmul_fused(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """Compute `grouped_matmul` in bf16 by torch's fused kernel: one launch, rows of multiples of 16 bytes, sizes read
    on the device."""
    return F.grouped_mm(x, weight, offs=sizes.ends)


def accumulate_grouped_weight_grad(
    main_grad: Tensor,
    grad_y: Tensor,
    x: Tensor,
    sizes: GroupSizes,
    add_product: Callable[[Tensor, Tensor, Tensor], None] = accumulate_weight_grad,
) -> None:
    """Add grad_y[rows of e]ᵀ · x[rows of e] to main_grad[e] [o, i], for grad_y [n, o], x [n, i].

    One GEMM per expert, also on CUDA: the fused kernel cannot accumulate in the main gradient's precision. The host
    reads the sizes here, in the backward, long after their copy was started."""
    if x.shape[0] > 0:
        for expert, rows in sizes.slices():
            add_product(main_grad[expert], grad_y[rows], x[rows])
