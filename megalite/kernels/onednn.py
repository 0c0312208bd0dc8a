"""fp32 products of oneDNN, which torch's builds for x86 contain but take for half types alone.

For fp32 torch asks MKL, whose code for AVX-512 is kept from processors that are not Intel's: on an AMD EPYC with AVX-512
it reaches less than half of oneDNN's rate. The operator is the one that torch.compile puts in the place of a linear layer.
"""

from functools import cache

import torch

LEAST_ROWS = 64
"""Below, a weight gradient's product is cheaper than the pass over the main gradient that adding it takes."""


@cache
def why_not_onednn(device: str) -> str | None:
    """Why oneDNN's products cannot be had on a device of that type, or None."""
    if device != "cpu":
        return f"onednn has no {device}; it serves CPUs"
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return f"torch {torch.__version__} has no mkldnn::_linear_pointwise"
    return None


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `megalite.kernels.matmul.matmul`. fp32; `out` costs a copy."""
    y = _product(a, b, bias)
    return y if out is None else out.copy_(y)


def accumulate_weight_grad(main_grad: torch.Tensor, grad_y: torch.Tensor, x: torch.Tensor) -> None:
    """See `megalite.kernels.weight_grad.accumulate_weight_grad`. fp32; makes a temporary as large as main_grad."""
    if x.shape[0] < LEAST_ROWS:
        main_grad.addmm_(grad_y.t(), x)
    else:
        main_grad.add_(_product(grad_y.t(), x, None))


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    # The operator wants b as a layer's weight, [o, i]: a transposed view will do.
    rows: torch.Tensor = torch.ops.mkldnn._linear_pointwise(a.flatten(0, -2), b.t(), bias, "none", [], "")
    # A plain view could not leave an autograd function and be changed in place by the all-reduce behind it.
    return rows if a.dim() == 2 else torch.ops.aten._unsafe_view(rows, (*a.shape[:-1], rows.shape[1]))
