"""Stops a run before its last step: on a signal, after a time limit, or when a file appears.

A rank that receives a request continues until all ranks agree in an all-reduce, which each step and each batch of an
evaluation makes anyway (`evaluation.read_batches`). Then the run is saved. Before the first step there is nothing to
save, so a signal ends the process at once, as Ctrl-C ends any Python program."""

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
from megalite.config.errors import DONE, FAILED, INTERRUPTED, REQUEUE, ConfigError, TakenError

FILE_NAME = "exit.json"
_RESERVED, _RESERVED_BYTES = f".{FILE_NAME}.reserved", 16384


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended; the same on every rank, except after an error of one rank."""

    status: str
    """`finished`; `requeue`: start the same command again; `stopped`: as requested, do not start it again;
    `interrupted` by Ctrl-C; `failed`."""
    reason: str
    step: int | None  # steps since the very first start; None if it ended before it looked for a checkpoint
    exit_code: int  # an exit status of `config.errors`

    @classmethod
    def finished(cls, step: int) -> "Ending":
        return cls(status="finished", reason="the last step is made", step=step, exit_code=DONE)

    @classmethod
    def failed(cls, error: BaseException, step: int | None) -> "Ending":
        """Return the ending by an error, with the error's `exit_code` if it has one."""
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", FAILED)
        name = "" if code != FAILED else f"{type(error).__name__}: "
        return cls(status="failed", reason=f"{name}{error}", step=step, exit_code=code)


class RunFolder:
    """Locks `run_dir` on rank 0 for one run at a time. Only the run with the lock writes or removes files there.
    Without a path, as on other ranks, it does nothing."""

    def __init__(self, run_dir: str | None) -> None:
        self._path = None if run_dir is None else Path(run_dir)
        self._lock: int | None = None
        self._made = False

    def take(self, *, make: bool = False) -> None:
        """Lock the folder if it exists (`make`: create it), and remove the last run's `exit.json`: without this file a
        run is in progress or was killed. Raises TakenError if another run has the lock."""
        self._made |= make
        if self._path is None or self._lock is not None:
            return
        with contextlib.suppress(OSError):  # opening the first file there reports the error
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
        """Write `ending` into the folder, unless another run has locked it, and release the lock."""
        if ending is not None:
            with contextlib.suppress(TakenError):
                self.take()
                write_ending(self._path, ending, make_folder=self._made)  # the folder may have been removed
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def reserve_ending(run_dir: Path) -> None:
    """Reserve space for `exit.json`. A run that a full disk ends could not write it, and would be restarted."""
    replace_durably(run_dir / _RESERVED, b" " * _RESERVED_BYTES)


def write_ending(run_dir: Path | None, ending: Ending, *, make_folder: bool = False) -> None:
    """Write `exit.json` into the run's folder, if it has one. Ignores OSError, because the log has the reason too."""
    if run_dir is None:
        return
    with contextlib.suppress(OSError):
        if make_folder:
            run_dir.mkdir(exist_ok=True)
        if not run_dir.is_dir():
            return
        reserved, text = run_dir / _RESERVED, _text_of(ending)
        # Use the reserved space; this creates the file if nothing was reserved.
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
    """Return the JSON, with a shortened reason if it does not fit the reserved space."""
    fields = redacted(asdict(ending))
    reason, length = fields["reason"], len(fields["reason"])
    while len(text := json.dumps(fields, indent=1).encode() + b"\n") > _RESERVED_BYTES:
        length //= 2
        fields["reason"] = f"{reason[:length]}... (the log has all of it)"
    return text


_FILE, _TIME, _PROGRAM, _SIGNALS = 1, 2, 3, 100  # numbers that ranks exchange; the largest counts
_ONE_PRESS = 0.5  # a second SIGINT within this time, in seconds, is ignored: terminal and launcher may both send one
_START_PATIENCE = 20.0  # seconds for a clean exit before the first step; less than torchrun's 30
_FILE_INTERVAL = 1.0  # seconds between two checks for the exit file


@dataclass(frozen=True)
class StopRequest:
    """A reason to stop, as the number that ranks exchange to agree on one."""

    number: int

    @property
    def cause(self) -> str:
        if self.number < _SIGNALS:
            return {
                _FILE: "the exit file exists",
                _TIME: "exit_duration_in_mins is over",
                _PROGRAM: "the program requested it",
            }[self.number]
        return signal.Signals(self.number - _SIGNALS).name

    @property
    def exit_code(self) -> int:
        if self.number == _SIGNALS + signal.SIGINT:
            return INTERRUPTED
        return DONE if self.number in (_FILE, _PROGRAM) else REQUEUE

    def ending(self, step: int | None, saved: str) -> Ending:
        """Return the ending of a run by this request. `saved`: text on what was saved."""
        status = {DONE: "stopped", INTERRUPTED: "interrupted", REQUEUE: "requeue"}[self.exit_code]
        return Ending(status=status, reason=f"{self.cause}; {saved}", step=step, exit_code=self.exit_code)


