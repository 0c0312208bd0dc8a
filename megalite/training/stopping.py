"""Why a run is to end before its last step: signals, a time limit, a file that appears.

A rank that is asked to stop continues until all ranks agree, which they do in an all-reduce that each step and each batch
of an evaluation makes anyway (`evaluation.read_batches`); then the run is saved. Before the first step there is nothing to
lose: a signal ends the process where it stands, as Ctrl-C ends any Python program."""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from megalite.checkpoint.files import lock_folder, replace_durably, sync_folder, write_all
from megalite.config.describe import redacted
from megalite.config.errors import ConfigError, TakenError
from megalite.config.exit_codes import DONE, FAILED, INTERRUPTED, REQUEUE

FILE_NAME = "exit.json"
_RESERVED, _RESERVED_BYTES = f".{FILE_NAME}.reserved", 16384


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The end of a run; the same on every rank, but for errors."""

    status: str
    """`finished`; `requeue`: start the same command again; `stopped`: as it was asked to, and not to be started again;
    `interrupted` by Ctrl-C; `failed`."""
    reason: str
    step: int | None  # steps made since the very first start; None where it ended before it had looked for a checkpoint
    exit_code: int  # one of `config.exit_codes`

    @classmethod
    def finished(cls, step: int) -> "Ending":
        return cls(status="finished", reason="the last step is made", step=step, exit_code=DONE)

    @classmethod
    def failed(cls, error: BaseException, step: int | None) -> "Ending":
        """An error has ended it, with the error's own exit status if it has one."""
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)
        name = "" if code != FAILED else f"{type(error).__name__}: "
        return cls(status="failed", reason=f"{name}{error}", step=step, exit_code=code)


class RunFolder:
    """`run_dir`, which rank 0 has for one run at a time: what has not locked it neither writes nor removes there.
    Without a path, as on other ranks, all of it does nothing."""

    def __init__(self, run_dir: str | None) -> None:
        self._path = None if run_dir is None else Path(run_dir)
        self._lock: int | None = None
        self._made = False

    def take(self, *, make: bool = False) -> None:
        """Lock the folder, if it is there (`make`: make it), and forget how the last run ended: without `exit.json` one is
        under way or was killed. Raises TakenError: another run has it."""
        self._made |= make
        if self._path is None or self._lock is not None:
            return
        with contextlib.suppress(OSError):  # who opens the first file there says what is wrong
            try:
                if make:
                    self._path.mkdir(parents=True, exist_ok=True)
                self._lock = lock_folder(self._path)
            except BlockingIOError:
                raise TakenError(
                    f"another run is writing into {self._path}: wait for it, end it (also ranks that a killed launcher has left "
                    "behind), or give another --run-dir"
                ) from None
            (self._path / FILE_NAME).unlink(missing_ok=True)

    def leave(self, ending: Ending | None) -> None:
        """The run is over, and another one may have the folder. `ending` is left in it, unless another run has it already."""
        if ending is not None:
            with contextlib.suppress(TakenError):
                self.take()
                write_ending(self._path, ending, make_folder=self._made)  # somebody may have removed it
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def reserve_ending(run_dir: Path) -> None:
    """Take the room that `exit.json` will need: a run that a full disk ends could not say so, and would be started again."""
    replace_durably(run_dir / _RESERVED, b" " * _RESERVED_BYTES)


