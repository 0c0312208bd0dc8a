"""An autograd function of two given halves: how collectives enter the graph."""

from collections.abc import Callable
from typing import Any

import torch

Half = Callable[[torch.Tensor], torch.Tensor]


class _Conjugate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: Half, back: Half) -> torch.Tensor:
        ctx.back = back
        y = there(x)
        if y is x:  # reduced in place
            ctx.mark_dirty(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None


def conjugate(x: torch.Tensor, there: Half, back: Half) -> torch.Tensor:
    """`there(x)`, of which the gradient is `back(grad)`; neither half may keep an activation.

    Collectives: those of `there` / those of `back`.
    """
    return _Conjugate.apply(x, there, back)
