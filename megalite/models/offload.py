"""Activations in host memory between the forward and the backward, layer by layer.

After a layer is done, what autograd saved in it goes to pinned memory beside the computation. In the backward a layer's
activations come back while the layer behind it computes. Copies change no bit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megalite.models.recompute import Handle, SavedTensors
from megalite.topology.host_memory import CopyStream, Event, pinned


class ActivationOffload(SavedTensors):
    """Of one stage: the copies, and which layer of a microbatch comes back after which.

    Args:
        modules: of a layer what these save, unless another part of it keeps the same on the device; None: everything.
    """

    def __init__(self, device: torch.device, modules: frozenset[str] | None = None) -> None:
        super().__init__()
        self.device, self._modules = device, modules
        self.out, self.back = CopyStream(device), CopyStream(device)
        self._before: _Layer | None = None
        self._layer: _Layer | None = None
        """That is under way."""
        self._goes = False
        """What is saved now goes to the host."""

    def start(self) -> None:
        """The next layer is the first of a microbatch's pass."""
        self._before = None

    @contextmanager
    def layer(self, x: Tensor, stays: Iterable[Tensor], *, recomputed: bool = False) -> Iterator[None]:
        """Around the forward of a layer on `x` [s, b, h], or of layers that are recomputed together and keep `x` alone.

        `stays`: parameters, and what other layers save too.
        """
        # A number a token or less is not worth a copy, and a leaf is the stage's input, which is held for its gradient.
        layer = _Layer(self, self._before, least=x.numel() // x.shape[-1], stays=[*stays, *([x] if x.is_leaf else [])])
        self._layer, self._goes = layer, self._chosen("attn_norm") if recomputed else self._modules is None
        try:
            with self._hooks():
                yield
        finally:
            self._layer = None
        layer.leave()
        if self._before is not None:
            self.out.await_on_device(self._before.copied)  # or the host would run ahead, and all of it be alive
        self._before = layer

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        before, self._goes = self._goes, self._chosen(name)
        try:
            yield
        finally:
            self._goes = before

    def runner(self, name: str) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.module(name):
                return function(*args, **kwargs)

        return run

    def fetch_with(self, output: Tensor) -> None:
        """The last layer comes back as the backward of the one behind it, which has given `output`, begins."""
        last = self._before
        if last is not None and output.requires_grad:
            output.register_hook(lambda grad: last.fetch())

    def _chosen(self, module: str | None) -> bool:
        return self._modules is None or module in self._modules

    def _kept(self, saved: Tensor) -> Handle:
        return super()._kept(saved) if self._layer is None else self._layer.pack(saved, self._goes)

    def _held(self, tensor: Tensor, module: str | None) -> Handle:
        return tensor if self._layer is None else self._layer.pack(tensor, self._chosen(module))


class _Layer:
    """The storages that one layer saves in one microbatch."""

    def __init__(self, of: ActivationOffload, before: "_Layer | None", *, least: int, stays: Iterable[Tensor]) -> None:
        self._of, self._before, self._least = of, before, least
        self._stay = {each.untyped_storage()._cdata: each for each in stays}
        """By storage, with a tensor so that no other gets its address: what is on the device anyway."""
        self._go: dict[int, tuple[int, Tensor]] = {}
        """By storage: its number, and itself. Some may be in `_stay` too."""
        self._host: dict[int, Tensor] = {}
        self._uses: list[int] = []
        self._here: dict[int, Tensor] = {}
        """Until all uses have been served."""
        self.copied: Event = None
        self._came: Event = None

    def pack(self, saved: Tensor, goes: bool) -> Handle:
        storage = saved.untyped_storage()
        if not goes or storage._cdata in self._stay or saved.numel() <= self._least:
            kept = saved if saved.is_leaf else saved.detach()
            self._stay.setdefault(storage._cdata, kept)
            return kept
        if storage._cdata not in self._go:
            flat = saved.detach().as_strided((storage.nbytes() // saved.element_size(),), (1,), 0)
            self._go[storage._cdata] = len(self._uses), flat
            self._uses.append(0)
        number, _ = self._go[storage._cdata]
        self._uses[number] += 1
        kind, view = saved.dtype, (saved.size(), saved.stride(), int(saved.storage_offset()))
        return lambda: self._get(number).view(kind).as_strided(*view)

    def leave(self) -> None:
        """The forward is over."""
        pairs = []
        for storage, (number, flat) in self._go.items():
            if storage in self._stay:
                self._here[number] = flat
            else:
                self._host[number] = pinned(flat.numel(), flat.dtype, flat.device)
                pairs.append((self._host[number], flat))
        self.copied = self._of.out.copy(pairs, after=(self._of.out.now(),))
        for _, flat in pairs:
            self._of.out.keep_until_copied(flat)
        self._go.clear()
        self._stay.clear()

    def _get(self, number: int) -> Tensor:
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        self._of.back.await_on_device(self._came)
        self._uses[number] -= 1
        return self._here[number] if self._uses[number] else self._here.pop(number)

    def fetch(self) -> None:
        """Start to bring all of it back, once."""
        if self._host:
            here = {number: torch.empty_like(host, device=self._of.device) for number, host in self._host.items()}
            pairs = [(here[number], host) for number, host in self._host.items()]
            self._came = self._of.back.copy(pairs, after=(self.copied, self._of.back.now()))
            self._here |= here
            self._host = {}
