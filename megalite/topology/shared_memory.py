"""Run collectives between ranks of one host through shared memory, bit-identical to gloo's, without sockets or threads.

torch offers no such backend for CPUs. Each rank copies its part into its slot, increments its counter, waits until its
peers have reached the same count, and then adds or copies the slots. Each rank has two slots, used alternately: a rank
that starts an operation has finished the previous one, so all ranks have read the slots of the one before that. The
lock-free counters need stores to become visible in program order, as on x86-64; other machines use gloo."""

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.watchdog.processes import host_key

SLOT_BYTES = 1 << 20  # per rank; a larger tensor is exchanged piece by piece
_COUNTER_BYTES = 64
"""A cache line for each rank: its counter, followed by a checksum of the operation in each of the two slots."""
_HEADER_BYTES = 4096
LARGEST_GROUP = _HEADER_BYTES // _COUNTER_BYTES
_COUNTS = 1 << 32
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 202, 0, 1, 2**31 - 1
"""Linux's system call on x86-64 and its operations: sleep while a number in memory has a value; wake all sleepers."""
_LIVENESS_SECONDS = 0.2  # interval at which waiting ranks check that their peer is alive
_GLOO_SEGMENT_BYTES = 1 << 20


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def ring_part(numel: int, itemsize: int, size: int) -> int:
    """Return the size of the parts in which gloo's all-reduce adds a tensor: part i is ((x[i-1] + x[i-2]) + ...) + x[i]
    over ranks."""
    segments = max(-(-numel * itemsize // _GLOO_SEGMENT_BYTES), 2 * size)
    per_rank = -(-segments // size)
    return per_rank * -(-numel // (per_rank * size))


@dataclass(eq=False)
class _UnderWay:
    """A collective in flight: its first piece is in the slot; `wait()` exchanges the others."""

    pieces: Iterator[None]

    def wait(self) -> None:
        for _ in self.pieces:
            pass


class SharedMemory:
    """The slots of the ranks of one group. Starting an operation first finishes the previous one.

    The memory has no name in a file system, so the kernel frees it when the last process ends, even after a crash. Each
    rank locks a byte while it lives: a peer that can lock this byte knows that the rank is gone.

    Args:
        name: name of the group, for messages.
        ranks: global ranks.
        rank: this process's index in `ranks`.
        descriptor: file descriptor of `nbytes(len(ranks))` bytes; this object takes ownership.
        timeout: seconds after which a wait fails."""

    def __init__(self, name: str, ranks: Sequence[int], rank: int, descriptor: int, *, timeout: float) -> None:
        self._name, self._ranks, self._rank, self._timeout = name, ranks, rank, timeout
        self._size = size = len(ranks)
        self._descriptor = descriptor
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, rank)
        weakref.finalize(self, os.close, descriptor)
        memory = mmap.mmap(descriptor, self.nbytes(size))
        line = ctypes.c_uint32 * (_COUNTER_BYTES // 4)
        self._counters = [line.from_buffer(memory, index * _COUNTER_BYTES) for index in range(size)]
        self._slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES).view(2, size, SLOT_BYTES)
        self._system_call = ctypes.CDLL(None).syscall
        self._count = 0
        self._last = _UnderWay(iter(()))

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes that a group of `size` ranks needs."""
        return _HEADER_BYTES + 2 * size * SLOT_BYTES

    @classmethod
    def open(cls, group: Any, *, timeout: float) -> "SharedMemory | None":
        """Allocate or open the memory of a `Group`; None unless all ranks run on one host and can see each other.

        Collectives: two gathers over the group."""
        descriptor, memory = -1, None
        system = _system() if group.size <= LARGEST_GROUP else None
        if group.rank == 0 and system is not None:
            descriptor = _allocated(cls.nbytes(group.size))
        everyone = group.gather_json([system, os.getpid(), descriptor])
        _, pid, first = everyone[0]
        if system is not None and first >= 0 and all(other == system for other, *_ in everyone):
            try:
                if group.rank > 0:
                    descriptor = os.open(f"/proc/{pid}/fd/{first}", os.O_RDWR | os.O_CLOEXEC)
                memory = cls(group.name, group.ranks, group.rank, descriptor, timeout=timeout)
            except OSError:
                pass
        return memory if all(group.gather_json(memory is not None)) else None

    def all_reduce(self, tensor: Tensor, op: str) -> _UnderWay:
        """Reduce `tensor` over ranks in place, adding in gloo's order."""
        combine: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        size, flat, itemsize = self._size, tensor.detach().view(-1), tensor.element_size()
        part = ring_part(flat.numel(), itemsize, size)

        def write(slot: Tensor, start: int, stop: int) -> None:
            slot[: stop - start].copy_(flat[start:stop])

        def read(slots: Tensor, start: int, stop: int) -> None:
            for index in range(start // part, -(-stop // part)):
                low, high = max(start, index * part), min(stop, (index + 1) * part)
                total, terms = flat[low:high], slots[:, low - start : high - start]
                combine(terms[(index - 1) % size], terms[(index - 2) % size], out=total)
                for step in range(3, size + 1):
                    combine(total, terms[(index - step) % size], out=total)

        return self._start("all_reduce", flat.numel(), tensor.dtype, 1, write, read)

    def all_gather(self, output: Tensor, part: Tensor) -> _UnderWay:
        """Gather the parts [n, ...] of all ranks into `output` [size·n, ...]; `part` may be a view of it."""
        rows, own = output.detach().view(self._size, -1), part.detach().view(-1)

        def write(slot: Tensor, start: int, stop: int) -> None:
            slot[: stop - start].copy_(own[start:stop])

        def read(slots: Tensor, start: int, stop: int) -> None:
            rows[:, start:stop].copy_(slots[:, : stop - start])

        return self._start("all_gather", own.numel(), part.dtype, 1, write, read)

    def exchange(self, tensor: Tensor, receive: Callable[[int, int, Tensor], object]) -> _UnderWay:
        """Send row i of `tensor` [size, ...] to rank i; `receive(start, stop, rows)` gets columns of all rows sent here."""
        sent = tensor.detach().view(self._size, -1)

        def write(slot: Tensor, start: int, stop: int) -> None:
            width = stop - start
            slot[: self._size * width].view(self._size, width).copy_(sent[:, start:stop])

        def read(slots: Tensor, start: int, stop: int) -> None:
            width = stop - start
            receive(start, stop, slots[:, self._rank * width : (self._rank + 1) * width])

        return self._start("exchange", sent.shape[1], tensor.dtype, self._size, write, read)

    def _start(
        self,
        name: str,
        length: int,
        dtype: torch.dtype,
        rows: int,
        write: Callable[[Tensor, int, int], None],
        read: Callable[[Tensor, int, int], None],
    ) -> _UnderWay:
        """Start an operation on `rows` rows of `length` elements, as many columns at a time as fit into a slot.

        `write(slot, start, stop)` writes this rank's columns, `read(slots, start, stop)` reads those of all ranks."""
        self._last.wait()
        slots = self._slots.view(dtype)
        step = slots.shape[2] // rows
        operation = f"{name} of {rows * length} {dtype}"
        signature = zlib.crc32(operation.encode())

        def pieces() -> Iterator[None]:
            for start in range(0, length, step):
                stop, before = min(start + step, length), self._count
                self._count = (before + 1) % _COUNTS
                turn = self._count % 2
                write(slots[turn, self._rank], start, stop)
                own = self._counters[self._rank]
                own[1 + turn], own[0] = signature, self._count
                self._futex(self._rank, _FUTEX_WAKE, _EVERYONE, None)
                yield
                for rank in range(self._size):
                    if rank != self._rank:
                        self._await(rank, before, operation)
                        if self._counters[rank][1 + turn] != signature:
                            raise RuntimeError(f"{self._described(rank)} is in another operation than {operation}")
                read(slots[turn], start, stop)

        self._last = _UnderWay(pieces())
        next(self._last.pieces, None)
        return self._last

    def _await(self, rank: int, count: int, operation: str) -> None:
        """Wait until the counter of `rank` has left `count`; it can be at most one operation ahead of this rank."""
        counter, until = self._counters[rank], time.monotonic() + self._timeout
        pause = _Timespec(0, int(1e9 * _LIVENESS_SECONDS))
        while counter[0] == count:
            self._futex(rank, _FUTEX_WAIT, count, ctypes.byref(pause))
            if counter[0] != count:
                return
            if self._is_gone(rank):
                raise RuntimeError(f"Connection closed by peer: {self._described(rank)} has ended ({operation})")
            if time.monotonic() > until:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for {self._described(rank)} ({operation})")

    def _described(self, rank: int) -> str:
        return f"rank {self._ranks[rank]} of {self._name} {list(self._ranks)}"

    def _is_gone(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True

    def _futex(self, rank: int, operation: int, number: int, timeout: Any) -> None:
        """Call futex on the counter of `rank`. It may return early, on a signal or because the counter has changed."""
        counter = ctypes.byref(self._counters[rank])
        self._system_call(_FUTEX, counter, operation, ctypes.c_uint32(number), timeout, None, 0)


def _system() -> str | None:
    """Return a key of the running kernel and of its visible processes; None on an unsupported system."""
    return host_key() if (sys.platform, platform.machine()) == ("linux", "x86_64") else None


def _allocated(nbytes: int) -> int:
    """Return a descriptor of `nbytes` of anonymous memory; -1 if the system has none."""
    try:
        descriptor = os.memfd_create("megalite")
    except OSError:
        return -1
    try:
        # Allocate now: if memory ran out at a later store, the kernel would kill the process.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
