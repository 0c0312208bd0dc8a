"""`sessions.json`: each start of a run and what its time went to, over restarts; from it, goodput. Rank 0 alone writes it.

Goodput is the time of the steps that count over the wall clock since the run's first start."""

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
"""How a session ended by itself; one that was killed says nothing."""
_WRITE_SECONDS = 5.0  # between two writes of the file: steps may be short, and the disk far away


@dataclass(kw_only=True)
class Session:
    """From one start to its end. Times of day are seconds since 1970."""

    started: float
    seen: float  # the last time it was seen alive
    ended: str | None = None
    host: str = ""
    pid: int = 0
    ranks: int = 1
    layout: str = ""
    first_step: int = 0  # the step of the checkpoint that it started from
    last_step: int = 0
    startup_seconds: float = 0.0
    steps_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    lost_steps: int = 0  # steps of earlier sessions that this one makes again
    lost_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the wall clock went, in seconds."""

    steps: float  # of the steps that count, each once; what they wait for their data is in them
    startup: float
    evaluation: float
    save: float  # what saves held the steps up
    lost: float  # steps that were made and then made again
    gaps: float  # from where a session was last seen to the next start
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
    """Of sessions in order. Between the end of a run that had finished and its next start nothing was to be done: that is
    no part of the wall clock."""

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
    """The sessions of a run folder; none where there is no file, or one that is none of ours."""
    try:
        rows = json.loads(read_text(folder / FILE))["sessions"]
        known = Session.__dataclass_fields__
        return [Session(**{name: value for name, value in row.items() if name in known}) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


class SessionLog:
    """The session under way, after those that were; without a `folder` nothing is written, and unless it `resumes` what was
    there is forgotten. Made before metrics.jsonl drops the steps that are made again: their time is read there."""

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
        """The first step begins: what was until here, but for evaluation, was start-up."""
        if not self._ready:
            self._ready = True
            spent = self.session.evaluation_seconds + self.session.save_seconds
            self.session.startup_seconds = max(0.0, time.time() - self.session.started - spent)

    def step(self, number: int, seconds: float) -> None:
        self.session.last_step = number
        self.session.steps_seconds += seconds

    def spend(self, part: str, seconds: float) -> None:
        """`evaluation` or `save` took so long."""
        name = f"{part}_seconds"
        setattr(self.session, name, getattr(self.session, name) + seconds)

    def note(self, *, at_once: bool = False) -> Goodput:
        """Until now; and the file says so, before long. A disk that is full holds up no training."""
        self.session.seen = time.time()
        if at_once or self.session.seen - self._written >= _WRITE_SECONDS:
            try:
                self._write()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    self._log(
                        f"warning: cannot write {FILE}: {error.strerror}; goodput will not count what is not there"
                    )
        return goodput_of([*self._earlier, self.session])

    def close(self, ended: str) -> Goodput:
        """The session is over. One that found nothing to do is forgotten."""
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
    """A session that was killed has made steps since it last wrote: metrics.jsonl has them."""
    made = [(number, seconds) for number, seconds in _steps(metrics) if number > last.first_step]
    if last.ended is None and made:
        last.last_step = max(number for number, _ in made)
        last.steps_seconds = sum(seconds for _, seconds in made)
        last.seen = max(last.seen, metrics.stat().st_mtime)


def _steps(metrics: Path) -> list[tuple[int, float]]:
    """(step, seconds) of the training steps in a metrics.jsonl."""
    return [
        (record["step"], record["ms_per_step"] / 1e3)
        for record in read_records(metrics, "train")
        if isinstance(record.get("ms_per_step"), int | float)
    ]
