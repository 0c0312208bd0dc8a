"""The LAMB formula of its paper in float64, and inputs for kernels."""

from typing import Any

import torch
from torch import Tensor

TERMS: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-3, "weight_decay": 0.1}
NAMES = ("param", "grad", "exp_avg", "exp_avg_sq")


def draw_tensors(n: int, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> list[Tensor]:
    """Draw the tensors of NAMES, with moments as after some steps."""
    generator = torch.Generator().manual_seed(n)
    values = [torch.randn(n, dtype=torch.float64, generator=generator) for _ in range(4)]
    values[3].square_()
    return [value.to(device, dtype) for value in values]


def exact(
    tensors: list[Tensor], *, rate: float, beta1: float, beta2: float, eps: float, weight_decay: float, step: int
) -> dict[str, Tensor]:
    """Apply algorithm 2 of arXiv 1904.00962 to one tensor; return all results, including the norms."""
    x, g, m, v = (tensor.double() for tensor in tensors)
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    u = (m / (1.0 - beta1**step)) / ((v / (1.0 - beta2**step)).sqrt() + eps) + weight_decay * x
    norms = torch.stack([x.norm(), u.norm()])
    return {"param": x - rate * u, "grad": g, "exp_avg": m, "exp_avg_sq": v, "norms": norms}


def run(kernel: Any, tensors: list[Tensor], *, rate: float, **terms: Any) -> dict[str, Tensor]:
    """Run both functions of the kernel in place; return the same results as `exact`."""
    moments, step = kernel
    norms = moments(*tensors, **terms, norms=True)
    assert all(norm.dtype == torch.float64 and norm.shape == () for norm in norms)
    param, _, exp_avg, exp_avg_sq = tensors
    step(param, exp_avg, exp_avg_sq, **terms, rate=rate)
    return {**dict(zip(NAMES, tensors, strict=True)), "norms": torch.stack(norms)}


def relative_errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """Return ‖found - wanted‖/‖wanted‖ of each result."""
    return {
        name: ((found[name].double() - right).norm() / right.norm().clamp(min=1e-300)).item()
        for name, right in wanted.items()
    }