class StopRun(BaseException):
    """Raised to stop the run. It is no Exception, so that no error handler catches it."""

    def __init__(self, request: StopRequest) -> None:
        super().__init__(request.cause)
        self.request = request


class StopRequests:
    """Collects the stop requests of this rank; signals only inside `listen`.

    `listen` handles SIGINT and `signals`, except those that the process was started to ignore, as with nohup. After a
    signal the ranks have `patience` seconds to agree."""

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
        # The rules of the settings refuse names that are no signals.
        self._signals = [signal.Signals[name] for name in names if name in signal.Signals.__members__]
        self._end = None if minutes is None else time.monotonic() + 60.0 * minutes
        self.file, self._file_checked, self._file_seen = file, 0.0, False
        self._patience, self.say = patience, say
        self._received: dict[int, float] = {}
        """Signal -> time of its first arrival."""
        self.starting = True
        """No step has begun."""
        self._leaving = self.asked = False
        """`asked`: the program, such as a callback, requested a stop."""
        self.before_forced_exit: Callable[[StopRequest, str], None] = lambda request, text: None
        """Called, from another thread, before the process is ended by force."""

    @property
    def request(self) -> StopRequest | None:
        """The request that this rank has received, without those of other ranks."""
        if self._received:
            return StopRequest(_SIGNALS + max(self._received))
        if self._end is not None and time.monotonic() >= self._end:
            return StopRequest(_TIME)
        if self.asked:
            return StopRequest(_PROGRAM)
        return StopRequest(_FILE) if self._check_file() else None

    @property
    def number(self) -> int:
        """Number of the request; 0 for none."""
        return 0 if (request := self.request) is None else request.number

    def started(self) -> None:
        """Mark the first step: from now on signals wait until all ranks agree. Raises StopRun if one has arrived."""
        self.starting = False
        if self._received and not self._leaving:
            raise StopRun(StopRequest(self.number))

    def refuse_old_file(self) -> None:
        """Raise ConfigError if the exit file exists at the start: the run would stop at once."""
        if self.file is not None and self.file.exists():
            raise ConfigError(
                f"{self.file} exists already, which stops the run: remove it to train, or give another --exit-file"
            )

    def leave(self) -> None:
        """Mark that all ranks have agreed to stop: from now on only a second Ctrl-C ends this process by force."""
        self._leaving = True

    def _check_file(self) -> bool:
        now = time.monotonic()
        if self.file is not None and not self._file_seen and now >= self._file_checked + _FILE_INTERVAL:
            self._file_checked = now
            with contextlib.suppress(OSError):  # the disk may be unavailable
                self._file_seen = self.file.exists()
        return self._file_seen

    @contextlib.contextmanager
    def listen(self) -> Iterator["StopRequests"]:
        """Handle signals inside. Does nothing outside the main thread, because Python runs handlers only there."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        handled = [one for one in self._signals if signal.getsignal(one) is not signal.SIG_IGN]
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        watch = threading.Thread(target=self._watch, args=(reader,), name="megalite-signals", daemon=True)
        watch.start()
        before = {one: signal.signal(one, self._handle) for one in handled}
        # Python writes to it even while the main thread is in a collective, when no Python handler can run.
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
        self._received.setdefault(number, time.monotonic())
        if self.starting and not self._leaving:
            self._leaving = True
            raise StopRun(StopRequest(_SIGNALS + number))

    def _watch(self, reader: int) -> None:
        """In a thread: end the process after a second Ctrl-C, or if the ranks do not agree in time."""
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
                    again = now > self._received.setdefault(number, now) + _ONE_PRESS
                    if again and number == signal.SIGINT:
                        self._end_now(StopRequest(_SIGNALS + number), "interrupted twice: nothing is saved")

    def _seconds_left(self) -> float | None:
        """Return the seconds until this process ends by force; None: it does not."""
        if not self._received or (self._leaving and not self.starting):
            return None
        patience = _START_PATIENCE if self.starting else self._patience
        return min(self._received.values()) + patience - time.monotonic()

    def _give_up(self) -> None:
        request = StopRequest(_SIGNALS + max(self._received))
        if self.starting:
            text = f"{request.cause} came {_START_PATIENCE:g} s ago, before the first step: leaving"
        else:
            text = (
                f"{request.cause} came {self._patience:g} s ago and the ranks have not finished their step "
                "(exit_timeout_seconds; one may be lost, or slow): leaving without a checkpoint"
            )
        self._end_now(request, text)

    def _end_now(self, request: StopRequest, text: str) -> None:
        self.say(text)
        self.before_forced_exit(request, text)
        os._exit(request.exit_code)
