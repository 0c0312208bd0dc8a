"""`Heartbeat`: what a rank is doing, in a small file that another process of the host reads.

A beat is a store into mapped memory: it costs about a microsecond, and what it says can be read when the rank is stopped,
holds Python's lock or is gone. Groups, the executor and the training loop get a heartbeat as they get a device;
`UNWATCHED` does nothing."""

import mmap
import os
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from megalite.watchdog.processes import start_time

# The file: fixed places, so that a beat is one or two stores into mapped memory.
MAGIC = b"megabeat"
LANES = 64  # groups that a rank may have; what happens in further ones counts as a beat and is not distinguished

HEADER = struct.Struct("<8sIIQ")  # magic, rank, process id, and the start time of the process in the kernel's ticks
PULSE = struct.Struct("<Qd")  # beats so far, and the host's monotonic clock at the last one
PLACE = struct.Struct("<q?32s")  # step, whether a long silence is to be expected, and the phase
ACTION = struct.Struct("<16si")  # text of the pipeline's action, and its place in the rank's list
LAST_LANE = struct.Struct("<i")  # index of the lane that was used last
LANE_NAME = struct.Struct("<112s")
LANE = struct.Struct("<QQ")  # operations begun, and the number of the one that a thread waits for, or 0
RECENT = 8  # operations of a lane that are remembered: number n in place n modulo this
OPERATION = struct.Struct("<QB?6x")  # bytes, code, and whether it was another one in the step before

HEADER_AT, PULSE_AT, PLACE_AT, ACTION_AT, LAST_LANE_AT, LANES_AT = 0, 64, 96, 160, 192, 256
RECENT_AT = LANE_NAME.size + LANE.size
LANE_BYTES = RECENT_AT + RECENT * OPERATION.size
SIZE = LANES_AT + LANES * LANE_BYTES

OPERATIONS = (
    *("nothing", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "rotate", "send", "receive", "synchronise"),
)
SYNCHRONISE = "synchronise"
"""Of a rank alone: the host reads numbers of the device, and waits for all that was queued there before."""
CODES = {name: code for code, name in enumerate(OPERATIONS)}


def lane_name(kind: str, ranks: tuple[int, ...]) -> str:
    """`tp [0, 1]`, the same on every rank of a group and on no other; short for any number of ranks."""
    if len(ranks) <= 8:
        return f"{kind} {list(ranks)}"
    step = ranks[1] - ranks[0]
    if ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{kind} [{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
    digest = sum(rank * (index + 1) for index, rank in enumerate(ranks)) % 0xFFFF
    return f"{kind} [{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}; {len(ranks)} ranks, sum {digest:04x}]"


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
            os.posix_fallocate(descriptor, 0, SIZE)
            self._memory = mmap.mmap(descriptor, SIZE)
        finally:
            os.close(descriptor)
        self._count = 0
        self._lanes: dict[str, _FileLane] = {}
        self._making = threading.Lock()
        self._rank = rank
        self._step = -1
        self.phase("starting", patient=True)
        pid = os.getpid()
        header = (MAGIC, rank, pid, start_time(pid) or 0)
        HEADER.pack_into(self._memory, HEADER_AT, *header)

    def beat(self) -> None:
        # Two threads at once may count one beat for two: it has changed all the same.
        self._count += 1
        PULSE.pack_into(self._memory, PULSE_AT, self._count, monotonic())

    def phase(self, name: str, *, patient: bool = False) -> None:
        patient = patient or self._step < 0
        PLACE.pack_into(self._memory, PLACE_AT, self._step, patient, name.encode())
        self.act(b"", -1)

    def begin_step(self, step: int) -> None:
        # Kernels are compiled and connections made in a run's first step.
        first, self._step = self._step < 0, step
        for lane in tuple(self._lanes.values()):
            lane.turn()
        self.phase("step", patient=first)

    def act(self, action: bytes, position: int) -> None:
        ACTION.pack_into(self._memory, ACTION_AT, action, position)
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
        at = LANES_AT + index * LANE_BYTES
        self._at, self._recent_at = at + LANE_NAME.size, at + RECENT_AT
        self._begun = 0
        self._this_step: list[tuple[int, int]] = []
        self._step_before: list[tuple[int, int]] = []
        LANE_NAME.pack_into(memory, at, name.encode()[: LANE_NAME.size])

    def synchronise(self) -> None:
        """The host begins to wait for its device. The operation before it stays the rank's last one."""
        self._begun = number = self._begun + 1
        place = self._recent_at + number % RECENT * OPERATION.size
        OPERATION.pack_into(self._memory, place, 0, CODES[SYNCHRONISE], False)
        self.wait_for(number)

    def start(self, begin: Callable[[], Waitable], operation: str, size: int = 0) -> Waitable:
        self._begun = number = self._begun + 1
        signature = size, CODES[operation]
        index = len(self._this_step)
        odd = index < len(self._step_before) and self._step_before[index] != signature
        if index < _MOST_REMEMBERED:
            self._this_step.append(signature)
        place = self._recent_at + number % RECENT * OPERATION.size
        OPERATION.pack_into(self._memory, place, *signature, odd)
        self._write(number)
        LAST_LANE.pack_into(self._memory, LAST_LANE_AT, self._index)
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
        LANE.pack_into(self._memory, self._at, self._begun, waiting)


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