def write_ending(run_dir: Path | None, ending: Ending, *, make_folder: bool = False) -> None:
    """Leave it in the run's folder, if there is one; where that cannot be written the log has said it all."""
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        if make_folder:
            run_dir.mkdir(exist_ok=True)
        if not run_dir.is_dir():
            return
        reserved, text = run_dir / _RESERVED, _text_of(ending)
        # Into the room that is there; where nothing was reserved this makes the file.
        descriptor = os.open(reserved, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            write_all(descriptor, memoryview(text))
            os.ftruncate(descriptor, len(text))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        reserved.replace(run_dir / FILE_NAME)
        sync_folder(run_dir)


def _text_of(ending: Ending) -> bytes:
    """JSON that fits into what is reserved."""
    fields = redacted(asdict(ending))
    reason, length = fields["reason"], len(fields["reason"])
    while len(text := json.dumps(fields, indent=1).encode() + b"\n") > _RESERVED_BYTES:
        length //= 2
        fields["reason"] = f"{reason[:length]}... (the log has all of it)"
    return text


_FILE, _TIME, _ASKED, _SIGNALS = 1, 2, 3, 100  # what ranks exchange: the largest number counts
_ONE_PRESS = 0.5  # seconds in which a second SIGINT is the first one again: a terminal and a launcher may both send one
_START_PATIENCE = 20.0  # seconds that a start has to leave cleanly; less than torchrun's 30
_LOOKS_EVERY = 1.0  # seconds between two looks for the exit file


@dataclass(frozen=True)
class StopRequest:
    """One number, equal on all ranks once they have agreed, and what it means."""

    number: int

    @property
    def cause(self) -> str:
        if self.number < _SIGNALS:
            return {
                _FILE: "the exit file is there",
                _TIME: "exit_duration_in_mins is over",
                _ASKED: "the program asked for it",
            }[self.number]
        return signal.Signals(self.number - _SIGNALS).name

    @property
    def exit_code(self) -> int:
        if self.number == _SIGNALS + signal.SIGINT:
            return INTERRUPTED
        return DONE if self.number in (_FILE, _ASKED) else REQUEUE

    def ending(self, step: int | None, saved: str) -> Ending:
        """The end of a run by it; `saved`: what has become of the work, in words."""
        status = {DONE: "stopped", INTERRUPTED: "interrupted", REQUEUE: "requeue"}[self.exit_code]
        return Ending(status=status, reason=f"{self.cause}; {saved}", step=step, exit_code=self.exit_code)


class StopRun(BaseException):
    """Leave what is under way. No Exception: nothing that handles errors may take it for one."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.cause)
        self.request = request


class StopRequests:
    """What this rank has been asked. Without `listen` no signal is heard.

    SIGINT is always heard; a signal that the process was started to ignore, as by nohup, stays ignored. After one the ranks
    have `patience` seconds to come to agree."""

    def __init__(
        self,
        *,
        signals: Sequence[str] = (),
        minutes: float | None = None,
        file: Path | None = None,
        patience: float = 300.0,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        names = dict.fromkeys(("SIGINT", *signals))
        # What is no signal is for the rules of the settings to refuse.
        self._signals = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
        self._end = None if minutes is None else time.monotonic() + 60.0 * minutes
        self.file, self._looked, self._file_seen = file, 0.0, False
        self._patience, self.say = patience, say
        self._heard: dict[int, float] = {}
        """Signal -> when it first came."""
        self.starting = True
        """No step has begun."""
        self._leaving = self.asked = False
        """`asked`: the program itself, as a callback may."""
        self.before_forced_exit: Callable[[StopRequest, str], None] = lambda request, text: None
        """Called before the process is ended by force, from another thread."""

    @property
    def request(self) -> StopRequest | None:
        """What this rank alone knows of."""
        if self._heard:
            return StopRequest(_SIGNALS + max(self._heard))
        if self._end is not None and time.monotonic() >= self._end:
            return StopRequest(_TIME)
        if self.asked:
            return StopRequest(_ASKED)
        return StopRequest(_FILE) if self._sees_file() else None

    @property
    def number(self) -> int:
        """The request as ranks exchange it; 0 for none."""
        return 0 if (request := self.request) is None else request.number

    def started(self) -> None:
        """From here on there is something to lose: signals wait until all ranks agree. One may have come already."""
        self.starting = False
        if self._heard and not self._leaving:
            raise StopRun(StopRequest(self.number))

    def refuse_old_file(self) -> None:
        """A run that finds its exit file would end at once."""
        if self.file is not None and self.file.exists():
            raise ConfigError(
                f"{self.file} is there, which stops the run: remove it to train, or give another --exit-file"
            )

    def leave(self) -> None:
        """All ranks know: from here on only a second Ctrl-C hurries this process."""
        self._leaving = True

    def _sees_file(self) -> bool:
        now = time.monotonic()
        if self.file is not None and not self._file_seen and now >= self._looked + _LOOKS_EVERY:
            self._looked = now
            with contextlib.suppress(OSError):  # a disk that has gone says neither yes nor no
                self._file_seen = self.file.exists()
        return self._file_seen

    @contextlib.contextmanager
    def listen(self) -> Iterator["StopRequests"]:
        """Inside, signals are heard; outside the main thread, where Python gives none, it does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        mine = [one for one in self._signals if signal.getsignal(one) is not signal.SIG_IGN]
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        watch = threading.Thread(target=self._watch, args=(reader,), name="megalite-signals", daemon=True)
        watch.start()
        before = {one: signal.signal(one, self._handle) for one in mine}
        # Written to even while the main thread is in a collective, where no handler of Python's can run.
        former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(former)
            for one, handler in before.items():
                signal.signal(one, handler)
            os.write(writer, b"\0")
            watch.join()
            os.close(writer)
            os.close(reader)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._heard.setdefault(number, time.monotonic())
        if self.starting and not self._leaving:
            self._leaving = True
            raise StopRun(StopRequest(_SIGNALS + number))

    def _watch(self, reader: int) -> None:
        """In a thread: end the process at a second Ctrl-C, and where a stop comes to nothing."""
        while True:
            left = self._seconds_left()
            if left is not None and left <= 0.0:
                self._give_up()
            ready, _, _ = select.select([reader], [], [], left)
            for number in os.read(reader, 64) if ready else b"":
                if number == 0:
                    return
                now = time.monotonic()
                if number in self._signals:
                    again = now > self._heard.setdefault(number, now) + _ONE_PRESS
                    if again and number == signal.SIGINT:
                        self._end_now(StopRequest(_SIGNALS + number), "interrupted twice: nothing is saved")

    def _seconds_left(self) -> float | None:
        """Until this process ends by force; None: it does not."""
        if not self._heard or (self._leaving and not self.starting):
            return None
        patience = _START_PATIENCE if self.starting else self._patience
        return min(self._heard.values()) + patience - time.monotonic()

    def _give_up(self) -> None:
        request = StopRequest(_SIGNALS + max(self._heard))
        if self.starting:
            text = f"{request.cause} came {_START_PATIENCE:g} s ago, before the first step: leaving"
        else:
            text = (
                f"{request.cause} came {self._patience:g} s ago and the ranks have not come to the end of their step "
                "(exit_timeout_seconds; one may be gone, or be slow): leaving without a checkpoint"
            )
        self._end_now(request, text)

    def _end_now(self, request: StopRequest, text: str) -> None:
        self.say(text)
        self.before_forced_exit(request, text)
        os._exit(request.exit_code)
