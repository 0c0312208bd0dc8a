"""Which activations the backward computes again instead of keeping them (arXiv 2205.05198), and how it does so."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The plan of a run, the same for every stage.

    Granularity none, selective (`modules` run again) or full (whole layers): by `uniform` units of `num_layers` layers, of
    which only the input is kept, or `block`, the first `num_layers` layers of each stage one by one.
    """

    MODULES: ClassVar[tuple[str, ...]] = ("core_attn", "mlp_act", "layernorm", "mlp", "moe")

    granularity: str = "none"
    modules: frozenset[str] = frozenset({"core_attn"})
    method: str = "uniform"
    num_layers: int = 1

    def selects(self, module: str) -> bool:
        """Selective recompute runs this kind of module again."""
        return self.granularity == "selective" and module in self.modules


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), of which only the arguments are kept; dropout masks have no generator state to be saved."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class _Remade:
    """A tensor that each backward makes once, when the first operation asks for it, and frees after the last.

    `uses` are the operations that would have kept it.
    """

    def __init__(self, make: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self._make, self._inputs = make, inputs
        self.uses = self._waiting = 0
        self._value: Tensor | None = None

    def get(self) -> Tensor:
        if self._value is None:
            with torch.no_grad():
                self._value = self._make(*self._inputs)
            self._waiting = self.uses
        self._waiting -= 1
        value = self._value
        if self._waiting == 0:
            self._value = None
        return value


@contextmanager
def not_saving(tensor: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Iterator[None]:
    """Operations inside keep neither `tensor` nor views of it; their backward works on `make(*inputs)` instead.

    `make`, of inputs that stay in memory until the backward anyway, gives the same bits and memory layout as `tensor`, which
    has its own memory. Not inside a checkpointed region: there nothing is kept, and this would keep `inputs`.
    """
    storage, dtype = tensor.untyped_storage().data_ptr(), tensor.dtype
    # Detached: what is kept in place of a view must keep memory alive, not the graph behind it.
    remade = _Remade(make, tuple(each.detach() for each in inputs))

    def pack(saved: Tensor) -> Any:
        if saved.numel() == 0 or saved.dtype != dtype or saved.untyped_storage().data_ptr() != storage:
            # An operation that saves its own output would keep itself alive if the hook gave it back with its graph.
            return saved if saved.is_leaf else saved.detach()
        remade.uses += 1
        view = saved.size(), saved.stride(), int(saved.storage_offset())
        return lambda: remade.get().as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept() if callable(kept) else kept):
        yield
