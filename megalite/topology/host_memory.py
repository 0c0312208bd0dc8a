"""Keep tensors in host memory and copy them to the device and back on separate streams, overlapped with computation.

The same code runs on a CPU, where host and device share memory and copies are synchronous."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat

Event = torch.cuda.Event | None
"""An event on a stream; None: complete."""

_ALIGNMENT = 64  # elements, as in buckets: tensors in a slot start at a multiple


def pinned(size: int | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialized pinned host memory, which the device can read and write by DMA (also on meta tensors)."""
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device, pin_memory=True)
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


class CopyStream:
    """Runs copies one after the other, overlapped with the device's computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Event]) -> Event:
        """Start copies (target, source) after all events of `after`. Return the event of their end; until then the
        tensors must stay alive, and nothing else may write to them."""
        if self._stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None
        for event in after:
            if event is not None:
                self._stream.wait_event(event)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    @contextmanager
    def overlapped(self) -> Iterator[None]:
        """Start operations in the block after all work queued on the device so far, overlapped with later work."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep_until_copied(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a device tensor, which is about to be freed, from reuse until the copies so far are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def now(self) -> Event:
        """Return the event of all work queued on the device so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def await_on_device(self, event: Event) -> None:
        """Make later work of the device wait for `event`; the host does not wait."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


@cache
def shared_stream(device: torch.device) -> CopyStream:
    """Return the stream for all small copies of a device."""
    return CopyStream(device)


class HostCopy:
    """A copy of a small tensor to the host, started by the constructor on the current stream.

    The host waits in `read` if the copy has not finished by then."""

    done: Event = None

    def __init__(self, tensor: torch.Tensor, heartbeat: Heartbeat = UNWATCHED) -> None:
        self._heartbeat, self._values = heartbeat, tensor
        if tensor.is_cuda:
            self._values = pinned(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)
            self.done = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> torch.Tensor:
        """Return the values on the host."""
        if self.done is not None and not self.done.query():
            with self._heartbeat.synchronise():
                self.done.synchronize()
        return self._values


class HostMemory:
    """Host tensors of one rank that are copied to the device part by part: while one part is processed, the next one is
    copied in and the previous one out. `slots`: parts that fit on the device; with three, both copies overlap."""

    def __init__(self, device: torch.device, *, slots: int) -> None:
        self.device = device
        self._in, self._out = CopyStream(device), CopyStream(device)
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._last: Event = None  # end of the last copy to the host, and so of all of them

    def reserve(self, nbytes: int) -> None:
        """Make room for parts of at most `nbytes` bytes on the device."""
        if nbytes > self._slots[0].numel():
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in self._slots]

    def wait(self) -> None:
        """Wait until all copies to the host are done."""
        if self._last is not None:
            self._last.synchronize()

    def stream(self, parts: Sequence[Sequence[torch.Tensor]], *, back: bool = True) -> Iterator[list[torch.Tensor]]:
        """Yield each part, a list of flat host tensors, on the device.

        `back`: values written to the device tensors before the next iteration are copied back to the host."""
        before, started = self._last, self._in.now()
        slot_free: list[Event] = [None] * len(self._slots)

        def fetch(index: int) -> tuple[list[torch.Tensor], Event]:
            slot = index % len(self._slots)
            on_device = _carve(self._slots[slot], parts[index])
            pairs = zip(on_device, parts[index], strict=True)
            return on_device, self._in.copy(pairs, after=(before, started, slot_free[slot]))

        coming = [fetch(index) for index in range(min(1, len(parts)))]
        for index, part in enumerate(parts):
            on_device, copied = coming.pop()
            if index + 1 < len(parts):
                coming.append(fetch(index + 1))
            self._in.await_on_device(copied)
            yield on_device
            processed = self._out.now()
            done = self._out.copy(zip(part, on_device, strict=True), after=(processed,)) if back else processed
            slot_free[index % len(self._slots)] = done
            self._last = done if back else self._last


def _carve(slot: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return a view of the slot for each tensor."""
    found, start = [], 0
    for tensor in tensors:
        found.append(slot[start : start + tensor.nbytes].view(tensor.dtype))
        start += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT * tensor.element_size()
    return found
