"""Rotary position embedding by fused_rotary_positional_embedding."""

from typing import Any

import fused_rotary_positional_embedding as kernels
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megalite.config.errors import ConfigError
from megalite.kernels.apex.limits import check_elements

_whole_tables = WeakTensorKeyDictionary()
"""Table of d/2 columns -> of d columns, as long as the first lives: the layers of a stage share it."""


def _whole(table: torch.Tensor) -> torch.Tensor:
    """[s, 1, 1, d/2] -> [s, 1, 1, d]: the kernel wants the angles of a pair at both of its places."""
    found = _whole_tables.get(table)
    if found is None:
        found = _whole_tables[table] = torch.cat((table, table), dim=-1).float()
    return found


class _Rope(torch.autograd.Function):
    """Keeps nothing but the tables."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels.forward_cached(x, cos, sin, False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        check_elements("rope", grad)
        return kernels.backward_cached(grad, *ctx.saved_tensors, False), None, None


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (x_i, x_{i+d/2}) of x [s, b, heads, d] by their angles.

    For half types the kernel rounds the tables, each product and the sum, where the other backends round the sum alone.

    Args:
        x: queries or keys, with any strides.
        cos, sin: fp32 [s, 1, 1, d/2].

    Raises:
        ConfigError: tables for each sequence of the microbatch; 2^31 elements and more.
    """
    if cos.shape[1] != 1:
        raise ConfigError(
            "kernels: rope=apex takes one table for all sequences, and here each has positions of its own "
            "(reset_position_ids, or packing by documents); use rope=torch"
        )
    check_elements("rope", x)
    if x.numel() == 0:
        return x.clone()
    return _Rope.apply(x, _whole(cos), _whole(sin))
