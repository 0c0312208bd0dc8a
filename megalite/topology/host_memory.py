"""Tensors that rest in host memory and visit the device: copies on separate streams, beside the computation.

On a CPU the same code runs: host and device are one memory, and a copy is done when it has been started.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch

from megalite.watchdog.heartbeat import UNWATCHED, Heartbeat

Event = torch.cuda.Event | None
"""Something on a stream; None: it has happened."""

_ALIGNMENT = 64  # elements, as in buckets: what follows in a slot starts at a multiple


def pinned(size: int | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory with any contents, which the device reads and writes by itself. (So does the rehearsal's.)"""
    if device.type == "meta":
        return torch.empty(size, dtype=dtype, device=device, pin_memory=True)
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


class CopyStream:
    """Copies one after the other, beside what the device computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], *, after: Iterable[Event]) -> Event:
        """Start (target, source) once all of `after` has happened; returns when it is done. Both must stay until then."""
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
    def beside(self) -> Iterator[None]:
        """What is started inside comes after what the device has been asked to compute so far, and beside what follows."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep_until_copied(self, tensor: torch.Tensor) -> None:
        """A tensor of the device is let go: its memory is not to be used again before the copies so far are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def now(self) -> Event:
        """What the device has been asked to compute so far."""
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def await_on_device(self, event: Event) -> None:
        """What the device computes next comes after it."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


@cache
def shared_stream(device: torch.device) -> CopyStream:
    """One for all small copies of a device."""
    return CopyStream(device)


class HostCopy:
    """A small tensor on its way to the host, started where it is made, on the stream of that moment, and read later.

    The host waits in `read`, unless the copy has ended by then.
    """

    done: Event = None

    def __init__(self, tensor: torch.Tensor, heartbeat: Heartbeat = UNWATCHED) -> None:
        self._heartbeat, self._values = heartbeat, tensor
        if tensor.is_cuda:
            self._values = pinned(tensor.shape, tensor.dtype, tensor.device).copy_(tensor, non_blocking=True)
            self.done = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> torch.Tensor:
        """The values, on the host."""
        if self.done is not None and not self.done.query():
            with self._heartbeat.synchronise():
                self.done.synchronize()
        return self._values


class HostMemory:
    """Host tensors of one rank that visit the device part by part: while one is worked on, the next comes in and the
    one before goes out. `slots`: places for a part on the device: three let both ways run at the same time."""

    def __init__(self, device: torch.device, *, slots: int) -> None:
        self.device = device
        self._in, self._out = CopyStream(device), CopyStream(device)
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(slots)]
        self._last: Event = None  # the last copy to the host, and so all of them

    def reserve(self, nbytes: int) -> None:
        """Parts take so many bytes on the device at most."""
        if nbytes > self._slots[0].numel():
            self._slots = [torch.empty(nbytes, dtype=torch.uint8, device=self.device) for _ in self._slots]

    def wait(self) -> None:
        """Return when the host may read what has gone out."""
        if self._last is not None:
            self._last.synchronize()

    def stream(self, parts: Sequence[Sequence[torch.Tensor]], *, back: bool = True) -> Iterator[list[torch.Tensor]]:
        """For each part, which is some flat host tensors, the same on the device.

        `back`: what is written into these, until the next part is asked for, goes to the host.
        """
        before, started = self._last, self._in.now()
        gone: list[Event] = [None] * len(self._slots)

        def fetch(index: int) -> tuple[list[torch.Tensor], Event]:
            place = index % len(self._slots)
            here = _carve(self._slots[place], parts[index])
            pairs = zip(here, parts[index], strict=True)
            return here, self._in.copy(pairs, after=(before, started, gone[place]))

        coming = [fetch(index) for index in range(min(1, len(parts)))]
        for index, part in enumerate(parts):
            here, there = coming.pop()
            if index + 1 < len(parts):
                coming.append(fetch(index + 1))
            self._in.await_on_device(there)
            yield here
            worked = self._out.now()
            done = self._out.copy(zip(part, here, strict=True), after=(worked,)) if back else worked
            gone[index % len(self._slots)] = done
            self._last = done if back else self._last


def _carve(slot: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A place in a slot for each tensor."""
    found, start = [], 0
    for tensor in tensors:
        found.append(slot[start : start + tensor.nbytes].view(tensor.dtype))
        start += -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT * tensor.element_size()
    return found
