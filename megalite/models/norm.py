"""The norm layers."""

import torch

from megalite.config.model import ModelConfig
from megalite.kernels.norms import layer_norm, rms_norm
from megalite.tensor_parallel.parameter import ParameterFactory


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, multiplied by the weight or, zero-centered, by 1 + weight.

    Over h it acts on the sequence-parallel region, where its gradient is partial.

    Args:
        size: of the last dimension; default h.
        per_head: it acts on attention heads, of which each tp rank has its own: its gradient is partial over tp
            with sequence parallelism or without.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        *,
        make: ParameterFactory,
        size: int | None = None,
        per_head: bool = False,
    ) -> None:
        super().__init__()
        shape = (size or config.hidden_size,)
        self.eps = config.norm_epsilon
        self.zero_centered = config.norm_zero_centered
        value = 0.0 if self.zero_centered else 1.0
        partial = {"in_sequence_region": True, "always_partial": per_head}
        self.weight = make.make(f"{name}.weight", shape, value=value, decay=False, **partial)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = make.make(f"{name}.bias", shape, decay=False, **partial)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]; of [s, b, h] each rank may hold a part of s."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered)
        return layer_norm(x, self.weight, self.bias, self.eps, zero_centered=self.zero_centered)
