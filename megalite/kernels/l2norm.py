"""The norm of flat gradients, exact enough for any number of elements."""

from collections.abc import Sequence

import torch

ROW = 1 << 14
"""Elements whose squares are summed in the gradient's own precision."""


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """sqrt(Σ x²) over all elements of all flat tensors, fp64 [] on their device. At least one tensor."""
    total = torch.zeros((), dtype=torch.float64, device=tensors[0].device)
    for x in tensors:
        # Rows small enough that fp32's pairwise sum keeps its digits, their total in fp64.
        whole = x.numel() // ROW * ROW
        total += torch.linalg.vector_norm(x[:whole].view(-1, ROW), dim=1).double().square().sum()
        total += torch.linalg.vector_norm(x[whole:]).double().square()
    return total.sqrt()
