"""Which activations the backward computes again instead of keeping them (arXiv 2205.05198), and how it does so."""

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NOTHING = nullcontext()
Made = Tensor | tuple[Tensor, ...]
Handle = Any
"""What stands for a saved tensor until the backward: itself, or a function that gives it."""


def unpacked(handle: Handle) -> Tensor:
    found: Tensor = handle() if callable(handle) else handle
    return found


class SavedTensors:
    """What the operations of a stage save for the backward: here as they are, but for what is made again.

    One pair of hooks serves all scopes, since torch asks none but the innermost ones.
    """

    def __init__(self) -> None:
        self._remade: list[_Remade] = []

    def module(self, name: str) -> AbstractContextManager[None]:
        """Around a part of a layer, for what treats the tensors of some parts in another way."""
        return NOTHING

    def runner(self, name: str) -> Callable[..., Any]:
        """What calls function(*args, **kwargs) inside `module`; a layer asks for it once, as here it takes no time."""
        return operator.call

    @contextmanager
    def remaking(
        self, made: Made, make: Callable[..., Made], *inputs: Tensor, kept_by: str | None = None
    ) -> Iterator[None]:
        """Operations inside keep neither what is `made` nor views of it; their backward works on `make(*inputs)` instead.

        `make`, of inputs that stay in memory until the backward anyway, saved in the module `kept_by`, gives the same bits
        and memory layout, and each tensor has its own memory. Not inside a checkpointed region: there nothing is kept, and
        this would keep `inputs`.
        """

        def keep() -> tuple[Handle, ...]:
            # Detached: what is kept in place of a view must keep memory alive, not the graph behind it.
            return tuple(self._held(each.detach(), kept_by) for each in inputs)

        self._remade.append(_Remade(made, make, keep))
        try:
            with self._hooks():
                yield
        finally:
            self._remade.pop()

    def _hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, unpacked)

    def _pack(self, saved: Tensor) -> Handle:
        for remade in self._remade:
            handle = remade.handle(saved)
            if handle is not None:
                return handle
        return self._kept(saved)

    def _kept(self, saved: Tensor) -> Handle:
        # An operation that saves its own output would keep itself alive if the hook gave it back with its graph.
        return saved if saved.is_leaf else saved.detach()

    def _held(self, tensor: Tensor, module: str | None) -> Handle:
        """A tensor that is no operation's, but saved in the module too."""
        return tensor


class _Remade:
    """Tensors that each backward makes once, when the first operation asks for one, and frees after the last.

    `uses` are the operations that would have kept one; with the first one the inputs are kept.
    """

    def __init__(self, made: Made, make: Callable[..., Made], keep: Callable[[], tuple[Handle, ...]]) -> None:
        tensors = made if isinstance(made, tuple) else (made,)
        self._places = {(each.untyped_storage()._cdata, each.dtype): index for index, each in enumerate(tensors)}
        self._make = make
        self._keep: Callable[[], tuple[Handle, ...]] | None = keep
        self._inputs: tuple[Handle, ...] = ()
        self._uses = self._waiting = 0
        self._made: Made | None = None

    def handle(self, saved: Tensor) -> Handle:
        """Of one of them or a view of it; None: it is none."""
        index = self._places.get((saved.untyped_storage()._cdata, saved.dtype)) if saved.numel() else None
        if index is None:
            return None
        if self._keep is not None:  # which has the inputs themselves
            self._inputs, self._keep = self._keep(), None
        self._uses += 1
        view = saved.size(), saved.stride(), int(saved.storage_offset())
        return lambda: self._get(index).as_strided(*view)

    def _get(self, index: int) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make(*map(unpacked, self._inputs))
            self._waiting = self._uses
        self._waiting -= 1
        found = self._made[index] if isinstance(self._made, tuple) else self._made
        if self._waiting == 0:
            self._made = None
        return found


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The plan of a run, the same for every stage.

    Granularity none, selective (`modules` run again) or full (whole layers): by `uniform` units of `num_layers` layers, of
    which only the input is kept, or `block`, the first `num_layers` layers of each stage one by one.
    """

    granularity: str = "none"
    modules: frozenset[str] = frozenset({"core_attn"})
    method: str = "uniform"
    num_layers: int = 1
    offload_layers: int = 0
    """Not recompute: the first layers of each stage of which what is kept goes to host memory."""
    offload_modules: frozenset[str] | None = None
    """Of what these modules save in them; None: all of it."""
    saves: SavedTensors = field(default_factory=SavedTensors, repr=False, compare=False)
    """Of the stage that the layers are in."""

    def selects(self, module: str) -> bool:
        """Selective recompute runs this kind of module again."""
        return self.granularity == "selective" and module in self.modules


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """function(*args), of which only the arguments are kept; dropout masks have no generator state to be saved."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
