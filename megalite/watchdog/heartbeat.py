"""`Heartbeat`: what a rank is doing, in a small file that another process of the host reads.

A beat is a store into mapped memory: it costs about a microsecond, and what it says can be read when the rank is stopped,
holds Python's lock or is gone. Groups, the executor and the training loop get a heartbeat as they get a device;
`UNWATCHED` does nothing."""

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from megalite.watchdog import layout
from megalite.watchdog.layout import CODES, LANES, SYNCHRONISE, lane_name
from megalite.watchdog.processes import start_time

_MOST_REMEMBERED = 100_000  # operations of one step and lane


class Waitable(Protocol):
    """Something under way."""

    def wait(self) -> Any: ...


class Lane:
    """The operations of one group, counted: every rank of the group begins the same ones in the same order.

    This one counts nothing."""

    def start(self, begin: Callable[[], Waitable], operation: str, size: int = 0) -> Waitable:
        """Begin an operation; a rank that waits, in `begin` or for what is returned, is seen to wait. `size`: bytes,
        where every rank of the group has equally many; else 0."""
        return begin()


class Heartbeat:
    """What the parts of a run report of themselves. This one reports nothing."""

    def beat(self) -> None:
        """Something has gone on."""

    def phase(self, name: str, *, patient: bool = False) -> None:
        """The run has come to another part of its loop. `patient`: it may take long without a beat: files are written,
        code is compiled."""

    def begin_step(self, step: int) -> None:
        """A training step begins."""

    def act(self, action: bytes, position: int) -> None:
        """The pipeline begins an action, `position` of this rank's list."""

    def lane(self, kind: str, ranks: tuple[int, ...]) -> Lane:
        """The lane of a group; the same one for the same kind and ranks."""
        return _NO_LANE

    def synchronise(self) -> AbstractContextManager[None]:
        """Around a read of numbers that a device computes: on CUDA the one place where a rank waits for its peers."""
        return nullcontext()

    def close(self, *, failed: bool = False) -> None:
        """No one watches any more. `failed`: the run has come to an end here alone."""


_NO_LANE = Lane()
UNWATCHED = Heartbeat()


class FileHeartbeat(Heartbeat):
    """Beats into its own file; one per process. `path`: must not exist."""

    def __init__(self, path: Path, *, rank: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            # Now rather than at a store: a disk without room for it would end the process there.
            os.posix_fallocate(descriptor, 0, layout.SIZE)
            self._memory = mmap.mmap(descriptor, layout.SIZE)
        finally:
            os.close(descriptor)
        self._count = 0
        self._lanes: dict[str, _FileLane] = {}
        self._making = threading.Lock()
        self._rank = rank
        self._step = -1
        self.phase("starting", patient=True)
        pid = os.getpid()
        header = (layout.MAGIC, rank, pid, start_time(pid) or 0)
        layout.HEADER.pack_into(self._memory, layout.HEADER_AT, *header)

    def beat(self) -> None:
        # Two threads at once may count one beat for two: it has changed all the same.
        self._count += 1
        layout.PULSE.pack_into(self._memory, layout.PULSE_AT, self._count, monotonic())

    def phase(self, name: str, *, patient: bool = False) -> None:
        patient = patient or self._step < 0
        layout.PLACE.pack_into(self._memory, layout.PLACE_AT, self._step, patient, name.encode())
        self.act(b"", -1)

    def begin_step(self, step: int) -> None:
        # Kernels are compiled and connections made in a run's first step.
        first, self._step = self._step < 0, step
        for lane in tuple(self._lanes.values()):
            lane.turn()
        self.phase("step", patient=first)

    def act(self, action: bytes, position: int) -> None:
        layout.ACTION.pack_into(self._memory, layout.ACTION_AT, action, position)
        self.beat()

    def lane(self, kind: str, ranks: tuple[int, ...]) -> Lane:
        name = lane_name(kind, ranks)
        with self._making:
            if name not in self._lanes:
                if len(self._lanes) == LANES:
                    return _NO_LANE
                self._lanes[name] = _FileLane(self, self._memory, len(self._lanes), name)
            return self._lanes[name]

    def synchronise(self) -> AbstractContextManager[None]:
        lane = self.lane(SYNCHRONISE, (self._rank,))
        return _Reading(lane) if isinstance(lane, _FileLane) else nullcontext()

    def close(self, *, failed: bool = False) -> None:
        # The memory stays mapped: a thread that is left behind may still beat.
        self.phase("failed" if failed else "ended")


class _FileLane(Lane):
    def __init__(self, heartbeat: FileHeartbeat, memory: mmap.mmap, index: int, name: str) -> None:
        self._heartbeat, self._memory, self._index = heartbeat, memory, index
        at = layout.LANES_AT + index * layout.LANE_BYTES
        self._at, self._recent_at = at + layout.LANE_NAME.size, at + layout.RECENT_AT
        self._begun = 0
        self._this_step: list[tuple[int, int]] = []
        self._step_before: list[tuple[int, int]] = []
        layout.LANE_NAME.pack_into(memory, at, name.encode()[: layout.LANE_NAME.size])

    def synchronise(self) -> None:
        """The host begins to wait for its device. The operation before it stays the rank's last one."""
        self._begun = number = self._begun + 1
        place = self._recent_at + number % layout.RECENT * layout.OPERATION.size
        layout.OPERATION.pack_into(self._memory, place, 0, CODES[SYNCHRONISE], False)
        self.wait_for(number)

    def start(self, begin: Callable[[], Waitable], operation: str, size: int = 0) -> Waitable:
        self._begun = number = self._begun + 1
        signature = size, CODES[operation]
        index = len(self._this_step)
        odd = index < len(self._step_before) and self._step_before[index] != signature
        if index < _MOST_REMEMBERED:
            self._this_step.append(signature)
        place = self._recent_at + number % layout.RECENT * layout.OPERATION.size
        layout.OPERATION.pack_into(self._memory, place, *signature, odd)
        self._write(number)
        layout.LAST_LANE.pack_into(self._memory, layout.LAST_LANE_AT, self._index)
        self._heartbeat.beat()
        try:
            # NCCL connects here at the first time, and waits for its peers.
            return _Counted(begin(), self, number)
        finally:
            self._write(0)

    def turn(self) -> None:
        """A step begins: what it does is compared with what this one did."""
        self._step_before, self._this_step = self._this_step, []

    def wait_for(self, number: int) -> None:
        self._write(number)
        self._heartbeat.beat()

    def _write(self, waiting: int) -> None:
        layout.LANE.pack_into(self._memory, self._at, self._begun, waiting)


class _Reading(AbstractContextManager[None]):
    """While inside, the host waits for its device."""

    __slots__ = ("_lane",)

    def __init__(self, lane: _FileLane) -> None:
        self._lane = lane

    def __enter__(self) -> None:
        self._lane.synchronise()

    def __exit__(self, *error: object) -> None:
        self._lane.wait_for(0)


class _Counted:
    """An operation with waits that can be seen."""

    __slots__ = ("_lane", "_number", "_work")

    def __init__(self, work: Waitable, lane: _FileLane, number: int) -> None:
        self._work, self._lane, self._number = work, lane, number

    def wait(self) -> Any:
        self._lane.wait_for(self._number)
        try:
            return self._work.wait()
        finally:
            self._lane.wait_for(0)
