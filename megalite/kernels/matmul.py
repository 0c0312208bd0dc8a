"""Products of activations with matrices, by whatever BLAS torch was built with."""

import torch
import torch.nn.functional as F


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a [..., i] · b [i, o] + bias [o] -> [..., o], in one type; b may be a transposed view.

    Args:
        out: [n, o] for a [n, i]: the result goes there.
    """
    if out is None:
        return F.linear(a, b.t(), bias)
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)
