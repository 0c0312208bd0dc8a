"""Accounts for the time of a run over all its starts in `sessions.json`, which only rank 0 writes.

Goodput is the time of the steps that count over the wall-clock time since the run's first start."""

import contextlib
import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megalite.config.reading import read_text
from megalite.training.sinks import read_records

FILE = "sessions.json"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""Values of `Session.ended`; a killed session has None."""
_WRITE_SECONDS = 5.0  # least interval between writes: steps may be short, and the disk slow


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
        rows = json.loads(read_text(folder / FILE))["sessions"]
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
                metrics = folder / "metrics.jsonl"
                _count_unwritten_steps(self._earlier[-1], metrics)
                lost = [seconds for number, seconds in _steps(metrics) if number > step]
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
                        f"warning: cannot write {FILE}: {error.strerror}; goodput will not count the missing time"
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
            temporary = self._folder / f".{FILE}.new"
            tree = {"sessions": [asdict(one) for one in (*self._earlier, self.session)]}
            temporary.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
            temporary.replace(self._folder / FILE)


def _count_unwritten_steps(last: Session, metrics: Path) -> None:
    """Add the steps that a killed session made after it last wrote the file; metrics.jsonl contains them."""
    made = [(number, seconds) for number, seconds in _steps(metrics) if number > last.first_step]
    if last.ended is None and made:
        last.last_step = max(number for number, _ in made)
        last.steps_seconds = sum(seconds for _, seconds in made)
        last.seen = max(last.seen, metrics.stat().st_mtime)


def _steps(metrics: Path) -> list[tuple[int, float]]:
    """Return (step, seconds) of the training steps in a metrics.jsonl."""
    return [
        (record["step"], record["ms_per_step"] / 1e3)
        for record in read_records(metrics, "train")
        if isinstance(record.get("ms_per_step"), int | float)
    ]
