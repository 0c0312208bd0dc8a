"""Compares kernels with float64: outputs and the gradients of every input, by the relative L2 distance."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LIMITS = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 4.5e-3, torch.float16: 5e-4}
"""The interpreter truncates bf16 while a GPU rounds: an error of up to 4.2e-3 instead of 1.7e-3."""

DTYPES = tuple(LIMITS)

Tensors = Sequence[Tensor | None]
Outputs = Tensor | tuple[Tensor, ...]


def draw(*shape: int, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Draw normal numbers, the same on each call, on the device: on a host, large tensors take minutes."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, device=device, generator=generator).to(dtype)


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Return |ours - exact| / |exact|, or |ours| if exact is 0."""
    ours, exact = ours.detach().double(), exact.detach().double()
    scale = exact.norm().item()
    return (ours - exact).norm().item() / (scale or 1.0)


def assert_near(ours: Tensor, exact: Tensor, limit: float | None = None) -> None:
    """Check the shape and a relative error of at most `limit`, by default that of our type; NaN fails."""
    assert ours.shape == exact.shape
    found = relative_error(ours, exact)
    assert found <= (LIMITS[ours.dtype] if limit is None else limit), found


def run(
    function: Callable[..., Outputs], inputs: Tensors, grads: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and the gradients of float inputs, after a check of their types."""
    leaves = [
        value.detach().requires_grad_() if value is not None and value.is_floating_point() else value
        for value in inputs
    ]
    made = function(*leaves)
    outputs = list(made) if isinstance(made, tuple) else [made]
    torch.autograd.backward(outputs, list(grads))
    ours = []
    for leaf in leaves:
        if leaf is not None and leaf.requires_grad:
            assert leaf.grad.dtype == leaf.dtype
            ours.append(leaf.grad)
    return outputs, ours


def compare(
    ours: Callable[..., Outputs], exact: Callable[..., Outputs], inputs: Tensors, limit: float | None = None
) -> None:
    """Compare outputs and gradients of one function with another's in float64, within `limit` or the type's limit."""
    wide = [value.double() if value is not None and value.is_floating_point() else value for value in inputs]
    with torch.no_grad():
        made = exact(*wide)
    shapes = [output.shape for output in (made if isinstance(made, tuple) else (made,))]
    like = next(value for value in inputs if value is not None)
    grads = [draw(*shape, dtype=like.dtype, device=like.device, seed=90 + i) for i, shape in enumerate(shapes)]
    found = run(ours, inputs, grads)
    expected = run(exact, wide, [grad.double() for grad in grads])
    for one, other in zip([*found[0], *found[1]], [*expected[0], *expected[1]], strict=True):
        assert_near(one, other, limit)
    assert all(output.dtype == like.dtype for output in found[0])


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, offset: float) -> Tensor:
    """LayerNorm by its definition, or RMSNorm without `bias`; `offset` is added to the weight."""
    centred = x if bias is None else x - x.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * (offset + weight)
    return normed if bias is None else normed + bias
