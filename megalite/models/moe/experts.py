"""The experts of one layer that this rank holds, computed together."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from megalite.config.model import ModelConfig
from megalite.kernels.grouped_gemm import accumulate_grouped_weight_grad, grouped_matmul
from megalite.kernels.matmul import matmul
from megalite.kernels.products import Matmul
from megalite.models.activation import activation_of
from megalite.models.recompute import Recompute
from megalite.models.recompute_saved import not_saving
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tensor_parallel.weight_tape import settle


class Experts(torch.nn.Module):
    """down_e(activation(up_e(x))) for the rows of each local expert e. No biases.

    `up` is [E, f, h], or [E, 2, f, h] with a gate (first), `down` [E, h, f]: E is split over ep and f over expert_tp.

    Args:
        recompute: with `mlp_act` the activation's output is not kept; None where the experts as a whole run again.
    """

    def __init__(
        self, name: str, config: ModelConfig, *, make: ParameterFactory, recompute: Recompute | None
    ) -> None:
        super().__init__()
        assert config.num_experts is not None
        count, f, h = config.num_experts, config.expert_ffn_size, config.hidden_size
        stacked = (count, 2, f) if config.is_gated else (count, f)
        self.activation = activation_of(config.activation, f // make.expert_tp.size, make=make)
        self._up = make.kernel("matmul", h)
        self._down = make.kernel("matmul", f // make.expert_tp.size)
        self.recompute_activation = recompute is not None and recompute.selects("mlp_act")
        self.up = make.make(
            f"{name}.up.weight",
            (*stacked, h),
            shard_dim=len(stacked) - 1,
            std=config.init_method_std,
            expert=True,
        )
        self.down = make.make(
            f"{name}.down.weight",
            (count, h, f),
            shard_dim=2,
            std=config.init_method_std / math.sqrt(2 * config.num_layers),
            expert=True,
        )

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Rows [n, h] by expert, `counts` of each -> [n, h], to be summed over expert_tp. Collectives: none."""
        inner = grouped_linear(rows, self.up, counts, self._up)
        active = self.activation(inner)
        if not self.recompute_activation:
            return grouped_linear(active, self.down, counts, self._down)
        with not_saving(active, self.activation, inner):
            return grouped_linear(active, self.down, counts, self._down)


def grouped_linear(
    x: torch.Tensor, weight: ShardedParameter, counts: list[int], multiply: Matmul = matmul
) -> torch.Tensor:
    """y = x·W_eᵀ for the rows of each expert e: x [n, i], weight [E/ep, ..., i] -> [n, o].

    `multiply` computes output and input gradient where the experts' products are not fused.

    Where `weight.main_grad` is set the weight gradient is added to it during the backward, which reports once for each
    microbatch, also where no row has come; else it is returned to autograd. While `weight.tape` records, it is left to
    that.

    Collectives: none.
    """
    return _GroupedLinear.apply(x, weight, counts, multiply)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: ShardedParameter, counts: list[int], multiply: Matmul
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.counts, ctx.multiply = weight, counts, multiply
        return grouped_matmul(x, _matrices(weight).transpose(1, 2), counts, multiply)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        (x,), weight, counts = ctx.saved_tensors, ctx.weight, ctx.counts
        grad_y = grad_y.contiguous()
        grad_x = grouped_matmul(grad_y, _matrices(weight), counts, ctx.multiply)
        return grad_x, settle(_OwedGrouped(weight, x.detach(), grad_y, counts), weight.tape), None, None


@dataclass
class _OwedGrouped:
    """grad_y_eᵀ·x_e of each expert e."""

    parameter: ShardedParameter
    x: torch.Tensor
    grad_y: torch.Tensor
    counts: list[int]

    def start(self) -> None:
        """Needs nothing."""

    def compute(self) -> torch.Tensor | None:
        """See `OwedGradient`."""
        weight = self.parameter
        if weight.main_grad is None:
            grad_weight = torch.zeros_like(weight)
            accumulate_grouped_weight_grad(_matrices(grad_weight), self.grad_y, self.x, self.counts)
            return grad_weight
        accumulate_grouped_weight_grad(
            _matrices(weight.main_grad), self.grad_y, self.x, self.counts, weight.accumulate_product
        )
        weight.report()
        return None


def _matrices(weight: torch.Tensor) -> torch.Tensor:
    """[E, o, i] of [E, 2, f, i], or of what is that already."""
    return weight.flatten(1, -2)
