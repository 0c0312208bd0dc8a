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

    MODULES: ClassVar[tuple[str, ...]] = (
        "core_attn",
        "mla_up_proj",
        "mlp_act",
        "layernorm",
        "mlp",
        "shared_experts",
        "moe",
    )

    granularity: str = "none"
    modules: frozenset[str] = frozenset({"core_attn"})
    method: str = "uniform"
    num_layers: int = 1
    offload_layers: int = 0
    """Not recompute: the first layers of each stage of which activations go to host memory instead."""

    def selects(self, module: str) -> bool:
        """Selective recompute runs this kind of module again."""
        return self.granularity == "selective" and module in self.modules


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), of which only the arguments are kept; dropout masks have no generator state to be saved."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


Made = Tensor | tuple[Tensor, ...]


class _Remade:
    """Tensors that each backward makes once, when the first operation asks for one, and frees after the last.

    `uses` are the operations that would have kept one.
    """

    def __init__(self, make: Callable[..., Made], inputs: tuple[Tensor, ...]) -> None:
        self._make, self._inputs = make, inputs
        self.uses = self._waiting = 0
        self._made: Made | None = None

    def get(self, index: int) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make(*self._inputs)
            self._waiting = self.uses
        self._waiting -= 1
        found = self._made[index] if isinstance(self._made, tuple) else self._made
        if self._waiting == 0:
            self._made = None
        return found


@contextmanager
def not_saving(made: Made, make: Callable[..., Made], *inputs: Tensor) -> Iterator[None]:
    """Operations inside keep neither what is `made` nor views of it; their backward works on `make(*inputs)` instead.

    `make`, of inputs that stay in memory until the backward anyway, gives the same bits and memory layout, and each tensor
    has its own memory. Not inside a checkpointed region: there nothing is kept, and this would keep `inputs`.
    """
    tensors = made if isinstance(made, tuple) else (made,)
    places = {(each.untyped_storage().data_ptr(), each.dtype): index for index, each in enumerate(tensors)}
    # Detached: what is kept in place of a view must keep memory alive, not the graph behind it.
    remade = _Remade(make, tuple(each.detach() for each in inputs))

    def pack(saved: Tensor) -> Any:
        index = places.get((saved.untyped_storage().data_ptr(), saved.dtype)) if saved.numel() else None
        if index is None:
            # An operation that saves its own output would keep itself alive if the hook gave it back with its graph.
            return saved if saved.is_leaf else saved.detach()
        remade.uses += 1
        view = saved.size(), saved.stride(), int(saved.storage_offset())
        return lambda: remade.get(index).as_strided(*view)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept() if callable(kept) else kept):
        yield
