"""Collectives between ranks of one host through memory that they share, with the bits of gloo's: no sockets, no threads.

Own code, as torch has none for CPUs. Each rank copies its part into its slot, counts one up and waits until its peers have
counted as far; then it adds or copies for itself. Each rank has two slots, used in turn: to begin an operation is to have
finished the one before, so all slots of the one before that have been read. On x86-64 stores are seen in their order, which
counters without a lock need; elsewhere there is no shared memory.
"""

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

SLOT_BYTES = 1 << 20  # given at once per rank; a larger tensor goes piece by piece
_COUNTER_BYTES = 64
"""From one rank's counter to the next: a cache line. Behind it is what the operation is, for each of the two slots."""
_HEADER_BYTES = 4096
LARGEST_GROUP = _HEADER_BYTES // _COUNTER_BYTES
_COUNTS = 1 << 32
_FUTEX, _FUTEX_WAIT, _FUTEX_WAKE, _EVERYONE = 202, 0, 1, 2**31 - 1
"""Linux's system call on x86-64 and its operations: sleep while a number in memory is still this one; wake who does."""
_LOOK_SECONDS = 0.2  # how often waiting ranks look whether their peer still runs
_GLOO_SEGMENT_BYTES = 1 << 20


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def ring_part(numel: int, itemsize: int, size: int) -> int:
    """Elements of a tensor that gloo's all-reduce adds in one order: part i is ((x[i-1] + x[i-2]) + ...) + x[i] over ranks."""
    segments = max(-(-numel * itemsize // _GLOO_SEGMENT_BYTES), 2 * size)
    per_rank = -(-segments // size)
    return per_rank * -(-numel // (per_rank * size))


@dataclass(eq=False)
class _UnderWay:
    """A collective; its first piece is given, the others follow in `wait()`."""

    pieces: Iterator[None]

    def wait(self) -> None:
        for _ in self.pieces:
            pass


class SharedMemory:
    """The slots of the ranks of one group. One operation at a time: the next one first finishes it.

    Nothing in a file system holds the memory, and the kernel frees it with the last of its processes, however they end.
    A rank locks a byte for as long as it lives: its peers see that it is gone when they can lock it.

    Args:
        name: of the group, for messages.
        ranks: global ranks.
        rank: this process's index in them.
        descriptor: of memory of `nbytes(len(ranks))` bytes; belongs to this object from now on.
        timeout: seconds after which a wait fails.
    """

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
        """Memory of a group of so many ranks."""
        return _HEADER_BYTES + 2 * size * SLOT_BYTES

    @classmethod
    def open(cls, group: Any, *, timeout: float) -> "SharedMemory | None":
        """Make or find the memory of a `Group`; None where its ranks are not processes of one Linux that see each other.

        Collectives: two gathers over the group.
        """
        descriptor, memory = -1, None
        here = _system() if group.size <= LARGEST_GROUP else None
        if group.rank == 0 and here is not None:
            descriptor = _allocated(cls.nbytes(group.size))
        everyone = group.gather_json([here, os.getpid(), descriptor])
        _, pid, theirs = everyone[0]
        if here is not None and theirs >= 0 and all(there == here for there, *_ in everyone):
            try:
                mine = descriptor if group.rank == 0 else os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
                memory = cls(group.name, group.ranks, group.rank, mine, timeout=timeout)
            except OSError:
                pass
        return memory if all(group.gather_json(memory is not None)) else None

    def all_reduce(self, tensor: Tensor, op: str) -> _UnderWay:
        """In place, in gloo's order."""
        combine: Any = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[op]
        size, flat, itemsize = self._size, tensor.detach().view(-1), tensor.element_size()
        part = ring_part(flat.numel(), itemsize, size)

        def give(slot: Tensor, start: int, stop: int) -> None:
            slot[: stop - start].copy_(flat[start:stop])

        def take(slots: Tensor, start: int, stop: int) -> None:
            for index in range(start // part, -(-stop // part)):
                low, high = max(start, index * part), min(stop, (index + 1) * part)
                total, given = flat[low:high], slots[:, low - start : high - start]
                combine(given[(index - 1) % size], given[(index - 2) % size], out=total)
                for step in range(3, size + 1):
                    combine(total, given[(index - step) % size], out=total)

        return self._start("all_reduce", flat.numel(), tensor.dtype, 1, give, take)

    def all_gather(self, output: Tensor, part: Tensor) -> _UnderWay:
        """`output` [size·n, ...] becomes the parts [n, ...]; `part` may lie in it."""
        rows, mine = output.detach().view(self._size, -1), part.detach().view(-1)

        def give(slot: Tensor, start: int, stop: int) -> None:
            slot[: stop - start].copy_(mine[start:stop])

        def take(slots: Tensor, start: int, stop: int) -> None:
            rows[:, start:stop].copy_(slots[:, : stop - start])

        return self._start("all_gather", mine.numel(), part.dtype, 1, give, take)

    def exchange(self, tensor: Tensor, take: Callable[[int, int, Tensor], object]) -> _UnderWay:
        """Row i of `tensor` [size, ...] goes to rank i; `take(start, stop, rows)` gets these columns of all rows for this one."""
        sent = tensor.detach().view(self._size, -1)

        def give(slot: Tensor, start: int, stop: int) -> None:
            width = stop - start
            slot[: self._size * width].view(self._size, width).copy_(sent[:, start:stop])

        def take_own_rows(slots: Tensor, start: int, stop: int) -> None:
            width = stop - start
            take(start, stop, slots[:, self._rank * width : (self._rank + 1) * width])

        return self._start("exchange", sent.shape[1], tensor.dtype, self._size, give, take_own_rows)

    def _start(
        self,
        name: str,
        length: int,
        dtype: torch.dtype,
        rows: int,
        give: Callable[[Tensor, int, int], None],
        take: Callable[[Tensor, int, int], None],
    ) -> _UnderWay:
        """Begin an operation on `rows` rows of `length` elements, so many columns at once as a slot holds.

        `give(slot, start, stop)` writes this rank's columns, `take(slots, start, stop)` reads those of all ranks.
        """
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
                give(slots[turn, self._rank], start, stop)
                mine = self._counters[self._rank]
                mine[1 + turn], mine[0] = signature, self._count
                self._futex(self._rank, _FUTEX_WAKE, _EVERYONE, None)
                yield
                for rank in range(self._size):
                    if rank != self._rank:
                        self._await(rank, before, operation)
                        if self._counters[rank][1 + turn] != signature:
                            raise RuntimeError(f"{self._who(rank)} is in another operation than {operation}")
                take(slots[turn], start, stop)

        self._last = _UnderWay(pieces())
        next(self._last.pieces, None)
        return self._last

    def _await(self, rank: int, count: int, operation: str) -> None:
        """Return when `rank` has counted on from `count`; it can be one operation ahead of this rank by then, no more."""
        counter, until = self._counters[rank], time.monotonic() + self._timeout
        pause = _Timespec(0, int(1e9 * _LOOK_SECONDS))
        while counter[0] == count:
            self._futex(rank, _FUTEX_WAIT, count, ctypes.byref(pause))
            if counter[0] != count:
                return
            if self._is_gone(rank):
                raise RuntimeError(f"Connection closed by peer: {self._who(rank)} has ended ({operation})")
            if time.monotonic() > until:
                raise RuntimeError(f"Timed out waiting {self._timeout:g} s for {self._who(rank)} ({operation})")

    def _who(self, rank: int) -> str:
        return f"rank {self._ranks[rank]} of {self._name} {list(self._ranks)}"

    def _is_gone(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True

    def _futex(self, rank: int, operation: int, number: int, timeout: Any) -> None:
        """On the counter of `rank`. It may return early: for a signal, or because the counter has changed."""
        counter = ctypes.byref(self._counters[rank])
        self._system_call(_FUTEX, counter, operation, ctypes.c_uint32(number), timeout, None, 0)


def _system() -> str | None:
    """The running kernel and the processes that this one sees; None: no system that this file knows."""
    return host_key() if (sys.platform, platform.machine()) == ("linux", "x86_64") else None


def _allocated(nbytes: int) -> int:
    """A descriptor of so much memory that no file system names; -1 where there is none."""
    try:
        descriptor = os.memfd_create("megalite")
    except OSError:
        return -1
    try:
        # Now rather than at a store, which would end the process where memory is short.
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError:
        os.close(descriptor)
        return -1
    return descriptor
