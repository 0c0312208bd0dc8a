"""The norm of flat gradients by amp_C.multi_tensor_l2norm."""

from collections.abc import Sequence

import amp_C
import torch

from megalite.kernels.apex.multi_tensor import CHUNK, flag

PIECE = 1 << 24
"""Elements whose squares the kernel sums, in fp32 and with offsets that are C++ ints."""


def l2norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """sqrt(Σ x²) over all elements of all flat tensors, fp64 [] on their device. At least one tensor.

    The kernel gives fp32 norms of pieces, whose squares are summed in fp64: within 2e-6 of the exact norm, and the same
    bits in every run.
    """
    device = tensors[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        pieces = [
            x[start : start + PIECE]
            for x in tensors
            if x.dtype == dtype
            for start in range(0, x.numel(), PIECE)
        ]
        if pieces:
            _, norms = amp_C.multi_tensor_l2norm(CHUNK, flag(device), [pieces], True)
            total += norms.double().square().sum()
    return total.sqrt()
