"""Column- and row-parallel linear layers and the vocabulary-parallel embedding (arXiv 1909.08053)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.bases import Function, Module
from megalite.kernels.matmul import PLAIN, Matmul, Products
from megalite.tensor_parallel.mappings import gather_along_sequence, reduce_partial_sums
from megalite.tensor_parallel.overlapped_linear import OverlappedProducts, scattered_linear
from megalite.tensor_parallel.parameter import (
    ParameterFactory,
    ShardedParameter,
    WeightGradient,
    as_sharded,
    linear_product,
    linear_weight_gradient,
)
from megalite.topology.group import DONE, Group, Work


class _Linear(Function):
    """x·Wᵀ + bias; the backward overlaps the input gradient's collective with the weight gradient's GEMM.

    To overlap them it contains Megatron-LM's f (copy or gather forward, all-reduce or reduce-scatter backward)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        tp: Group | None,
        sequence_parallel: bool,
        products: Products,
        pieces: OverlappedProducts | None,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.how = weight, weight._version, bias is not None, tp, sequence_parallel, products, pieces
        if tp is not None and sequence_parallel:
            if pieces is not None:
                return pieces.gather(x, weight.flatten(0, -2).t(), bias)[0]
            x = gather_along_sequence(x, tp)
        if not products.measures:
            return products.output(x, weight, bias)
        ctx.of_x = products.measure(x)
        return products.output(x, weight, bias, ctx.of_x)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (weight, version, has_bias, tp, sequence_parallel, products, pieces) = ctx.saved_tensors, ctx.how
        if weight._version != version:
            raise weight.changed(version)
        grad_y = grad_y.contiguous()
        grad_rows, gather = grad_y.flatten(0, -2), tp if sequence_parallel else None
        measured: tuple[Tensor | None, ...] = ()
        multiply = None
        if products.measures and pieces is None:
            measured = (products.measure(grad_rows),)
            multiply = products.weight_grad(ctx.of_x, *measured)
        deferring = weight.deferred is not None and weight.deferred.is_deferring
        gradient: WeightGradient | None = None  # the usual case avoids the object's overhead
        if gather is not None or deferring:
            gradient = linear_weight_gradient(weight, x, grad_rows, gather, multiply)
        if gradient is not None and not deferring:
            # The gather of x overlaps the input gradient's product, and the input gradient's collective overlaps the
            # weight gradient's product.
            gradient.start()
        if pieces is not None:
            grad_x, reducing = pieces.scatter(grad_y, weight.flatten(0, -2))
        else:
            grad_x, reducing = products.input_grad(grad_y, weight, *measured), DONE
            if tp is not None:
                grad_x, reducing = _reduce_input_grad(grad_x, tp, sequence_parallel)
        if gradient is None:
            grad_weight = weight.contribute(partial(linear_product, weight, x, grad_rows, multiply))
        else:
            grad_weight = gradient.compute_or_defer(weight.deferred)
        grad_bias = grad_rows.sum(0) if has_bias else None
        if reducing is not DONE:
            reducing.wait()
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _reduce_input_grad(grad_x: Tensor, tp: Group, sequence_parallel: bool) -> tuple[Tensor, Work]:
    """Start the all-reduce or reduce-scatter of the input gradient."""
    if not sequence_parallel:
        return grad_x, tp.all_reduce_async(grad_x)
    part = grad_x.new_empty(grad_x.shape[0] // tp.size, *grad_x.shape[1:])
    return part, tp.reduce_scatter_async(part, grad_x)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: ShardedParameter | None,
    *,
    tp: Group | None,
    sequence_parallel: bool = False,
    products: Products = PLAIN,
    pieces: OverlappedProducts | None = None,
) -> Tensor:
    """Compute x [..., i] · weight [o/tp, i]ᵀ + bias [o/tp] -> [..., o/tp].

    If `weight.main_grad` is set, the backward adds the weight gradient to it; otherwise, for example for a computed
    weight, it returns the gradient to autograd. `products` computes all matrix products.

    Args:
        tp: the group over which x is replicated, or split by sequence. None: x is already this rank's part, as in a
            row-parallel layer.
        pieces: with sequence parallelism: overlap the products with the communication (see `overlapped_linear`).

    Collectives: without `tp` none. Replicated x: none / all-reduce of the input gradient. With sequence parallelism:
    all-gather / all-gather (in W if the backward is split) and reduce-scatter; `pieces` replaces the forward gather and
    the reduce-scatter by its own."""
    tp = None if tp is None or tp.size == 1 else tp
    if (tp is None or not sequence_parallel) and not torch.is_grad_enabled():
        return products.output_alone(x, weight, bias)  # skip the overhead of autograd
    return _Linear.apply(x, as_sharded(weight), bias, tp, sequence_parallel, products, pieces)


