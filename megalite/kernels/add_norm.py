"""The end of one half of a block and the beginning of the other: bias, dropout, residual sum and norm."""

import torch

from megalite.kernels.dropout import add_dropped
from megalite.kernels.norms import layer_norm, rms_norm


def add_norm(
    branch: torch.Tensor,
    bias: torch.Tensor | None,
    keep: torch.Tensor | None,
    p: float,
    residual: torch.Tensor,
    weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x = residual + dropout(branch + bias), and its norm: (norm(x), x).

    Args:
        branch, residual: [..., n].
        bias: [n] of the linear layer that made `branch`, if it left it to us.
        keep: boolean [..., n], what stays of the branch, scaled by 1/(1-p); None: all of it, as it is.
        weight, norm_bias: [n] of LayerNorm; of RMSNorm where `norm_bias` is None.
    """
    x = add_dropped(residual, branch, bias, keep, p)
    if norm_bias is None:
        return rms_norm(x, weight, eps, zero_centered=zero_centered), x
    return layer_norm(x, weight, norm_bias, eps, zero_centered=zero_centered), x
