"""Norm layers: of hidden states, of the residual sum, of attention heads."""

from typing import Any

from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.attention import HALF_TYPES
from megalite.kernels.bases import Function, Module
from megalite.kernels.layer_ops import add_dropped
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group


class Norm(Module):
    """LayerNorm or RMSNorm over the last dimension, multiplied by the weight or, zero-centered, by 1 + weight.

    Over h (the default size) it runs in the sequence-parallel region, where its gradient is partial. `per_head`: it
    runs on each tp rank's own attention heads, so its gradient is partial with or without sequence parallelism."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        size: int | None = None,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        shape = (size or config.hidden_size,)
        self.eps, self.zero_centered = config.norm_epsilon, config.norm_zero_centered
        value = 0.0 if self.zero_centered else 1.0
        decay = per_head and config.apply_wd_to_qk_layernorm
        settings: dict[str, Any] = {"in_sequence_region": True, "always_partial": per_head, "decay": decay}
        self.weight = factory.parameter(f"{name}.weight", shape, value=value, **settings)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = factory.parameter(f"{name}.bias", shape, **settings)
        self._kernel = factory.kernel("rmsnorm" if self.bias is None else "layernorm", *shape)

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]; s may be split over ranks."""
        weights = (self.weight,) if (bias := self.bias) is None else (self.weight, bias)
        return self._kernel(x, *weights, self.eps, zero_centered=self.zero_centered)

    normalize = forward
    """For callers inside a forward or backward, where the weights have already been gathered."""


class ResidualNorm(Norm):
    """A norm of the sum of the residual stream and a branch.

    It is a module and not a method of `Norm`, because data parallelism gathers a module's weights in a hook before its
    `forward`, which a direct method call would bypass. `fused`: one kernel may compute sum and norm."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, fused: bool) -> None:
        super().__init__(name, config, factory=factory)
        self._sum_kernel = factory.kernel("add_norm", config.hidden_size) if fused else None
        self.factor = config.residual_multiplier

    def forward(  # type: ignore[override]
        self, residual: Tensor, branch: Tensor, *, bias: Tensor | None, keep: Tensor | None, p: float
    ) -> tuple[Tensor, Tensor]:
        """Return (norm(x), x) for x = residual + factor·dropout(branch + bias), all [..., size]; `keep`: the dropout
        mask."""
        if self._sum_kernel is None:
            x = add_dropped(residual, branch, bias, keep, p, self.factor)
            return self.normalize(x), x
        tensors = branch, bias, keep, p, residual, self.weight, self.bias
        return self._sum_kernel(*tensors, self.eps, zero_centered=self.zero_centered, factor=self.factor)


class AllHeadsNorm(Module):
    """RMSNorm over all heads together, split over tp: each rank has the weights of its heads."""

    def __init__(self, name: str, config: ModelConfig, *, factory: ParameterFactory, size: int) -> None:
        super().__init__()
        self.eps, self.offset, self.tp = config.norm_epsilon, float(config.norm_zero_centered), factory.tp
        decay = config.apply_wd_to_qk_layernorm
        self.weight = factory.parameter(f"{name}.weight", (size,), shard_dim=0, value=1.0 - self.offset, decay=decay)

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, heads/tp, d] -> [s, b, heads/tp, d].

        Collectives: an all-reduce of one number per token over tp, forward and backward."""
        return _SplitRMSNorm.apply(x.flatten(2), self.weight, self.eps, self.offset, self.tp).view_as(x)


class _SplitRMSNorm(Function):
    """RMSNorm in fp32 for half types (fp64 for fp64) over the channels [..., n] of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float, tp: Group) -> Tensor:
        exact = x.float() if x.dtype in HALF_TYPES else x
        inverse = exact.square().sum(dim=-1, keepdim=True)
        tp.all_reduce(inverse)
        inverse = (inverse / (x.shape[-1] * tp.size)).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.offset, ctx.tp = offset, tp
        return (exact * inverse).mul_(weight.to(exact.dtype) + offset).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad_normed = grad * (weight.to(inverse.dtype) + ctx.offset)
        inner = (grad_normed * normed).sum(dim=-1, keepdim=True)
        ctx.tp.all_reduce(inner)
        grad_x = grad_normed.sub_(normed.mul_(inner / (x.shape[-1] * ctx.tp.size))).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None, None, None
