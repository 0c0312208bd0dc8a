"""Stand-in for apex's extension of this name: csrc/megatron/fused_rotary_positional_embedding*."""

from typing import Any

import torch

from tests.kernels.apex.signatures import FLOATS, check_kinds, contiguous, not_empty, of_type, require


def _checked(arguments: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_kinds(arguments, "tttb")
    x, cos, sin, transposed = arguments
    require(x.dim() == cos.dim() == sin.dim() == 4, "expected 4D tensor")
    for table in (cos, sin):
        require(table.shape[0] == x.shape[0], "expected input and cos tensor have the same sequence length")
        require(tuple(table.shape[1:3]) == (1, 1), "expected the second and third dims to equal 1")
        contiguous(table)  # read as [s, d2] by a raw pointer
        of_type(table, *((torch.float32,) if x.dtype == torch.float32 else (torch.float32, x.dtype)))
    require(cos.shape == sin.shape and cos.dtype == sin.dtype, "expected cos and sin of the same shape and type")
    require(cos.shape[3] == x.shape[3], "expected a table for the whole head")
    of_type(x, *FLOATS)
    not_empty(x.numel())
    assert not transposed
    # The kernel multiplies in the type of x.
    return x.contiguous(), cos.to(x.dtype), sin.to(x.dtype)


def forward_cached(*arguments: Any) -> torch.Tensor:
    x, cos, sin = _checked(arguments)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def backward_cached(*arguments: Any) -> torch.Tensor:
    grad, cos, sin = _checked(arguments)
    first, second = grad.chunk(2, dim=-1)
    low, high = sin.chunk(2, dim=-1)
    return grad * cos + torch.cat((second, first), dim=-1) * torch.cat((high, -low), dim=-1)
