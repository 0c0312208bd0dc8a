"""Column- and row-parallel linear layers and the vocabulary-parallel embedding (arXiv 1909.08053)."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megalite.kernels.matmul import PLAIN, Matmul, PlainProducts, Products
from megalite.tensor_parallel.deferred_weight_gradients import compute_or_defer
from megalite.tensor_parallel.mappings import (
    gather_along_sequence,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megalite.tensor_parallel.parameter import LinearWeightGradient, ParameterFactory, ShardedParameter
from megalite.tensor_parallel.ring_linear import gathered_linear, scattered_linear
from megalite.topology.group import DONE, Group, Work


class _Linear(torch.autograd.Function):
    """x·Wᵀ + bias; the backward overlaps the input gradient's collective with the weight gradient's GEMM.

    It contains Megatron-LM's f (copy or gather in, all-reduce or reduce-scatter back), so that the two overlap.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        tp: Group | None,
        sequence_parallel: bool,
        products: Products,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.has_bias, ctx.products = weight, bias is not None, products
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        if tp is not None and sequence_parallel:
            x = gather_along_sequence(x, tp)
        return products.output(x, weight.flatten(0, -2), None if bias is None else bias.flatten())

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad_y = grad_y.contiguous()
        grad_rows = grad_y.flatten(0, -2)
        gather = ctx.tp if ctx.sequence_parallel else None
        gradient = LinearWeightGradient(weight, x.detach(), grad_rows, gather)
        if weight.deferred is None or not weight.deferred.is_deferring:
            gradient.start()
        grad_x, reducing = _reduce_input_grad(ctx, ctx.products.input_grad(grad_y, weight.flatten(0, -2)))
        grad_weight = compute_or_defer(gradient, weight.deferred)
        grad_bias = grad_rows.sum(0) if ctx.has_bias else None
        reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None


def _reduce_input_grad(ctx: Any, grad_x: torch.Tensor) -> tuple[torch.Tensor, Work]:
    """Start the collective that finishes the input gradient."""
    if ctx.tp is None:
        return grad_x, DONE
    if not ctx.sequence_parallel:
        return grad_x, ctx.tp.all_reduce_async(grad_x)
    part = grad_x.new_empty(grad_x.shape[0] // ctx.tp.size, *grad_x.shape[1:])
    return part, ctx.tp.reduce_scatter_async(part, grad_x)


def linear(
    x: torch.Tensor,
    weight: ShardedParameter,
    bias: ShardedParameter | None,
    *,
    tp: Group | None,
    sequence_parallel: bool = False,
    products: Products = PLAIN,
) -> torch.Tensor:
    """x [..., i] · weight [o/tp, i]ᵀ + bias [o/tp] -> [..., o/tp].

    Where `weight.main_grad` is set the weight gradient is added to it during the backward; else it is returned to
    autograd. A weight of more than two dimensions counts as [-1, i]. `products` compute output and input gradient.

    Args:
        tp: the group that x enters as a whole: replicated, or split over the sequence. None: x is this rank's part
            already, as in a row-parallel layer.

    Collectives: without `tp` none. Replicated x: none / all-reduce of the input gradient. With sequence parallelism:
    all-gather / all-gather (in W where the backward is split) and reduce-scatter.
    """
    if bias is not None and bias.dim() > 1:
        return _Linear.apply(x, weight, None, tp, sequence_parallel, products) + bias.flatten()
    return _Linear.apply(x, weight, bias, tp, sequence_parallel, products)


class ColumnParallelLinear(torch.nn.Module):
    """Y = X·Aᵀ with A [o, i] split along its output: rank r computes columns r of Y.

    Input [s, b, i], replicated over tp, or [s/tp, b, i] with sequence parallelism; output [s, b, o/tp].

    Args:
        shape: global weight shape; its last dimension is i, the others multiply to o.
        shard_dim: the dimension of `shape` that is split.

    Attributes:
        products: how it multiplies.
        overlap: with sequence parallelism: multiply each rank's rows as they arrive (see `gathered_linear`).
    """

    products: Products
    overlap = False

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        std: float,
        bias: bool,
        factory: ParameterFactory,
        shard_dim: int = 0,
    ) -> None:
        super().__init__()
        self.tp = factory.tp
        self.sequence_parallel = factory.sequence_parallel
        self.matmul: Matmul = factory.kernel("matmul", shape[-1])
        self.products = PlainProducts(self.matmul)
        self.weight = factory.parameter(f"{name}.weight", shape, shard_dim=shard_dim, std=std)
        self.bias = factory.parameter(f"{name}.bias", shape[:-1], shard_dim=shard_dim, decay=False) if bias else None

    def forward(self, x: torch.Tensor, *, add_bias: bool = True) -> torch.Tensor:
        """`add_bias` False leaves the bias to the caller. Collectives: see `linear`, `gathered_linear`."""
        bias = self.bias if add_bias else None
        if self.overlap and self.sequence_parallel:
            return gathered_linear(x, self.weight, bias, tp=self.tp, matmul=self.matmul)
        return linear(
            x, self.weight, bias, tp=self.tp, sequence_parallel=self.sequence_parallel, products=self.products
        )


