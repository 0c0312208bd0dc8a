"""Matrix products of linear layers and of experts: output, input gradient, weight gradient; by torch or oneDNN."""

from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """a [..., i] · b [i, o] + bias [o] -> [..., o], in one type; b may be a transposed view. Into `out` for a [n, i]."""
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
    """How a layer multiplies: in the type of the tensors, by one kernel. `stacked`: its weights have more than two dimensions."""

    measures = False
    """`measure` and `weight_grad` give something."""
    _blocks = False  # the kernel is torch's, for which a weight may be multiplied block by block
    output: Callable[..., Tensor]
    """x [..., i] · weight [..., i]ᵀ + bias [o] -> [..., o]; where it `measures` a fourth argument is what it says of x."""
    input_grad: Callable[..., Tensor]
    """grad_y [..., o] · weight [..., i] -> [..., i], in new memory; where it `measures` a third is what it says of grad_y."""

    def __init__(self, kernel: Matmul, *, stacked: bool = False) -> None:
        self._kernel = kernel
        self.output, self.input_grad = self._flat_output, self._flat_input_grad
        if kernel is matmul and not stacked:  # torch's own, without a frame between
            self.output, self.input_grad = F.linear, torch.matmul
        self._blocks = kernel is matmul

    def output_alone(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`output` outside autograd.

        MKL copies a weight into another order before it multiplies 4 rows or more by it, which a batch of small products
        spares it: of 8 rows they take 0.5 to 0.65 of the time on a Xeon."""
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
        """What the products of a factor want to know of it, once for all of them; None: nothing."""
        return None

    def _flat_output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._kernel(x, weight.flatten(0, -2).t(), bias)

    def _flat_input_grad(self, grad_y: Tensor, weight: Tensor) -> Tensor:
        return self._kernel(grad_y, weight.flatten(0, -2))

    def weight_grad(self, of_x: Tensor | None, of_grad: Tensor | None) -> WeightProduct | None:
        """(grad_y [n, o], x [n, i]) -> grad_yᵀ · x [o, i]. None: by the kernel that adds it to the main gradient itself."""
        return None


BLOCK = 16  # outputs of one of the small products
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


class GroupSizes:
    """How many rows of a product each group has: on the device at once, and on the host where a kernel asks for that.

    Args:
        on_device: [E], int64.
        read: gives the same as a list. The host may have to wait in it.
    """

    def __init__(self, on_device: Tensor, read: Callable[[], list[int]]) -> None:
        self.on_device, self._read = on_device, read

    @cached_property
    def ends(self) -> Tensor:
        """Where the rows of each group end, int32 on the device."""
        return self.on_device.cumsum(0, dtype=torch.int32)

    @cached_property
    def on_host(self) -> list[int]:
        """[E]."""
        return self._read()

    def owners(self, rows: int) -> Tensor:
        """The group of each row [rows]. The host waits for nothing."""
        groups = torch.arange(self.on_device.numel(), device=self.on_device.device)
        return groups.repeat_interleave(self.on_device, output_size=rows)

    def slices(self) -> Iterator[tuple[int, slice]]:
        """(group, its rows) of those that have any."""
        for group, (stop, count) in enumerate(zip(accumulate(self.on_host), self.on_host)):
            if count:
                yield group, slice(stop - count, stop)


def grouped_matmul(x: Tensor, weight: Tensor, sizes: GroupSizes, multiply: Matmul = matmul) -> Tensor:
    """y[rows of e] = x[rows of e] · weight[e] for x [n, i], weight [E, i, o] and n rows in all groups -> [n, o].

    An expert's rows are consecutive, if it has any. `multiply` does one expert's, where they are not fused.
    """
    aligned = weight.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    on_device = x.device.type != "cpu"  # the rehearsal's too
    if on_device and x.dtype == torch.bfloat16 and aligned and x.shape[0] > 0:
        return grouped_matmul_fused(x, weight, sizes)
    y = x.new_empty(x.shape[0], weight.shape[2])
    if x.shape[0] > 0:
        for expert, rows in sizes.slices():
            multiply(x[rows], weight[expert], out=y[rows])
    return y


def grouped_matmul_fused(x: Tensor, weight: Tensor, sizes: GroupSizes) -> Tensor:
    """`grouped_matmul` by torch's fused kernel, for bf16: one launch for all groups, of rows of multiples of 16 bytes. It
    reads the sizes on the device."""
    return F.grouped_mm(x, weight, offs=sizes.ends)


def accumulate_grouped_weight_grad(
    main_grad: Tensor,
    grad_y: Tensor,
    x: Tensor,
    sizes: GroupSizes,
    add_product: Callable[[Tensor, Tensor, Tensor], None] = accumulate_weight_grad,
) -> None:
    """main_grad[e] [o, i] += grad_y[rows of e]ᵀ · x[rows of e] for grad_y [n, o], x [n, i].

    A GEMM for each expert, also on CUDA: the fused kernel has no form that adds in the main gradient's precision. The host
    reads the sizes here, in the backward, long after they were on their way.
    """
    if x.shape[0] > 0:
        for expert, rows in sizes.slices():
            add_product(main_grad[expert], grad_y[rows], x[rows])
