"""Matrix products in fp8 with one scale a tensor: e4m3 forward, e5m2 gradients (arXiv 2209.05433).

A scale is the largest power of two that brings the tensor's largest element into range: it is exact to apply and to undo,
and among normal numbers how an element is rounded does not depend on its neighbours, so that shards of a tensor are
rounded as the whole is. It comes from the tensor at hand, not from earlier ones: there is no state, and nothing overflows.
"""

from collections.abc import Callable

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""Both dimensions of a weight must be multiples: 16-byte rows of what is multiplied."""

Quantise = Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
"""As `quantise`."""

_SMALLEST = 2.0**-100
"""Where the largest element is below it (all are 0, say), its scale."""


def why_not_fp8(device: torch.device) -> str | None:
    """Why the device cannot multiply in fp8, or None."""
    if device.type != "cuda":
        return f"{device.type} has no matrix products in fp8"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"it takes compute capability 8.9 or more, and this device has {major}.{minor}"
    return None


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x·2^k in fp8, and 2^-k as an fp32 scalar on its device, with the largest k that fits.

    What is infinite or NaN makes the tensor NaN, which the step's check of loss and norm then sees.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32).clamp(min=_SMALLEST)
    _, exponent = torch.frexp(torch.finfo(dtype).max / largest)
    scale = torch.ldexp(torch.ones_like(largest), exponent - 1)
    # The difference is 0, or NaN where it is of infinities.
    scale = scale + (largest - largest)
    return (x * scale.to(x.dtype)).to(dtype), scale.reciprocal()


class Fp8Products:
    """`Products` of bf16 tensors through torch's scaled matrix product (fp32 sums).

    Args:
        quantise: compiled, where the run compiles: eager it passes over the tensor four times.
    """

    def __init__(self, quantise: Quantise = quantise) -> None:
        self._quantise = quantise

    def output(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Both in e4m3."""
        x8, undo_x = self._quantise(x.flatten(0, -2).contiguous(), E4M3)
        weight8, undo_weight = self._quantise(weight, E4M3)
        # Fast sums keep fewer bits of partial results, as is usual forward.
        y = torch._scaled_mm(
            x8, weight8.t(), undo_x, undo_weight, bias=bias, out_dtype=x.dtype, use_fast_accum=x.is_cuda
        )
        return y.view(*x.shape[:-1], weight.shape[0])

    def input_grad(self, grad_y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The gradient in e5m2, the weight in e4m3 as forward; it is made again rather than kept."""
        grad8, undo_grad = self._quantise(grad_y.flatten(0, -2).contiguous(), E5M2)
        weight8, undo_weight = self._quantise(weight, E4M3)
        # The second factor is wanted column by column.
        columns = weight8.view(torch.uint8).t().contiguous().view(E4M3)
        grad_x = torch._scaled_mm(grad8, columns.t(), undo_grad, undo_weight, out_dtype=grad_y.dtype)
        return grad_x.view(*grad_y.shape[:-1], weight.shape[1])
