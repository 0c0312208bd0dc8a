"""Activation recomputation (arXiv 2205.05198): the plan of a run, and tensors that the backward recomputes."""

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NOTHING = nullcontext()
Tensors = Tensor | tuple[Tensor, ...]
Handle = Any
"""Placeholder of a saved tensor until the backward: the tensor, or a function that returns it."""


def unpack(handle: Handle) -> Tensor:
    tensor: Tensor = handle() if callable(handle) else handle
    return tensor


class SavedTensors:
    """Handler of the tensors that a stage's operations save for the backward; recomputes those passed to `recomputing`.

    One pair of hooks serves all scopes, because torch calls only the innermost hooks."""

    def __init__(self) -> None:
        self._recomputed: list[_Recomputed] = []

    def module(self, name: str) -> AbstractContextManager[None]:
        """Wrap the module `name` of a layer, for subclasses that treat some modules' tensors differently."""
        return NOTHING

    def runner(self, name: str) -> Callable[..., Any]:
        """Return a function that calls function(*args, **kwargs) inside `module`; without overhead in this class."""
        return operator.call

    @contextmanager
    def recomputing(
        self, tensors: Tensors, compute: Callable[..., Tensors], *inputs: Tensor, saved_in: str | None = None
    ) -> Iterator[None]:
        """Keep operations inside from saving `tensors` or views of them; the backward uses `compute(*inputs)` instead.

        `compute` must return the same bits in the same memory layout, one storage per tensor. The inputs, saved in the
        module `saved_in`, stay in memory until the backward anyway. Do not use it inside a checkpointed region: that
        saves nothing, but this would save `inputs`."""

        def keep() -> tuple[Handle, ...]:
            # Detached: a saved input must keep its memory alive, but not its graph.
            return tuple(self._input_handle(each.detach(), saved_in) for each in inputs)

        self._recomputed.append(_Recomputed(tensors, compute, keep))
        try:
            with self._hooks():
                yield
        finally:
            self._recomputed.pop()

    def _hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, unpack)

    def _pack(self, saved: Tensor) -> Handle:
        for recomputed in self._recomputed:
            handle = recomputed.handle(saved)
            if handle is not None:
                return handle
        return self._kept(saved)

    def _kept(self, saved: Tensor) -> Handle:
        # An operation that saves its own output would keep itself alive if the hook returned it with its graph.
        return saved if saved.is_leaf else saved.detach()

    def _input_handle(self, tensor: Tensor, module: str | None) -> Handle:
        """Return the handle of an input of a recomputation, saved in `module`."""
        return tensor


class _Recomputed:
    """Tensors that a backward computes once, at the first use, and frees after the last.

    `_uses` counts the operations that would have saved one; the first of them saves the inputs."""

    def __init__(
        self, tensors: Tensors, compute: Callable[..., Tensors], keep: Callable[[], tuple[Handle, ...]]
    ) -> None:
        each_one = tensors if isinstance(tensors, tuple) else (tensors,)
        self._indices = {(each.untyped_storage()._cdata, each.dtype): index for index, each in enumerate(each_one)}
        self._compute = compute
        self._keep: Callable[[], tuple[Handle, ...]] | None = keep
        self._inputs: tuple[Handle, ...] = ()
        self._uses = self._waiting = 0
        self._result: Tensors | None = None

    def handle(self, saved: Tensor) -> Handle:
        """Return a handle if `saved` is one of the tensors or a view of one, else None."""
        index = self._indices.get((saved.untyped_storage()._cdata, saved.dtype)) if saved.numel() else None
        if index is None:
            return None
        if self._keep is not None:  # the closure references the inputs, so drop it
            self._inputs, self._keep = self._keep(), None
        self._uses += 1
        view = saved.size(), saved.stride(), int(saved.storage_offset())
        return lambda: self._get(index).as_strided(*view)

    def _get(self, index: int) -> Tensor:
        if self._result is None:
            with torch.no_grad():
                self._result = self._compute(*map(unpack, self._inputs))
            self._waiting = self._uses
        self._waiting -= 1
        tensor = self._result[index] if isinstance(self._result, tuple) else self._result
        if self._waiting == 0:
            self._result = None
        return tensor


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """The recomputation plan of a run, the same for every stage.

    Granularity: none, selective (`modules` are recomputed) or full (whole layers). Full with `uniform` saves the input
    of each unit of `num_layers` layers; with `block` it recomputes the first `num_layers` layers of each stage one by
    one."""

    granularity: str = "none"
    modules: frozenset[str] = frozenset({"core_attn"})
    method: str = "uniform"
    num_layers: int = 1
    offload_layers: int = 0
    """Number of layers at the start of each stage with saved tensors go to host memory; not a recompute setting."""
    offload_modules: frozenset[str] | None = None
    """Offload only saved tensors of these modules; None: of all modules."""
    saves: SavedTensors = field(default_factory=SavedTensors, repr=False, compare=False)
    """Saved tensors of the layers' stage."""

    def selects(self, module: str) -> bool:
        """Return whether selective recompute includes this kind of module."""
        return self.granularity == "selective" and module in self.modules


def recomputed(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Return function(*args), saving only the arguments; dropout masks need no generator state."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
