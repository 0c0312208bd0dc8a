"""Output of all commands: answers on stdout, messages on stderr, and errors as one line and an exit status. Streams may be
closed or unable to encode the text.

A user's mistake or a system error exits with status 2. Any other error is a bug of megalite: the line says so and names
the place, and the status is 70. No other module turns errors into statuses. `--debug` with any command, or
MEGALITE_DEBUG=1, adds the traceback."""

import errno
import io
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

import megalite
from megalite.config.describe import redact_text
from megalite.config.errors import BAD_INPUT, INTERRUPTED, ConfigError, RankError


def show(text: str) -> None:
    """Print an answer to stdout. A reader that closes the pipe early (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _drop_stdout()


def json_text(value: Any) -> str:
    """Return a value as JSON, with NaN and infinity as the strings "NaN" and "Infinity"."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=2)


def notify(text: str) -> None:
    """Print a message to stderr. A closed stderr is no error."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Escape control characters: text from a file of unknown origin must not control the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _escape_unprintable() -> None:
    """Make stdout print escapes for characters outside its encoding, such as a file name that is not UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _flush_stdout() -> None:
    """Flush stdout. A closed pipe is no error. Raises OSError if the output cannot be written, as on a full disk; the
    rest of the output is then dropped."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_stdout()
    except OSError as error:
        _drop_stdout()
        raise OSError(error.errno, error.strerror, "the answer on stdout") from None


def _stdout_has_no_reader() -> bool:
    """Return whether stdout is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(state & select.POLLERR for _, state in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False


def _drop_stdout() -> None:
    """Redirect stdout to the null device, because Python flushes stdout again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def occupy_closed_streams() -> None:
    """Open the null device for closed stdin, stdout or stderr, so that no output file gets descriptor 0, 1 or 2."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is `number`


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream, which may be missing or closed, is a terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


BUG = 70
"""EX_SOFTWARE of sysexits.h; status 1 is for results such as `damaged` or `different`."""

DEBUG_FLAG, DEBUG_VARIABLE = "--debug", "MEGALITE_DEBUG"

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"  # environment variable that torchrun sets

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # variable with the file from which torchrun reads each rank's error

_FULL, _LOCKED = "make room, or give another folder", "give a path that you may read and write"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _LOCKED,
    errno.EPERM: _LOCKED,
    errno.EROFS: "give a folder that can be written to",
    errno.EISDIR: "give a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file; give a folder",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "give a shorter path",
}

_PATH_ERRORS = frozenset(_REMEDIES) - {errno.ENOSPC, errno.EDQUOT, errno.EMFILE}

_LOST = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "did not come within")
"""Parts of the messages for a lost rank: of gloo, for which torch has no error type, and of `fresh_prefix_store`."""


class Stopped(BaseException):
    """SIGINT or SIGTERM arrived during work that must be saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def reason(self) -> str:
        return "interrupted" if self.number == signal.SIGINT else "terminated"

    @property
    def status(self) -> int:
        """Exit status by the convention of shells."""
        return 128 + self.number


@contextmanager
def first_signal_raises() -> Iterator[None]:
    """Raise Stopped on the first SIGINT or SIGTERM.

    The second signal is ignored so that the work can be saved: a scheduler often sends two in quick succession. The
    third ends the process at once."""
    received = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received += 1
        if received == 1:
            raise Stopped(number)
        if received == 3:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class End:
    """Words and exit status of a command."""

    words: list[str]  # the command line without --debug
    status: int | None = None  # set by the command; None means 0


@contextmanager
def guarded(program: str, argv: Sequence[str] | None = None, *, long_running: bool = False) -> Iterator[End]:
    """Run a command and handle its errors as the module describes. A context manager adds no frame to tracebacks.

    Args:
        program: name of the command for messages, such as `megalite plan`.
        argv: words of the command; default: those of the process.
        long_running: the command cannot simply be run again. An unwritable stdout is no error. Errors that the user
            cannot fix, such as a bug or a failing disk, keep their traceback, which torchrun records."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = End([word for word in words if word != DEBUG_FLAG])
    with _debugging(DEBUG_FLAG in words):
        try:
            _escape_unprintable()
            try:
                yield end
            except SystemExit as stop:
                end.status = stop.code if isinstance(stop.code, int) else BAD_INPUT if stop.code else 0
            with suppress(OSError) if long_running else nullcontext():
                _flush_stdout()
        except Stopped as stopped:
            notify("; ".join([stopped.reason, *getattr(stopped, "__notes__", [])]))
            end.status = stopped.status
        except KeyboardInterrupt:
            # torchrun sends Ctrl-C to every rank.
            if is_first_rank():
                notify("interrupted")
            end.status = INTERRUPTED
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _stdout_has_no_reader():
                _drop_stdout()
                end.status = 0
            elif long_running and not (isinstance(error, ConfigError) or _is_path_error(error)):
                raise
            else:
                end.status = report_error(error, program)
                # Drops an answer that cannot be written: Python would try again at exit.
                with suppress(OSError):
                    _flush_stdout()


