"""`sessions.json`: each start of a run and what its time went to, over restarts; from it, goodput. Rank 0 alone writes it.

Goodput is the time of the steps that count over the wall clock since the run's first start.
"""

import itertools
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megalite.config.reading import read_text
from megalite.training.sinks import parse_record

FILE = "sessions.json"
FINISHED, STOPPED, FAILED = "finished", "stopped", "failed"
"""How a session ended by itself; one that was killed says nothing."""

_WRITE_SECONDS = 5.0
"""Between two writes of the file: steps may be short, and the disk far away."""


@dataclass(kw_only=True)
class Session:
    """From one start to its end. Times of day are seconds since 1970, the others seconds."""

    started: float
    seen: float
    """The last time it was seen alive."""
    ended: str | None = None
    host: str = ""
    pid: int = 0
    ranks: int = 1
    layout: str = ""
    first_step: int = 0
    """Where it started: its first step is the one after."""
    last_step: int = 0
    startup_seconds: float = 0.0
    steps_seconds: float = 0.0
    evaluation_seconds: float = 0.0
    save_seconds: float = 0.0
    lost_steps: int = 0
    """Steps of earlier sessions that this one makes again."""
    lost_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Where the wall clock went, in seconds."""

    steps: float
    """Of the steps that count, each once; what they wait for their data is in them."""
    startup: float
    evaluation: float
    save: float
    """What saves held the steps up."""
    lost: float
    """Steps that were made and then made again."""
    gaps: float
    """From where a session was last seen to the next start."""
    wall: float
    starts: int
    lost_steps: int

    @property
    def fraction(self) -> float:
        """The goodput."""
        return self.steps / self.wall if self.wall > 0.0 else 0.0

    @property
    def other(self) -> float:
        """What is none of the parts."""
        parts = self.steps + self.startup + self.evaluation + self.save + self.lost + self.gaps
        return max(0.0, self.wall - parts)

    def in_words(self) -> str:
        """One line of a log."""
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
    gaps = [
        max(0.0, after.started - before.seen)
        for before, after in itertools.pairwise(sessions)
        if before.ended != FINISHED
    ]
    lost = sum(one.lost_seconds for one in sessions)
    return Goodput(
        steps=max(0.0, sum(one.steps_seconds for one in sessions) - lost),
        startup=sum(one.startup_seconds for one in sessions),
        evaluation=sum(one.evaluation_seconds for one in sessions),
        save=sum(one.save_seconds for one in sessions),
        lost=lost,
        gaps=sum(gaps),
        wall=sum(max(0.0, one.seen - one.started) for one in sessions) + sum(gaps),
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


@dataclass
class SessionLog:
    """The session under way, after those that were.

    Args:
        folder: of the run; None: nothing is written.
        log: prints a line.
    """

    folder: Path | None
    session: Session
    earlier: list[Session]
    log: Callable[[str], None]
    _ready: bool = field(default=False, init=False)
    _warned: bool = field(default=False, init=False)
    _written: float = field(default=0.0, init=False)

    @classmethod
    def open(
        cls,
        folder: Path | None,
        *,
        started: float,
        step: int,
        resumes: bool,
        ranks: int,
        layout: str,
        log: Callable[[str], None],
    ) -> "SessionLog":
        """Begin a session. Before metrics.jsonl drops the steps that are made again: their time is read there.

        Args:
            started: time of day of this start.
            step: where it stands.
            resumes: it goes on with a run; else what was in the folder is forgotten.

        Raises:
            OSError: the folder cannot be written.
        """
        earlier = read_sessions(folder) if folder is not None and resumes else []
        session = Session(
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
            if earlier:
                metrics = folder / "metrics.jsonl"
                _make_up_for(earlier[-1], metrics)
                lost = [seconds for number, seconds in _steps(metrics) if number > step]
                session.lost_steps, session.lost_seconds = len(lost), sum(lost)
        opened = cls(folder, session, earlier, log)
        opened._write()
        return opened

    def ready(self) -> None:
        """The first step begins: what was until here, but for evaluation, was start-up."""
        if not self._ready:
            self._ready = True
            spent = self.session.evaluation_seconds + self.session.save_seconds
            self.session.startup_seconds = max(0.0, time.time() - self.session.started - spent)

    def step(self, number: int, seconds: float) -> None:
        """A step was made."""
        self.session.last_step = number
        self.session.steps_seconds += seconds

    def spend(self, part: str, seconds: float) -> None:
        """`evaluation` or `save` took so long."""
        name = f"{part}_seconds"
        setattr(self.session, name, getattr(self.session, name) + seconds)

    def goodput(self) -> Goodput:
        """Until now."""
        self.session.seen = time.time()
        return goodput_of([*self.earlier, self.session])

    def note(self, *, at_once: bool = False) -> Goodput:
        """Until now; and the file says so, before long. A disk that is full holds up no training."""
        found = self.goodput()
        if not at_once and self.session.seen - self._written < _WRITE_SECONDS:
            return found
        try:
            self._write()
        except OSError as error:
            if not self._warned:
                self._warned = True
                self.log(f"warning: cannot write {FILE}: {error.strerror}; goodput will not count what is not there")
        return found

    def close(self, ended: str) -> Goodput:
        """The session is over. One that found nothing to do is forgotten."""
        idle = self.session.last_step == self.session.first_step and ended == FINISHED
        if idle and self.earlier:
            self.session = self.earlier.pop()
            self._write_quietly()
            return goodput_of([*self.earlier, self.session])
        self.ready()
        self.session.ended = ended
        return self.note(at_once=True)

    def _write_quietly(self) -> None:
        try:
            self._write()
        except OSError:
            return

    def _write(self) -> None:
        self._written = self.session.seen
        if self.folder is None:
            return
        tree: dict[str, Any] = {"sessions": [asdict(one) for one in (*self.earlier, self.session)]}
        beside = self.folder / f".{FILE}.new"
        beside.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.folder / FILE)


def _make_up_for(last: Session, metrics: Path) -> None:
    """A session that was killed has made steps since it last wrote: metrics.jsonl has them."""
    made = [(number, seconds) for number, seconds in _steps(metrics) if number > last.first_step]
    if last.ended is None and made:
        last.last_step = max(number for number, _ in made)
        last.steps_seconds = sum(seconds for _, seconds in made)
        last.seen = max(last.seen, metrics.stat().st_mtime)


def _steps(metrics: Path) -> list[tuple[int, float]]:
    """(step, seconds) of the training steps in a metrics.jsonl."""
    if not metrics.exists():
        return []
    lines = metrics.read_text(errors="replace").splitlines(keepends=True)
    records = [record for line in lines if (record := parse_record(line)) is not None]
    found = []
    for record in records:
        milliseconds = record.get("ms_per_step")
        if record["kind"] == "train" and isinstance(milliseconds, int | float):
            found.append((record["step"], milliseconds / 1e3))
    return found