class ColumnParallelLinear(Module):
    """Y = X·Aᵀ with A [o, i] split along its output: rank r computes columns r of Y.

    Input [s, b, i], replicated over tp, or [s/tp, b, i] with sequence parallelism; output [s, b, o/tp].

    Args:
        shape: global weight shape; its last dimension is i; the product of the others is o, and they are the bias's
            shape.
        shard_dim: the dimension of `shape` that is split."""

    overlap_by: Callable[[Group, Matmul], OverlappedProducts] | None = None  # overlaps products and communication

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
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.matmul: Matmul = factory.kernel("matmul", shape[-1])
        self.stacked = len(shape) > 2
        self.products = Products(self.matmul, stacked=self.stacked)
        self.weight = factory.parameter(f"{name}.weight", shape, shard_dim=shard_dim, std=std)
        self.bias = factory.parameter(f"{name}.bias", shape[:-1], shard_dim=shard_dim, decay=False) if bias else None

    def forward(self, x: Tensor, *, add_bias: bool = True) -> Tensor:
        """Apply the layer; with `add_bias` False the caller adds the bias. Collectives: see `linear`."""
        bias = self.bias if add_bias else None
        sp = self.sequence_parallel
        pieces = self.overlap_by(self.tp, self.matmul) if self.overlap_by is not None and sp else None
        own = None if self.stacked else bias
        y = linear(x, self.weight, own, tp=self.tp, sequence_parallel=sp, products=self.products, pieces=pieces)
        return y + bias.flatten() if self.stacked and bias is not None else y


class ReplicatedLinear(Module):
    """Y = X·Aᵀ with A [o, i] replicated: [..., i] -> [..., o], on the rank's part of the sequence with sequence
    parallelism. For narrow outputs. Collectives: none."""

    def __init__(self, name: str, shape: tuple[int, int], *, std: float, factory: ParameterFactory) -> None:
        super().__init__()
        self.products = Products(factory.kernel("matmul", shape[-1]))
        self.weight = factory.parameter(f"{name}.weight", shape, std=std, in_sequence_region=True)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, None, tp=None, products=self.products)


