"""MLP nonlinearities. The gated ones keep their input alone for the backward."""

from typing import Any

import torch
import torch.nn.functional as F


def bias_gelu(x: torch.Tensor, bias: torch.Tensor | None = None, *, tanh: bool = False) -> torch.Tensor:
    """z·Φ(z) for z = x + bias, exactly or by the tanh approximation that GPT-2 was trained with."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh" if tanh else "none")


class _Gated(torch.autograd.Function):
    """f(gate)·up; the backward computes f(gate) again rather than keeping a third tensor of this size."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kind = kind
        gate, up = x.chunk(2, dim=-1)
        return _activate(gate, kind).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_gate, grad_up = grad_x.chunk(2, dim=-1)
        torch.mul(_activate(gate, ctx.kind), grad, out=grad_up)
        if ctx.kind == "silu":
            torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        else:
            torch.ops.aten.gelu_backward.grad_input(
                grad * up, gate, approximate=ctx.kind, grad_input=grad_gate
            )
        return grad_x, None


def _activate(gate: torch.Tensor, kind: str) -> torch.Tensor:
    return F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=kind)


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up for x [..., 2·f] with the gate in the first half -> [..., f] (arXiv 2002.05202)."""
    return _Gated.apply(x, "silu")


def geglu(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """gelu(gate)·up for x [..., 2·f] with the gate in the first half -> [..., f] (arXiv 2002.05202)."""
    return _Gated.apply(x, "tanh" if tanh else "none")
