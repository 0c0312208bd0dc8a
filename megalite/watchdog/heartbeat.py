"""Records the progress of a rank in a small file (`Heartbeat`), which another process of the host reads (`read_rank`).

A beat is a store into mapped memory, which costs about a microsecond. The file stays readable when the rank is stopped,
does not release Python's lock or has ended. Groups, the executor and the training loop receive a heartbeat as an
argument; `UNWATCHED` does nothing."""

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Protocol

from megalite.watchdog.processes import start_time

# The file has a fixed layout, so that a beat is one or two stores into mapped memory.
MAGIC = b"megabeat"
LANES = 64  # most groups of a rank; operations of further groups are not recorded

HEADER = struct.Struct("<8sIIQ")  # magic, rank, process id, and the start time of the process in the kernel's ticks
PULSE = struct.Struct("<Qd")  # beats so far, and the host's monotonic clock at the last one
PLACE = struct.Struct("<q?32s")  # step, whether the phase may take long without a beat, and the phase
ACTION = struct.Struct("<16si")  # text of the pipeline's action, and its index in the rank's list
LAST_LANE = struct.Struct("<i")  # index of the lane that was used last
LANE_NAME = struct.Struct("<112s")
LANE = struct.Struct("<QQ")  # operations begun, and the number of the one that a thread waits for, or 0
RECENT = 8  # newest operations of a lane in the file; operation n is at index n % RECENT
OPERATION = struct.Struct("<QB?6x")  # bytes, code, and whether the previous step had another operation here

HEADER_AT, PULSE_AT, PLACE_AT, ACTION_AT, LAST_LANE_AT, LANES_AT = 0, 64, 96, 160, 192, 256
RECENT_AT = LANE_NAME.size + LANE.size
LANE_BYTES = RECENT_AT + RECENT * OPERATION.size
SIZE = LANES_AT + LANES * LANE_BYTES

