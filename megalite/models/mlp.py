"""MLP: the feed-forward half of a block."""

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.bases import Module
from megalite.kernels.layer_ops import gated, squared_relu
from megalite.models.recompute import Recompute, SavedTensors
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ParameterFactory

_KINDS = {"swiglu": "silu", "geglu": "none", "geglu_tanh": "tanh", "quick_geglu": "quick"}


def activation_of(config: ModelConfig, size: int, *, factory: ParameterFactory) -> Callable[..., Tensor]:
    """Return the activation x [..., size] -> [..., size]; gated ones take x [..., 2·size] with the gate first.

    gelu also accepts a bias: `f(x, bias)`. `size`: the features on this rank."""
    name, limit, offset = config.activation, config.activation_func_clamp_value, config.glu_linear_offset
    if config.is_gated and (name == "quick_geglu" or limit is not None or offset):  # no other kernel supports these
        return partial(gated, kind=_KINDS[name], limit=limit, offset=offset)
    if name == "swiglu":
        return factory.kernel("swiglu", size)
    if name == "squared_relu":
        return squared_relu
    kind, _, tanh = name.partition("_")
    return partial(factory.kernel({"geglu": "geglu", "gelu": "bias_gelu"}[kind], size), tanh=bool(tanh))


class MLP(Module):
    """down(activation(up(x))). With a gate `up` is [2, f, h], gate first, split along f: each tp rank has whole pairs.

    `ffn_size`: the width f, by default the dense MLP's. `recompute`: None if the whole MLP is recomputed."""

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        factory: ParameterFactory,
        recompute: Recompute | None = None,
        ffn_size: int | None = None,
    ) -> None:
        super().__init__()
        f, h = ffn_size or config.ffn_size, config.hidden_size
        local = f // factory.tp.size
        self.activation = activation_of(config, local, factory=factory)
        # A fused kernel computes the bias's gradient without an extra pass.
        self.fuses_bias = (
            config.add_bias_linear and config.activation in ("gelu", "gelu_tanh") and factory.fuses("bias_gelu", local)
        )
        self.recompute_activation = recompute is not None and recompute.selects("mlp_act")
        self.saves = SavedTensors() if recompute is None else recompute.saves
        self._in_act = self.saves.runner("mlp_act")
        self.up = ColumnParallelLinear(
            f"{name}.up",
            (2, f, h) if config.is_gated else (f, h),
            shard_dim=1 if config.is_gated else 0,
            std=config.hidden_std,
            bias=config.add_bias_linear,
            factory=factory,
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            (h, f),
            std=config.hidden_std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
            factory=factory,
        )

    def forward(self, x: Tensor) -> Tensor:
        """[s, b, h] -> [s, b, h]. Collectives: those of the two linear layers."""
        return self.second_half(self.first_half(x))

    def first_half(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the activation's arguments. Collectives: those of `up`."""
        if not self.fuses_bias:
            return (self.up(x),)
        assert self.up.bias is not None
        return self.up(x, add_bias=False), self.up.bias

    def second_half(self, inner: tuple[Tensor, ...]) -> Tensor:
        """Return the output. Collectives: those of `down`."""
        active = self._in_act(self.activation, *inner)
        if not self.recompute_activation:
            return self.down(active)
        with self.saves.recomputing(active, self.activation, *inner, saved_in="mlp_act"):
            return self.down(active)
