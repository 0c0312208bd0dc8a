"""The two products of a linear layer that lie on the path of the activations, in the type of its weight.

The third, of the weight gradient, is `ShardedParameter.accumulate_product`.
"""

from typing import Protocol

import torch

from megalite.kernels.matmul import matmul


class Matmul(Protocol):
    """A kernel of the operation `matmul`; see `megalite.kernels.matmul`."""

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """a [..., i] · b [i, o] + bias [o] -> [..., o]; into `out` where a has two dimensions."""


class Products(Protocol):
    """How a layer multiplies."""

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [..., i] · weight [o, i]ᵀ + bias [o] -> [..., o]."""

    def input_grad(self, grad_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """grad_y [..., o] · weight [o, i] -> [..., i], memory that nobody else holds."""


class PlainProducts:
    """In the type of the tensors, by one kernel."""

    def __init__(self, matmul: Matmul) -> None:
        self._matmul = matmul

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """See `Products`."""
        return self._matmul(x, weight.t(), bias)

    def input_grad(self, grad_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `Products`."""
        return self._matmul(grad_y, weight)


PLAIN: Products = PlainProducts(matmul)
"""By torch's kernel."""
