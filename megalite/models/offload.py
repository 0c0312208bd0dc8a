"""Offload activations to host memory between forward and backward, layer by layer.

After a layer's forward, its saved tensors are copied to pinned memory while the next layer computes. In the backward
they are copied back while the following layer's backward computes. Copies change no bits."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.models.recompute import Handle, SavedTensors
from megalite.topology.host_memory import CopyStream, Event, pinned


class ActivationOffload(SavedTensors):
    """Activation offload of one stage: the copies, and the order in which layers of a microbatch are copied back.

    Args:
        modules: offload the saved tensors of these modules, except those that other modules keep on the
            device; None: all modules."""

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
        if self._before is not None:
            self.out.await_on_device(
                self._before.copied
            )  # otherwise the host runs ahead and no layer's memory is freed
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
