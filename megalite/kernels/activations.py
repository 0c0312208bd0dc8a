"""MLP nonlinearities."""

import torch
import torch.nn.functional as F


def gelu(x: torch.Tensor, *, tanh: bool = False) -> torch.Tensor:
    """x·Φ(x), exactly or by the tanh approximation that GPT-2 was trained with."""
    return F.gelu(x, approximate="tanh" if tanh else "none")


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up for x [..., 2·f] with the gate in the first half (arXiv 2002.05202)."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