def report_error(error: Exception, program: str) -> int:
    """Print an error, once if all ranks raised it, and return the exit status."""
    status, text = explain(error, program)
    text = visible(redact_text(f"error: {text}"))
    if isinstance(error, RankError) or not hasattr(error, "exit_code") or is_first_rank():
        notify(text)
        file = os.environ.get(_ERROR_FILE)
        if file:  # torchrun prints it at the end of its report, below its traceback
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            notify("".join(traceback.format_exception(error)).rstrip("\n"))
    elif UNDER_TORCHRUN in os.environ:
        # torchrun kills all ranks when the first one fails: wait until rank 0 has printed.
        time.sleep(5.0)
    return status


def explain(error: Exception, program: str) -> tuple[int, str]:
    """Return the exit status and the message without `error: `."""
    status, text = _explain(error, program)
    return status, "; ".join([text, *getattr(error, "__notes__", [])])


def _explain(error: Exception, program: str) -> tuple[int, str]:
    names = {base.__name__ for base in type(error).__mro__}  # compares torch's errors without torch
    if isinstance(status := getattr(error, "exit_code", None), int):
        return status, str(error)
    if isinstance(error, OSError):
        return BAD_INPUT, _system_error(error)
    if isinstance(error, UnicodeError):
        return BAD_INPUT, f"{program} was given text that is not UTF-8 ({error}); give it UTF-8 text"
    line = str(error).strip().partition("\n")[0]
    first_line = f": {line}" if line else ""
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return BAD_INPUT, f"{program} ran out of memory{first_line}; give it less to do, or more memory"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "megalite").startswith("megalite"):
        return BAD_INPUT, f"{program} needs the package {error.name}, which is not installed; pip install {error.name}"
    if "DistError" in names or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)):
        return BAD_INPUT, f"{program} lost the other ranks{first_line}; see what the first to end says"
    return BUG, (
        f"{program} has a bug: {type(error).__name__}{first_line}, in {_location(error)}; this is no mistake of yours: "
        f"run it again with {DEBUG_FLAG} and report the traceback that it then prints"
    )


def _system_error(error: OSError) -> str:
    if error.errno is None or error.strerror is None:
        return str(error) or type(error).__name__
    files = " and ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    text = f"{files}: {error.strerror}" if files else error.strerror
    remedy = _REMEDIES.get(error.errno)
    return f"{text}; {remedy}" if remedy else text


def _is_path_error(error: Exception) -> bool:
    """Return whether a path is wrong, as opposed to a failing disk."""
    return isinstance(error, OSError) and error.filename is not None and error.errno in _PATH_ERRORS


def _location(error: Exception) -> str:
    """Return the innermost line of megalite in the traceback."""
    home = Path(megalite.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(home))
    return f"{Path(frame.filename).relative_to(home.parent)}:{frame.lineno} ({frame.name})"


@contextmanager
def _debugging(wanted: bool) -> Iterator[None]:
    """Enable tracebacks in this process and in those that it starts."""
    before = os.environ.get(DEBUG_VARIABLE)
    if wanted:
        os.environ[DEBUG_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ[DEBUG_VARIABLE] = before
        else:
            os.environ.pop(DEBUG_VARIABLE, None)


def environment_number(name: str, default: int) -> int:
    """Return a variable of torchrun, or the default if it is no number: `Launch.from_environment` reports that."""
    word = os.environ.get(name, "")
    return int(word) if word.isdecimal() else default


def is_first_rank() -> bool:
    """Return whether this is rank 0 or a process without a launcher."""
    return environment_number("RANK", 0) == 0
