"""Kernels that are not megalite's, with the registry's signatures: compiled plain torch, and Liger where it is installed."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_flat_operations import CASES, operation_of

COMPILED, LIGER = "compile", "liger"


def rivals(case: str, *, compiled: bool) -> dict[str, Any]:
    """Rival -> its kernel, or the reason for which it has none, as text.

    Args:
        compiled: take the time to compile.
    """
    found: dict[str, Any] = {}
    plain = CASES[case].plain
    if plain is not None:
        found[COMPILED] = _compiled(plain) if compiled else "not compiled at this size"
    if operation_of(case) in _LIGER:
        found[LIGER] = _liger(operation_of(case))
    return found


def _compiled(plain: Any) -> Any:
    if isinstance(plain, tuple):
        return tuple(_compiled(function) for function in plain)
    return torch.compile(plain, dynamic=False, fullgraph=True)


def allow_repeated_backwards() -> None:
    """A compiled backward may not give its inputs' memory away: it is timed again and again on the same graph."""
    setattr(importlib.import_module("torch._functorch.config"), "donated_buffer", False)  # noqa: B010  (typed so)


def _liger(operation: str) -> Any:
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    try:
        functional = importlib.import_module("liger_kernel.transformers.functional")
    except Exception as error:
        return f"liger_kernel cannot be imported: {error}"
    return _LIGER[operation](functional)


def _liger_loss(functional: Any) -> Any:
    """Liger computes the gradient in the forward, in place of the logits; its backward scales it."""

    def forward(
        logits: torch.Tensor, labels: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        leaf = logits.detach().requires_grad_()
        with torch.enable_grad():
            loss = functional.liger_cross_entropy(leaf, labels, reduction="none")
        # As (m, d, picked): loss = log d - picked.
        stats = torch.stack((torch.zeros_like(loss), torch.ones_like(loss), -loss.detach()))
        return stats, (_Held(loss, leaf),)  # type: ignore[return-value]

    def backward(
        saved: Sequence[Any], labels: torch.Tensor, first: int, logsumexp: None, grad: torch.Tensor
    ) -> torch.Tensor:
        held = saved[0]
        return torch.autograd.grad(held.loss, held.leaf, grad.to(held.loss.dtype), retain_graph=True)[0]

    return forward, backward


class _Held:
    """A graph, with what the cases ask of a saved tensor: a copy, and to be restored, which it needs not be."""

    def __init__(self, loss: torch.Tensor, leaf: torch.Tensor) -> None:
        self.loss, self.leaf = loss, leaf

    def clone(self) -> "_Held":
        return self

    def copy_(self, other: "_Held") -> None:
        """Liger's backward scales a gradient that is there already: the time does not depend on its values."""


_LIGER: dict[str, Callable[[Any], Any]] = {
    # Not in place: else the gradient that comes in would be overwritten, which other users of it may still need.
    "rmsnorm": lambda f: lambda x, weight, eps: f.liger_rms_norm(x, weight, eps, in_place=False),
    "layernorm": lambda f: f.liger_layer_norm,
    "swiglu": lambda f: lambda x: f.liger_swiglu(*x.chunk(2, dim=-1)),
    "geglu": lambda f: lambda x: f.liger_geglu(*x.chunk(2, dim=-1)),
    "cross_entropy": _liger_loss,
}
