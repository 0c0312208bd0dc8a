"""Memory of activations: recomputation in the backward (arXiv 2205.05198), and offload to host memory, layer by layer.

After an offloaded layer's forward, its saved tensors are copied to pinned memory while the next layer computes. In the
backward they are copied back while the following layer's backward computes. Copies change no bits."""

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.topology.host_memory import CopyStream, Event, pinned

NOTHING = nullcontext()
Tensors = Tensor | tuple[Tensor, ...]
Handle = Any
"""Placeholder of a saved tensor until the backward: the tensor, or a function that returns it."""


def unpack(handle: Handle) -> Tensor:
    return handle() if callable(handle) else handle


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
    """Number of layers at the start of each stage that offload their saved tensors to host memory."""
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


class ActivationOffload(SavedTensors):
    """Activation offload of one stage: the copies, and the order in which layers of a microbatch are copied back.

    `modules`: offload the saved tensors of these modules, except those that other modules keep on the device; None: all."""

    def __init__(self, device: torch.device, modules: frozenset[str] | None = None) -> None:
        super().__init__()
        self.device, self._modules = device, modules
        self.out, self.back = CopyStream(device), CopyStream(device)
        self._before: _Layer | None = None
        self._layer: _Layer | None = None
        """The layer that is running."""
        self._offloads = False
        """Whether tensors saved now are offloaded."""

    def start(self) -> None:
        """Start a microbatch: the next layer has no predecessor."""
        self._before = None

    @contextmanager
    def layer(self, x: Tensor, stays: Iterable[Tensor], *, recomputed: bool = False) -> Iterator[None]:
        """Wrap the forward of a layer on `x` [s, b, h], or of layers that are recomputed together and save only `x`.

        `stays`: tensors that stay on the device: parameters, and tensors that other layers save too."""
        # One number per token is not worth a copy; a leaf is the stage's input, which stays for its gradient anyway.
        layer = _Layer(self, self._before, least=x.numel() // x.shape[-1], stays=[*stays, *([x] if x.is_leaf else [])])
        self._layer, self._offloads = layer, self._selects("attn_norm") if recomputed else self._modules is None
        try:
            with self._hooks():
                yield
        finally:
            self._layer = None
        layer.leave()
        if self._before is not None:  # without this wait the host runs ahead and no layer's memory is freed
            self.out.await_on_device(self._before.copied)
        self._before = layer

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        before, self._offloads = self._offloads, self._selects(name)
        try:
            yield
        finally:
            self._offloads = before

    def runner(self, name: str) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.module(name):
                return function(*args, **kwargs)

        return run

    def fetch_with(self, output: Tensor) -> None:
        """Fetch the last offloaded layer when the backward of `output`, the next layer's output, begins."""
        last = self._before
        if last is not None and output.requires_grad:
            output.register_hook(lambda grad: last.fetch())

    def _selects(self, module: str | None) -> bool:
        return self._modules is None or module in self._modules

    def _kept(self, saved: Tensor) -> Handle:
        return super()._kept(saved) if self._layer is None else self._layer.pack(saved, self._offloads)

    def _input_handle(self, tensor: Tensor, module: str | None) -> Handle:
        return tensor if self._layer is None else self._layer.pack(tensor, self._selects(module))


class _Layer:
    """Storages that one layer saves in one microbatch."""

    def __init__(self, of: ActivationOffload, before: "_Layer | None", *, least: int, stays: Iterable[Tensor]) -> None:
        self._of, self._before, self._least = of, before, least
        self._stay = {each.untyped_storage()._cdata: each for each in stays}
        """Storage address -> a tensor that stays on the device; the reference keeps the address from being reused."""
        self._to_offload: dict[int, tuple[int, Tensor]] = {}
        """Storage address -> (its number, flat tensor) to offload. Some may be in `_stay` too."""
        self._host: dict[int, Tensor] = {}
        self._uses: list[int] = []
        self._on_device: dict[int, Tensor] = {}
        """Number -> storage on the device, until its last use in the backward."""
        self.copied: Event = None
        self._fetched: Event = None

    def pack(self, saved: Tensor, offload: bool) -> Handle:
        storage = saved.untyped_storage()
        if not offload or storage._cdata in self._stay or saved.numel() <= self._least:
            kept = saved if saved.is_leaf else saved.detach()
            self._stay.setdefault(storage._cdata, kept)
            return kept
        if storage._cdata not in self._to_offload:
            flat = saved.detach().as_strided((storage.nbytes() // saved.element_size(),), (1,), 0)
            self._to_offload[storage._cdata] = len(self._uses), flat
            self._uses.append(0)
        number, _ = self._to_offload[storage._cdata]
        self._uses[number] += 1
        kind, view = saved.dtype, (saved.size(), saved.stride(), int(saved.storage_offset()))
        return lambda: self._get(number).view(kind).as_strided(*view)

    def leave(self) -> None:
        """Start the copies to the host at the end of the forward."""
        pairs = []
        for storage, (number, flat) in self._to_offload.items():
            if storage in self._stay:
                self._on_device[number] = flat
            else:
                self._host[number] = pinned(flat.numel(), flat.dtype, flat.device)
                pairs.append((self._host[number], flat))
        self.copied = self._of.out.copy(pairs, after=(self._of.out.now(),))
        for _, flat in pairs:
            self._of.out.keep_until_copied(flat)
        self._to_offload.clear()
        self._stay.clear()

    def _get(self, number: int) -> Tensor:
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        self._of.back.await_on_device(self._fetched)
        self._uses[number] -= 1
        return self._on_device[number] if self._uses[number] else self._on_device.pop(number)

    def fetch(self) -> None:
        """Start the copies back to the device; later calls do nothing."""
        if self._host:
            fetched = {number: torch.empty_like(host, device=self._of.device) for number, host in self._host.items()}
            pairs = [(fetched[number], host) for number, host in self._host.items()]
            self._fetched = self._of.back.copy(pairs, after=(self.copied, self._of.back.now()))
            self._on_device |= fetched
            self._host = {}
