"""The norm layers."""

import torch

from megalite.config.model import ModelConfig
from megalite.kernels.norms import layer_norm, rms_norm
from megalite.tensor_parallel.parameter import ParameterFactory


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm over h. It acts on the sequence-parallel region, so its gradient is partial there."""

    def __init__(self, name: str, config: ModelConfig, *, make: ParameterFactory) -> None:
        super().__init__()
        shape = (config.hidden_size,)
        self.eps = config.norm_epsilon
        self.weight = make.make(f"{name}.weight", shape, value=1.0, decay=False, in_sequence_region=True)
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = make.make(f"{name}.bias", shape, decay=False, in_sequence_region=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, h] -> [s, b, h], either of them split over s."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)