OPERATIONS = (
    *("nothing", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"),
    *("broadcast", "rotate", "send", "receive", "synchronise"),
)
SYNCHRONISE = "synchronise"
"""Operation of a single rank: the host reads device memory, and waits for all work queued on the device before."""
CODES = {name: code for code, name in enumerate(OPERATIONS)}


def lane_name(kind: str, ranks: tuple[int, ...]) -> str:
    """Return a name such as `tp [0, 1]`: unique per group, equal on all its ranks, short for any number of ranks."""
    if len(ranks) <= 8:
        return f"{kind} {list(ranks)}"
    step = ranks[1] - ranks[0]
    if ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
        return f"{kind} [{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}]"
    digest = sum(rank * (index + 1) for index, rank in enumerate(ranks)) % 0xFFFF
    return f"{kind} [{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}; {len(ranks)} ranks, sum {digest:04x}]"


_MOST_REMEMBERED = 100_000  # operations of one step and lane


class Waitable(Protocol):
    """Handle of an asynchronous operation."""

    def wait(self) -> Any: ...


class Lane:
    """Counts the operations of one group, which all its ranks begin in the same order.

    This base class records nothing."""

    def start(self, begin: Callable[[], Waitable], operation: str, size: int = 0) -> Waitable:
        """Begin an operation, and record when the rank waits in `begin` or on the returned handle. `size`: bytes if all
        ranks of the group pass equally many, else 0."""
        return begin()


class Heartbeat:
    """Interface through which the parts of a run report progress. This base class records nothing."""

    def beat(self) -> None:
        """Report progress."""

    def phase(self, name: str, *, patient: bool = False) -> None:
        """Report that another part of the loop begins. `patient`: it may take long without a beat, because it writes
        files or compiles code."""

    def begin_step(self, step: int) -> None:
        """Report that a training step begins."""

    def begin_action(self, action: bytes, position: int) -> None:
        """Report that the pipeline begins an action, at index `position` of this rank's list."""

    def lane(self, kind: str, ranks: tuple[int, ...]) -> Lane:
        """Return the lane of a group; the same object for the same kind and ranks."""
        return _NO_LANE

    def synchronise(self) -> AbstractContextManager[None]:
        """Enclose a read of device memory. On CUDA a rank waits for its peers only there."""
        return nullcontext()

    def close(self, *, failed: bool = False) -> None:
        """Report that the run has ended. `failed`: it ended early, and only on this rank."""


_NO_LANE = Lane()
UNWATCHED = Heartbeat()


class FileHeartbeat(Heartbeat):
    """Writes beats into one file per process. `path` must not exist."""

    def __init__(self, path: Path, *, rank: int) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Allocate the blocks now: on a full disk a later store would kill the process (SIGBUS).
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
        HEADER.pack_into(self._memory, HEADER_AT, MAGIC, rank, pid, start_time(pid) or 0)

    def beat(self) -> None:
        # Two threads may count their beats as one. The reader only compares for equality.
        self._count += 1
        PULSE.pack_into(self._memory, PULSE_AT, self._count, monotonic())

    def phase(self, name: str, *, patient: bool = False) -> None:
        patient = patient or self._step < 0
        PLACE.pack_into(self._memory, PLACE_AT, self._step, patient, name.encode())
        self.begin_action(b"", -1)

    def begin_step(self, step: int) -> None:
        # The first step of a run compiles kernels and opens connections.
        first, self._step = self._step < 0, step
        for lane in tuple(self._lanes.values()):
            lane.begin_step()
        self.phase("step", patient=first)

    def begin_action(self, action: bytes, position: int) -> None:
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
        return lane.synchronise() if isinstance(lane, _FileLane) else nullcontext()

    def close(self, *, failed: bool = False) -> None:
        # The memory stays mapped, because a background thread may still beat.
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

    @contextmanager
    def synchronise(self) -> Iterator[None]:
        """Record that the host waits for its device. This does not change the rank's last lane."""
        self._begun = number = self._begun + 1
        place = self._recent_at + number % RECENT * OPERATION.size
        OPERATION.pack_into(self._memory, place, 0, CODES[SYNCHRONISE], False)
        self.wait_for(number)
        try:
            yield
        finally:
            self.wait_for(0)

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
            # A group's first operation connects NCCL, which waits for the peers.
            return _Counted(begin(), self, number)
        finally:
            self._write(0)

    def begin_step(self) -> None:
        """Keep the operations of the step that ended, to compare the next step with them."""
        self._step_before, self._this_step = self._this_step, []

    def wait_for(self, number: int) -> None:
        self._write(number)
        self._heartbeat.beat()

    def _write(self, waiting: int) -> None:
        LANE.pack_into(self._memory, self._at, self._begun, waiting)


class _Counted:
    """Handle of an operation that records when a thread waits on it."""

    __slots__ = ("_lane", "_number", "_work")

    def __init__(self, work: Waitable, lane: _FileLane, number: int) -> None:
        self._work, self._lane, self._number = work, lane, number

    def wait(self) -> Any:
        self._lane.wait_for(self._number)
        try:
            return self._work.wait()
        finally:
            self._lane.wait_for(0)


PHASES = ("starting", "step", "update", "evaluating", "saving", "ended", "failed")
"""The parts of a run, in the order of the loop."""


class Operation(NamedTuple):
    """One collective or message."""

    name: str
    size: int  # bytes; 0 if ranks may differ
    odd: bool = False  # differs from the operation at the same index of the previous step

    def __str__(self) -> str:
        return f"{self.name} of {self.size} bytes" if self.size else self.name


@dataclass(frozen=True)
class LaneState:
    """The operations of one group as counted by one of its ranks."""

    begun: int
    waiting: int  # number of the operation that a thread waits for; 0: none
    recent: tuple[Operation, ...]  # newest operations, oldest first; the last one has number `begun`

    def operation(self, number: int) -> Operation | None:
        """Return the operation with this number, None if it is older than `recent`."""
        back = self.begun - number
        return self.recent[-1 - back] if 0 <= back < len(self.recent) else None


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of one rank when its heartbeat was last read."""

    rank: int
    host: str
    pid: int
    process: str  # running, stopped, traced or gone
    silent: float  # seconds since the last beat
    beats: int
    step: int
    phase: str
    patient: bool
    action: str
    position: int
    last_lane: str  # name of the group that was used last; empty: none
    lanes: Mapping[str, LaneState]

    @property
    def place(self) -> tuple[int, int, int]:
        """Return the progress of the rank as a sortable tuple."""
        phase = PHASES.index(self.phase) if self.phase in PHASES else 0
        return self.step, phase, self.position

    @property
    def is_lost(self) -> bool:
        """Whether the rank cannot continue: its process is stopped, or it has failed."""
        return self.process == "stopped" or self.has_failed

    @property
    def has_failed(self) -> bool:
        """Whether the rank ended before the run did."""
        return self.phase == "failed" or (self.process == "gone" and self.phase != "ended")

    @property
    def reads_device(self) -> bool:
        """Whether the host waits for the device, and so for all work queued there before."""
        return any(lane.waiting and name.startswith(SYNCHRONISE) for name, lane in self.lanes.items())

    def doing(self) -> str:
        """Describe the rank's progress: `step 7, action 2F0, last all_reduce 41 of tp [0, 1]`."""
        words = [f"step {self.step}" if self.step >= 0 else "before its first step"]
        if self.phase != "step":
            words.append(self.phase)
        if self.action:
            words.append(f"action {self.action}")
        lane = self.lanes.get(self.last_lane)
        if lane is not None:
            words.append(f"last {lane.recent[-1].name} {lane.begun} of {self.last_lane}")
        if self.reads_device:
            words.append("the host waits for the device")
        return ", ".join(words)


def read_rank(path: Path, *, rank: int, host: str, pid: int, process: str) -> RankState:
    """Read a heartbeat file. A missing or damaged file counts as a rank that has not begun to beat."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if len(data) != SIZE or not data.startswith(MAGIC):
        data = bytes(SIZE)
    beats, at = PULSE.unpack_from(data, PULSE_AT)
    step, patient, phase = PLACE.unpack_from(data, PLACE_AT)
    action, position = ACTION.unpack_from(data, ACTION_AT)
    (last,) = LAST_LANE.unpack_from(data, LAST_LANE_AT)
    lanes: dict[str, LaneState] = {}
    for index in range(LANES):
        start = LANES_AT + index * LANE_BYTES
        name = _text(LANE_NAME.unpack_from(data, start)[0])
        if not name:
            break
        begun, waiting = LANE.unpack_from(data, start + LANE_NAME.size)
        numbers = range(max(1, begun - RECENT + 1), begun + 1)
        recent = tuple(_operation(data, start, number) for number in numbers)
        lanes[name] = LaneState(begun, waiting, recent)
    names = list(lanes)
    return RankState(
        rank=rank,
        host=host,
        pid=pid,
        process=process,
        silent=max(0.0, time.monotonic() - at) if beats else 0.0,
        beats=beats,
        step=step if beats else -1,
        phase=_text(phase) or PHASES[0],
        patient=patient or not beats,
        action=_text(action),
        position=position,
        last_lane=names[last] if last < len(names) and lanes[names[last]].begun else "",
        lanes=lanes,
    )


def rank_from_json(value: Mapping[str, Any]) -> RankState:
    """Rebuild a RankState from the result of `dataclasses.asdict`. Raises KeyError or TypeError for anything else."""
    fields = dict(value)
    fields["lanes"] = {
        name: LaneState(lane["begun"], lane["waiting"], tuple(Operation(*values) for values in lane["recent"]))
        for name, lane in fields["lanes"].items()
    }
    return RankState(**fields)


def _operation(data: bytes, lane: int, number: int) -> Operation:
    at = lane + RECENT_AT + number % RECENT * OPERATION.size
    size, code, odd = OPERATION.unpack_from(data, at)
    return Operation(OPERATIONS[code] if code < len(OPERATIONS) else "nothing", size, odd)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
