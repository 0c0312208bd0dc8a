"""The feed-forward half of a block."""

import math

import torch

from megalite.config.model import ModelConfig
from megalite.kernels.activations import gelu, swiglu
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import ParameterFactory


class MLP(torch.nn.Module):
    """down(activation(up(x))). With swiglu `up` is [2, f, h], gate first, split along f: each tp rank holds whole pairs."""

    def __init__(self, name: str, config: ModelConfig, *, make: ParameterFactory) -> None:
        super().__init__()
        gated = config.activation == "swiglu"
        f, h = config.ffn_size, config.hidden_size
        self.activation = config.activation
        self.up = ColumnParallelLinear(
            f"{name}.up",
            (2, f, h) if gated else (f, h),
            shard_dim=1 if gated else 0,
            std=config.init_method_std,
            bias=config.add_bias_linear,
            make=make,
        )
        self.down = RowParallelLinear(
            f"{name}.down",
            (h, f),
            std=config.init_method_std / math.sqrt(2 * config.num_layers),
            bias=config.add_bias_linear,
            make=make,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h]. Collectives: those of the two linear layers."""
        x = self.up(x)
        x = swiglu(x) if self.activation == "swiglu" else gelu(x, tanh=self.activation == "gelu_tanh")
        return self.down(x)