class RowParallelLinear(torch.nn.Module):
    """Y = X·Aᵀ + b with A [o, i] split along its input: rank r holds X's columns r, partial results are summed.

    Input [s, b, i/tp]; output [s, b, o], replicated, or [s/tp, b, o] with sequence parallelism. The bias is added
    once, after the sum.

    Attributes:
        products: how it multiplies.
        overlap: with sequence parallelism: sum up each rank's rows while others are multiplied (see `scattered_linear`).
    """

    products: Products
    overlap = False

    def __init__(self, name: str, shape: tuple[int, int], *, std: float, bias: bool, factory: ParameterFactory) -> None:
        super().__init__()
        self.tp = factory.tp
        self.sequence_parallel = factory.sequence_parallel
        self.matmul: Matmul = factory.kernel("matmul", shape[-1] // factory.tp.size)
        self.products = PlainProducts(self.matmul)
        self.weight = factory.parameter(f"{name}.weight", shape, shard_dim=1, std=std)
        self.bias = factory.parameter(f"{name}.bias", shape[:1], decay=False, in_sequence_region=True) if bias else None

    @property
    def late_bias(self) -> ShardedParameter | None:
        """The bias, if the product cannot take it along, as its terms are summed over ranks first."""
        return None if self.tp.size == 1 else self.bias

    def forward(self, x: torch.Tensor, *, add_late_bias: bool = True) -> torch.Tensor:
        """`add_late_bias` False leaves `late_bias` to the caller.

        Collectives: all-reduce / none, or reduce-scatter / all-gather with sequence parallelism.
        """
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias, tp=None, products=self.products)
        if self.sequence_parallel and self.overlap:
            y = scattered_linear(x, self.weight, tp=self.tp, matmul=self.matmul)
            return y + self.bias if self.bias is not None and add_late_bias else y
        partial = linear(x, self.weight, None, tp=None, products=self.products)
        if self.sequence_parallel:
            y = reduce_scatter_to_sequence_parallel_region(partial, tp=self.tp)
        else:
            y = reduce_from_tensor_parallel_region(partial, tp=self.tp)
        return y + self.bias if self.bias is not None and add_late_bias else y


class _VocabularyLookup(torch.autograd.Function):
    """Rows of a table shard for the tokens in its range, zero for the others; the backward adds into main_grad."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: ShardedParameter) -> torch.Tensor:
        start, stop = weight.info.spec.slice[0]
        outside = None
        if (start, stop) != (0, weight.info.spec.global_shape[0]):
            outside = (tokens < start) | (tokens >= stop)
            tokens = (tokens - start).masked_fill(outside, 0)
        rows = F.embedding(tokens, weight)
        if outside is not None:
            rows.masked_fill_(outside.unsqueeze(-1), 0.0)
        ctx.save_for_backward(tokens, outside)
        ctx.weight = weight
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        (tokens, outside), weight = ctx.saved_tensors, ctx.weight
        if outside is not None:
            grad = grad.masked_fill(outside.unsqueeze(-1), 0.0)
        gradient = _LookupGradient(weight, tokens, grad.contiguous())
        # Of a table that is the head as well the head's part comes first, in the backward or in W.
        return None, compute_or_defer(gradient, weight.deferred if weight.info.uses > 1 else None)


@dataclass
class _LookupGradient:
    """Gradients of looked-up rows, added up by token."""

    parameter: ShardedParameter
    tokens: torch.Tensor
    grad: torch.Tensor

    def start(self) -> None:
        """Needs nothing."""

    def compute(self) -> torch.Tensor | None:
        """See `DeferredGradient`."""
        parameter, main_grad = self.parameter, self.parameter.main_grad
        if main_grad is not None and main_grad.is_cpu:
            # Of a large table few rows have a gradient. On CUDA this would add in any order.
            rows = self.grad.flatten(0, -2).to(main_grad.dtype)
            main_grad.index_add_(0, self.tokens.flatten(), rows)
            parameter.report()
            return None
        dense = torch.ops.aten.embedding_dense_backward(self.grad, self.tokens, parameter.shape[0], -1, False)
        if main_grad is None:
            return dense
        parameter.accumulate(dense)
        return None


class VocabParallelEmbedding(torch.nn.Module):
    """A table [V, h] split along the vocabulary. Tokens [b, s] -> [s, b, h], or [s/tp, b, h] with sequence parallel.

    `tied` and `uses` are those of `ParameterInfo`.

    Collectives: all-reduce / none, or reduce-scatter / all-gather with sequence parallelism.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        *,
        std: float,
        factory: ParameterFactory,
        tied: bool = False,
        uses: int = 1,
    ) -> None:
        super().__init__()
        self.tp = factory.tp
        self.sequence_parallel = factory.sequence_parallel
        self.weight = factory.parameter(f"{name}.weight", shape, shard_dim=0, std=std, tied=tied, uses=uses)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        rows = _VocabularyLookup.apply(tokens.t().contiguous(), self.weight)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(rows, tp=self.tp)
        return reduce_from_tensor_parallel_region(rows, tp=self.tp)
