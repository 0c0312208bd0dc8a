"""The norm of a flat gradient, exact enough for any number of elements."""

import torch

NORM_ROW = 1 << 14
"""Elements whose squares are summed in the gradient's own precision."""


def norm_squared(grad: torch.Tensor | None) -> torch.Tensor:
    """Σg², fp64."""
    assert grad is not None
    # Rows small enough that fp32's pairwise sum keeps its digits, their total in fp64.
    whole = grad.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(grad[:whole].view(-1, NORM_ROW), dim=1).double().square().sum()
    return rows + torch.linalg.vector_norm(grad[whole:]).double().square()
