"""A custom layer: attention and MLP side by side, on one norm (GPT-J, PaLM)."""

from typing import Any

from torch import Tensor

from megalite import BLOCKS, Block
from megalite.config.model import ModelConfig
from megalite.kernels.layer_ops import add_dropped
from megalite.models.context import ForwardContext, KeyValueCache
from megalite.models.shapes import ParameterShape, layer_shapes


def shapes(model: ModelConfig, index: int) -> list[ParameterShape]:
    """The parameters of layer `index`, by which memory and FLOPs are planned: those of gpt without the second norm."""
    return [shape for shape in layer_shapes(model, index, "gpt") if ".mlp_norm." not in shape.name]


@BLOCKS.register("parallel", shapes=shapes)
class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm(x)).

    Its pieces are those of gpt: they know how they are split over tp ranks, and make their collectives themselves.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        del self.mlp_norm

    def forward(self, x: Tensor, context: ForwardContext, cache: KeyValueCache | None = None) -> Tensor:
        normed = self.attention_norm(x)
        branches = {"attention": self.attention(normed, context, cache), "mlp": self.feed_forward(normed, context)}
        for site, branch in branches.items():
            # Dropout goes by places in the network, so that it is the same on every layout.
            keep = context.keep_mask(branch, self.dropout, site=f"{self.name}.{site}", region=self.region)
            x = add_dropped(x, branch, None, keep, self.dropout)
        return x
