"""Activations in host memory between the forward and the backward, layer by layer.

What autograd saves in an offloaded layer goes to pinned memory as it is saved, beside the computation. In the backward a
layer's activations come back while the layer behind it computes. Copies change no bit.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megalite.topology.host_memory import CopyStream, Event, pinned


class ActivationOffload:
    """Of one stage: the copies, and which layer of a microbatch comes back after which."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = CopyStream(device), CopyStream(device)
        self._before: _Layer | None = None

    def start(self) -> None:
        """The next layer is the first of a microbatch's pass."""
        self._before = None

    @contextmanager
    def layer(self, x: Tensor, stays: Iterable[Tensor]) -> Iterator[None]:
        """Around the forward of a layer on `x` [s, b, h]. `stays`: parameters, and what other layers save too."""
        # A number a token or less is not worth a copy, and a leaf is the stage's input, which is held for its gradient.
        layer = _Layer(self, self._before, least=x.numel() // x.shape[-1], stays=[*stays, *([x] if x.is_leaf else [])])
        with torch.autograd.graph.saved_tensors_hooks(layer.pack, lambda kept: kept() if callable(kept) else kept):
            yield
        layer.gone()
        if self._before is not None:
            self.out.await_on_device(self._before.copied)  # or the host would run ahead, and all of it be alive
        self._before = layer

    def fetch_with(self, output: Tensor) -> None:
        """The last layer comes back as the backward of the one behind it, which has given `output`, begins."""
        last = self._before
        if last is not None and output.requires_grad:
            output.register_hook(lambda grad: last.fetch())


class _Layer:
    """The storages that one layer saves in one microbatch."""

    def __init__(self, of: ActivationOffload, before: "_Layer | None", *, least: int, stays: Iterable[Tensor]) -> None:
        self._of, self._before, self._least = of, before, least
        self._stays = {each.untyped_storage()._cdata for each in stays}
        self._alive: dict[int, tuple[int, Tensor]] = {}
        """During the forward, by storage: its number, and itself, so that no other gets its address."""
        self._host: list[Tensor] = []
        self._uses: list[int] = []
        self._here: dict[int, Tensor] = {}
        """During the backward, by number, until all uses have been served."""
        self.copied: Event = None
        self._came: Event = None

    def pack(self, saved: Tensor) -> Tensor | Callable[[], Tensor]:
        storage = saved.untyped_storage()
        if storage._cdata in self._stays or saved.numel() <= self._least:
            # An operation that saves its own output would keep itself alive if the hook gave it back with its graph.
            return saved if saved.is_leaf else saved.detach()
        if storage._cdata not in self._alive:
            flat = saved.detach().as_strided((storage.nbytes() // saved.element_size(),), (1,), 0)
            host = pinned(flat.numel(), flat.dtype, flat.device)
            self.copied = self._of.out.copy([(host, flat)], after=(self._of.out.now(),))
            self._alive[storage._cdata] = len(self._host), flat
            self._host.append(host)
            self._uses.append(0)
        number, _ = self._alive[storage._cdata]
        self._uses[number] += 1
        kind, view = saved.dtype, (saved.size(), saved.stride(), int(saved.storage_offset()))
        return lambda: self._get(number).view(kind).as_strided(*view)

    def gone(self) -> None:
        """The forward is over."""
        for _, flat in self._alive.values():
            self._of.out.outlive(flat)
        self._alive.clear()

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
            self._here = {
                number: torch.empty_like(host, device=self._of.device) for number, host in enumerate(self._host)
            }
            pairs = [(self._here[number], host) for number, host in enumerate(self._host)]
            self._came = self._of.back.copy(pairs, after=(self.copied, self._of.back.now()))
            self._host = []
