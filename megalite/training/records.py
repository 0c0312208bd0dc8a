"""Records of a run on rank 0: `metrics.jsonl` has a line per step, `sessions.json` accounts for the time of all starts.

Goodput is the time of the steps that count over the wall-clock time since the run's first start."""

import contextlib
import errno
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from megalite.checkpoint.files import replace_durably, with_path, write_all
from megalite.config.describe import redact_text
from megalite.config.reading import open_regular, read_text

METRICS, SESSIONS = "metrics.jsonl", "sessions.json"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""Values of `Session.ended`; a killed session has None."""
_WRITE_SECONDS = 5.0  # least interval between writes of sessions.json: steps may be short, and the disk slow
_RETRY_SECONDS = 30.0  # interval between retries after a failed write
_TAIL = 1 << 19  # bytes at the end of metrics.jsonl, enough for a few hundred steps


class MetricSink(Protocol):
    """Writes records: `kind` (train, valid or test), `step`, `consumed_samples` and numbers."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; may raise any exception."""

    def close(self) -> None:
        """Write buffered records."""


class BestEffort:
    """Wraps a sink so that its exceptions do not end the run: it drops records, and tries a new one now and then."""

    def __init__(self, sink: MetricSink, name: str, log: Callable[[str], None]) -> None:
        self._sink, self._name, self._log = sink, name, log
        self._dropped = 0
        self._next_try = 0.0

    def write(self, record: dict[str, Any]) -> None:
        if self._dropped and time.monotonic() < self._next_try:
            self._dropped += 1
            return
        try:
            self._sink.write(record)
        except Exception as error:
            if not self._dropped:
                self._log(
                    f"warning: cannot write {self._name}: {_reason(error)}; training continues, and records are dropped until "
                    "it can be written again"
                )
            self._dropped += 1
            self._next_try = time.monotonic() + _RETRY_SECONDS
            return
        if self._dropped:
            self._log(f"{self._name} is written again; {self._dropped} records are missing in it")
            self._dropped = 0

    def close(self) -> None:
        """Close the sink, and log missing records."""
        try:
            self._sink.close()
        except Exception as error:
            if not self._dropped:
                self._log(f"warning: cannot finish {self._name}: {_reason(error)}")
        if self._dropped:
            self._log(f"warning: the last {self._dropped} records are missing in {self._name}")


def _reason(error: Exception) -> str:
    """Return an error in one line, without credentials, which a service's message may contain."""
    return getattr(error, "strerror", None) or redact_text(" ".join(str(error).split()))


class AppendedFile:
    """A file of whole records after a `head`. If the disk is full, a partial record is removed."""

    def __init__(self, path: Path, *, head: bytes = b"") -> None:
        self._path, self._head = path, head
        self._descriptor: int | None = None
        self._open()

    def append(self, record: bytes) -> None:
        """Write a record without buffering, so that readers see it at once. Raises OSError once if the file was
        removed; the next call creates it and its folder again."""
        try:
            descriptor = self._open()
            status = os.fstat(descriptor)
            if status.st_nlink == 0:
                self.close()
                raise FileNotFoundError(errno.ENOENT, "it has been removed")
            try:
                write_all(descriptor, memoryview(record if status.st_size else self._head + record))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, status.st_size)
                raise
        except OSError as error:
            raise with_path(error, self._path) from None

    def _open(self) -> int:
        if self._descriptor is None:
            # Create no parents: the disk may not be mounted any more.
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class JsonLines:
    """`metrics.jsonl`: one object per line. NaN and infinities are strings "nan" and "inf", since JSON has no others.

    Drops damaged lines, and records after `step`, which a killed run has written and this run writes again. Keeps one
    record of the test split per step, even if a finished run is started several times."""

    def __init__(self, path: Path, *, step: int) -> None:
        self._tested: set[int] = set()
        if path.exists():
            # After a crash of the machine a line may be cut off or contain arbitrary bytes.
            lines, kept = path.read_text(errors="replace").splitlines(keepends=True), []
            for line in lines:
                record = parse_record(line)
                if record is not None and record["step"] <= step:
                    kept.append(line)
                    if record["kind"] == "test":
                        self._tested.add(record["step"])
            if kept != lines:
                replace_durably(path, "".join(kept).encode())
        self._file = AppendedFile(path)
        self.close = self._file.close

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "test" and record["step"] in self._tested:
            return
        row = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.append(f"{json.dumps(row)}\n".encode())
        if record["kind"] == "test":
            self._tested.add(record["step"])


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None if it is damaged or incomplete."""
    try:
        record = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


def read_records(folder: str | Path, kind: str | None = None, *, tail: int | None = None) -> list[dict[str, Any]]:
    """Return the valid records in the metrics.jsonl of a run's folder, optionally only those of one kind, or of the last
    `tail` bytes; none if it cannot be read."""
    try:
        with open_regular(Path(folder, METRICS)) as file:
            if tail is not None:
                file.seek(max(0, file.seek(0, 2) - tail))
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    found = [record for record in map(parse_record, lines) if record is not None]
    return [record for record in found if kind in (None, record["kind"])]


def last_records(run_dir: str | None, kind: str) -> list[dict[str, Any]]:
    """Return the last few hundred records of a kind in a run's metrics.jsonl; none if it cannot be read."""
    return [] if run_dir is None else read_records(run_dir, kind, tail=_TAIL)