class RowParallelLinear(Module):
    """Y = X·Aᵀ + b with A [o, i] split along its input: rank r has X's columns r, partial results are summed.

    Input [s, b, i/tp]; output [s, b, o], replicated, or [s/tp, b, o] with sequence parallelism. The bias is added
    once, after the sum."""

    overlap_by: Callable[[Group, Matmul], OverlappedProducts] | None = None  # overlaps products and communication

    def __init__(self, name: str, shape: tuple[int, int], *, std: float, bias: bool, factory: ParameterFactory) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.matmul: Matmul = factory.kernel("matmul", shape[-1] // factory.tp.size)
        self.products = Products(self.matmul)
        self.weight = factory.parameter(f"{name}.weight", shape, shard_dim=1, std=std)
        self.bias = factory.parameter(f"{name}.bias", shape[:1], decay=False, in_sequence_region=True) if bias else None

    @property
    def late_bias(self) -> ShardedParameter | None:
        """The bias, if it must be added after the sum over ranks; else None."""
        return None if self.tp.size == 1 else self.bias

    def forward(self, x: Tensor, *, add_late_bias: bool = True) -> Tensor:
        """Apply the layer; with `add_late_bias` False the caller adds `late_bias`.

        Collectives: all-reduce / none, or reduce-scatter / all-gather with sequence parallelism."""
        if self.tp.size == 1:
            return linear(x, self.weight, self.bias, tp=None, products=self.products)
        if self.sequence_parallel and self.overlap_by is not None:
            y = scattered_linear(x, self.weight, self.overlap_by(self.tp, self.matmul))
        else:
            terms = linear(x, self.weight, None, tp=None, products=self.products)
            y = reduce_partial_sums(terms, tp=self.tp, sequence_parallel=self.sequence_parallel)
        return y + self.bias if self.bias is not None and add_late_bias else y


class _VocabularyLookup(Function):
    """Rows of a table shard for the tokens in its range, zero for the others; the backward adds into main_grad."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: ShardedParameter, tp: Group) -> Tensor:
        outside = None
        if tp.size > 1:
            start = tp.rank * weight.shape[0]
            outside = (tokens < start) | (tokens >= start + weight.shape[0])
            tokens = (tokens - start).masked_fill(outside, 0)
        rows = torch.embedding(weight, tokens)
        if outside is not None:
            rows.masked_fill_(outside.unsqueeze(-1), 0.0)
        ctx.save_for_backward(tokens, outside)
        ctx.weight = weight
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens, outside), weight = ctx.saved_tensors, ctx.weight
        if outside is not None:
            grad = grad.masked_fill(outside.unsqueeze(-1), 0.0)
        grad = grad.contiguous()

        def product(main_grad: Tensor | None) -> Tensor | None:
            if main_grad is None:
                return torch.ops.aten.embedding_dense_backward(grad, tokens, weight.shape[0], -1, False)
            # Few rows of a large table have a gradient, so avoid a second table.
            rows, indices = grad.flatten(0, -2).to(main_grad.dtype), tokens.flatten()
            if main_grad.is_cpu:
                main_grad.index_add_(0, indices, rows)
            else:  # index_put_ sorts; index_add_ has no fixed order on CUDA
                main_grad.index_put_((indices,), rows, accumulate=True)
            return None

        # If the table is also the head, the head's part of the gradient must come first, in the backward or in W.
        deferred = weight.deferred if weight.deferred is not None and weight.info.uses > 1 else None
        return None, WeightGradient(weight, product).compute_or_defer(deferred), None


def vocab_parallel_lookup(tokens: Tensor, weight: Tensor, *, tp: Group, sequence_parallel: bool) -> Tensor:
    """Look up tokens as `VocabParallelEmbedding` does; `weight` is this rank's shard."""
    rows = _VocabularyLookup.apply(tokens.t().contiguous(), as_sharded(weight), tp)
    return reduce_partial_sums(rows, tp=tp, sequence_parallel=sequence_parallel)


class VocabParallelEmbedding(Module):
    """A table [V, h] split along the vocabulary. Tokens [b, s] -> [s, b, h], or [s/tp, b, h] with sequence parallelism.

    `tied` and `uses`: see `ParameterInfo`. Collectives: all-reduce / none, or reduce-scatter / all-gather with sequence
    parallelism."""

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
        self.tp, self.sequence_parallel = factory.tp, factory.sequence_parallel
        self.weight = factory.parameter(f"{name}.weight", shape, shard_dim=0, std=std, tied=tied, uses=uses)

    def forward(self, tokens: Tensor) -> Tensor:
        return vocab_parallel_lookup(tokens, self.weight, tp=self.tp, sequence_parallel=self.sequence_parallel)
