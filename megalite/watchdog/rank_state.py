"""What is known of a rank from outside: its heartbeat file and what the kernel says of its process."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megalite.watchdog import heartbeat as file
from megalite.watchdog.heartbeat import OPERATIONS, SYNCHRONISE

PHASES = ("starting", "step", "update", "evaluating", "saving", "ended", "failed")
"""The parts of a run, in the order in which one step of it goes through them."""


class Operation(NamedTuple):
    """One collective or message."""

    name: str
    size: int  # bytes; 0 where ranks may differ
    odd: bool = False  # it is not the one that came at this place of the step before

    def __str__(self) -> str:
        return f"{self.name} of {self.size} bytes" if self.size else self.name


@dataclass(frozen=True)
class LaneState:
    """The operations of one group as one of its ranks has counted them."""

    begun: int
    waiting: int  # number of the operation that a thread waits for; 0: none
    recent: tuple[Operation, ...]  # the last ones, oldest first: the last of them has number `begun`

    def operation(self, number: int) -> Operation | None:
        """The operation of a number, if it is remembered."""
        back = self.begun - number
        return self.recent[-1 - back] if 0 <= back < len(self.recent) else None


@dataclass(frozen=True, kw_only=True)
class RankState:
    """One rank as it was last seen."""

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
        """How far the rank has come in the program."""
        phase = PHASES.index(self.phase) if self.phase in PHASES else 0
        return self.step, phase, self.position

    @property
    def is_lost(self) -> bool:
        """It can do nothing more: its process is stopped, or it has failed."""
        return self.process == "stopped" or self.has_failed

    @property
    def has_failed(self) -> bool:
        """It has come to an end before the run has."""
        return self.phase == "failed" or (self.process == "gone" and self.phase != "ended")

    @property
    def reads_device(self) -> bool:
        """Its host waits for the device, and so for all that was queued there before."""
        return any(lane.waiting and name.startswith(SYNCHRONISE) for name, lane in self.lanes.items())

    def doing(self) -> str:
        """`step 7, action 2F0, last all_reduce 41 of tp [0, 1]`."""
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
    """Read a heartbeat file; a rank without a file, or with a damaged one, has not begun to beat."""
    try:
        data = path.read_bytes()
    except OSError:
        data = b""
    if len(data) != file.SIZE or not data.startswith(file.MAGIC):
        data = bytes(file.SIZE)
    beats, at = file.PULSE.unpack_from(data, file.PULSE_AT)
    step, patient, phase = file.PLACE.unpack_from(data, file.PLACE_AT)
    action, position = file.ACTION.unpack_from(data, file.ACTION_AT)
    (last,) = file.LAST_LANE.unpack_from(data, file.LAST_LANE_AT)
    names, lanes = [], {}
    for index in range(file.LANES):
        start = file.LANES_AT + index * file.LANE_BYTES
        name = _text(file.LANE_NAME.unpack_from(data, start)[0])
        if not name:
            break
        begun, waiting = file.LANE.unpack_from(data, start + file.LANE_NAME.size)
        numbers = range(max(1, begun - file.RECENT + 1), begun + 1)
        recent = tuple(_operation(data, start, number) for number in numbers)
        lanes[name] = LaneState(begun, waiting, recent)
        names.append(name)
    used = bool(names) and lanes[names[min(last, len(names) - 1)]].begun > 0
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
        last_lane=names[last] if used and last < len(names) else "",
        lanes=lanes,
    )


def rank_from_json(value: Mapping[str, Any]) -> RankState:
    """What `dataclasses.asdict` made of a RankState, on another host. Raises KeyError, TypeError: it is something else."""
    fields = dict(value)
    fields["lanes"] = {
        name: LaneState(lane["begun"], lane["waiting"], tuple(Operation(*values) for values in lane["recent"]))
        for name, lane in fields["lanes"].items()
    }
    return RankState(**fields)


def _operation(data: bytes, lane: int, number: int) -> Operation:
    at = lane + file.RECENT_AT + number % file.RECENT * file.OPERATION.size
    size, code, odd = file.OPERATION.unpack_from(data, at)
    return Operation(OPERATIONS[code] if code < len(OPERATIONS) else "nothing", size, odd)


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