@dataclass(kw_only=True)
class Session:
    """One start of a run. Times of day are seconds since 1970."""

    started: float
    seen: float  # when it was last known to run
    ended: str | None = None
    host: str = ""
    pid: int = 0
    ranks: int = 1
    layout: str = ""
    first_step: int = 0  # step of the checkpoint from which it started
    last_step: int = 0
    startup_seconds: float = 0.0
    steps_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    lost_steps: int = 0  # steps of earlier sessions that this one repeats
    lost_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Parts of a run's wall-clock time, in seconds."""

    steps: float  # each step once, including its wait for data
    startup: float
    evaluation: float
    save: float  # time in which saves delayed the steps
    lost: float  # steps that were repeated later
    gaps: float  # from the last sign of a session to the next start
    wall: float
    starts: int
    lost_steps: int

    @property
    def fraction(self) -> float:
        return self.steps / self.wall if self.wall > 0.0 else 0.0

    @property
    def other(self) -> float:
        parts = self.steps + self.startup + self.evaluation + self.save + self.lost + self.gaps
        return max(0.0, self.wall - parts)

    def in_words(self) -> str:
        parts = [f"start-up {self.startup:.1f} s"]
        parts += [f"evaluation {self.evaluation:.1f} s"] if self.evaluation else []
        parts += [f"saving {self.save:.1f} s"] if self.save else []
        parts += [f"{self.lost_steps} steps made again {self.lost:.1f} s"] if self.lost_steps else []
        parts += [f"between {self.starts} starts {self.gaps:.1f} s"] if self.starts > 1 else []
        return (
            f"goodput {self.fraction:.1%}: {self.steps:.1f} s of steps in {self.wall:.1f} s since the first start; "
            f"{', '.join(parts)}, other {self.other:.1f} s"
        )


def goodput_of(sessions: Sequence[Session]) -> Goodput:
    """Sum up sessions in order. The time between a finished session and the next start does not count."""

    def total(field: str) -> float:
        return sum(getattr(one, f"{field}_seconds") for one in sessions)

    gaps = sum(
        max(0.0, after.started - before.seen)
        for before, after in itertools.pairwise(sessions)
        if before.ended != FINISHED
    )
    return Goodput(
        steps=max(0.0, total("steps") - total("lost")),
        startup=total("startup"),
        evaluation=total("evaluation"),
        save=total("save"),
        lost=total("lost"),
        gaps=gaps,
        wall=sum(max(0.0, one.seen - one.started) for one in sessions) + gaps,
        starts=len(sessions),
        lost_steps=sum(one.lost_steps for one in sessions),
    )


