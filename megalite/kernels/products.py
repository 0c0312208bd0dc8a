"""The two products of a linear layer that lie on the path of the activations, in the type of its weight.

The third, of the weight gradient, is `ShardedParameter.accumulate_product`.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class Products(Protocol):
    """How a layer multiplies."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., i] · weight [o, i]ᵀ + bias [o] -> [..., o]."""

    def input_grad(self, grad_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """grad_y [..., o] · weight [o, i] -> [..., i], memory that nobody else holds."""


class _Plain:
    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def input_grad(self, grad_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return grad_y @ weight


PLAIN: Products = _Plain()
"""In the type of the tensors."""
