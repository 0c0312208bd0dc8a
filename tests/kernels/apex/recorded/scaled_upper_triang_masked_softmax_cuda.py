"""Stand-in for apex's extension of this name: csrc/megatron/scaled_upper_triang_masked_softmax*."""

from typing import Any

import torch

from tests.kernels.apex.signatures import HALF_TYPES, check_kinds, contiguous, of_type, require


def _check(x: torch.Tensor) -> None:
    require(x.dim() == 3, "expected 3D tensor")
    of_type(x, *HALF_TYPES)
    matrices, length = x.shape[:2]
    require(x.shape[2] == length <= 16384, "seq_len <= 16384")
    require(length > 16, "lengths up to 16 are not recorded")
    require(matrices % (8 if length <= 128 else 4) == 0, "attn_batches % batches_per_block == 0")
    require(length % 4 == 0 or length <= 64, "misaligned address")


def forward(*arguments: Any) -> torch.Tensor:
    check_kinds(arguments, "tf")
    x, scale = arguments
    _check(x)
    contiguous(x)  # a raw pointer
    scale = torch.tensor(scale, dtype=x.dtype).item()  # the launcher's parameter is of the scores' type
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    return (x.float() * scale).masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype)


def backward(*arguments: Any) -> torch.Tensor:
    check_kinds(arguments, "ttf")
    grad, probabilities, scale = arguments
    _check(grad)
    of_type(probabilities, grad.dtype)  # read as the gradient's type, without a check
    require(probabilities.shape == grad.shape, "expected probabilities of the gradient's shape")
    grad, exact = grad.contiguous(), probabilities.float()
    inner = grad.float() * exact
    return grad.copy_(scale * (inner - exact * inner.sum(-1, keepdim=True)))