def read_sessions(folder: Path) -> list[Session]:
    """Return the sessions of a run folder; an empty list if the file is missing or not valid."""
    try:
        rows = json.loads(read_text(folder / SESSIONS))["sessions"]
        known = Session.__dataclass_fields__
        return [Session(**{name: value for name, value in row.items() if name in known}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


class SessionLog:
    """Records the current session after the earlier ones of the folder, which it drops unless the run `resumes`.
    Without a `folder` it writes nothing. Create it before metrics.jsonl drops repeated steps: it reads their time."""

    def __init__(
        self,
        folder: Path | None,
        *,
        started: float,
        step: int,
        resumes: bool,
        ranks: int,
        layout: str,
        log: Callable[[str], None],
    ) -> None:
        self._folder, self._log = folder, log
        self._ready = self._warned = False
        self._earlier = read_sessions(folder) if folder is not None and resumes else []
        self.session = Session(
            started=started,
            seen=started,
            host=platform.node(),
            pid=os.getpid(),
            ranks=ranks,
            layout=layout,
            first_step=step,
            last_step=step,
        )
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if self._earlier:
                _count_unwritten_steps(self._earlier[-1], folder)
                lost = [seconds for number, seconds in _steps(folder) if number > step]
                self.session.lost_steps, self.session.lost_seconds = len(lost), sum(lost)
        self._write()

    def ready(self) -> None:
        """Mark the first step: all time before it, except evaluation and saves, is start-up."""
        if not self._ready:
            self._ready = True
            spent = self.session.evaluation_seconds + self.session.save_seconds
            self.session.startup_seconds = max(0.0, time.time() - self.session.started - spent)

    def step(self, number: int, seconds: float) -> None:
        self.session.last_step = number
        self.session.steps_seconds += seconds

    def spend(self, part: str, seconds: float) -> None:
        """Add time to `evaluation` or `save`."""
        name = f"{part}_seconds"
        setattr(self.session, name, getattr(self.session, name) + seconds)

    def note(self, *, at_once: bool = False) -> Goodput:
        """Return the goodput until now, and write the file if it is due. A full disk does not stop the training."""
        self.session.seen = time.time()
        if at_once or self.session.seen - self._written >= _WRITE_SECONDS:
            try:
                self._write()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    self._log(
                        f"warning: cannot write {SESSIONS}: {error.strerror}; goodput will not count the missing time"
                    )
        return goodput_of([*self._earlier, self.session])

    def close(self, ended: str) -> Goodput:
        """End the session, and drop it if there was nothing to do."""
        if self.session.last_step == self.session.first_step and ended == FINISHED and self._earlier:
            self.session = self._earlier.pop()
            with contextlib.suppress(OSError):
                self._write()
            return goodput_of([*self._earlier, self.session])
        self.ready()
        self.session.ended = ended
        return self.note(at_once=True)

    def _write(self) -> None:
        self._written = self.session.seen
        if self._folder is not None:
            temporary = self._folder / f".{SESSIONS}.new"
            tree = {"sessions": [asdict(one) for one in (*self._earlier, self.session)]}
            temporary.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._folder / SESSIONS)


def _count_unwritten_steps(last: Session, folder: Path) -> None:
    """Add the steps that a killed session made after it last wrote the file; metrics.jsonl contains them."""
    made = [(number, seconds) for number, seconds in _steps(folder) if number > last.first_step]
    if last.ended is None and made:
        last.last_step = max(number for number, _ in made)
        last.steps_seconds = sum(seconds for _, seconds in made)
        last.seen = max(last.seen, (folder / METRICS).stat().st_mtime)


def _steps(folder: Path) -> list[tuple[int, float]]:
    """Return (step, seconds) of the training steps in metrics.jsonl."""
    return [
        (record["step"], record["ms_per_step"] / 1e3)
        for record in read_records(folder, "train")
        if isinstance(record.get("ms_per_step"), int | float)
    ]
