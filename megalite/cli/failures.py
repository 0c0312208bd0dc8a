"""How every command ends: with its answer, or with one line that says what to fix. Errors are caught here alone.

A user's mistake and an error of the system are one line and status 2. Anything else is a bug of ours: one line that says so
and where, and status 70. `--debug` behind any command, or MEGALITE_DEBUG=1, adds the traceback to either."""

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import megalite
from megalite.cli.output import drop_stdout, escape_unprintable, flush_stdout, stdout_has_no_reader, tell, visible
from megalite.config.describe import redact_text
from megalite.config.errors import ConfigError, RankError

BAD_INPUT, BUG, INTERRUPTED = 2, 70, 128 + signal.SIGINT
"""Exit statuses; 70 is what sysexits.h has for an internal error: commands say `damaged` or `different` with 1."""

DEBUG_FLAG, DEBUG_VARIABLE = "--debug", "MEGALITE_DEBUG"

UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"  # a variable that torchrun sets

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for what a rank ended by

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

_OF_PATHS = frozenset(_REMEDIES) - {errno.ENOSPC, errno.EDQUOT, errno.EMFILE}

_LOST = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "did not come within")
"""What gloo says when another rank has gone, for which torch has no type, and `fresh_prefix_store` of one that never came."""

_THIRD = 3


class Stopped(BaseException):
    """SIGINT or SIGTERM has come while work is done that is to be saved."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def how(self) -> str:
        return "interrupted" if self.number == signal.SIGINT else "terminated"

    @property
    def status(self) -> int:
        """Exit status, as shells have it."""
        return 128 + self.number


@contextmanager
def first_signal_raises() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise Stopped, once.

    A second one is ignored, so that what is done can be saved: a scheduler often sends both, one right after the other.
    The third ends the process at once."""
    heard = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            raise Stopped(number)
        if heard == _THIRD:
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
    """How a command ends."""

    words: list[str]  # what was typed, without --debug
    status: int | None = None  # exit status, set by the command; None for 0


@contextmanager
def guarded(program: str, argv: Sequence[str] | None = None, *, lasting: bool = False) -> Iterator[End]:
    """Run a command inside; its end is the one that the module describes. A context, so that it adds no frame.
    `program`: what is being done, such as `megalite plan`, for messages. `argv`: words of the command; default: those
    of the process. With --debug among them tracebacks are shown. `lasting`: a run that a log that cannot be written
    does not end, and that cannot simply be started again. Only what the user can fix is caught: a bug, or a disk that
    fails meanwhile, keeps its traceback with or without --debug, and torchrun its record of it."""
    words = list(sys.argv[1:] if argv is None else argv)
    end = End([word for word in words if word != DEBUG_FLAG])
    with _debugging(DEBUG_FLAG in words):
        try:
            escape_unprintable()
            try:
                yield end
            except SystemExit as stop:
                end.status = stop.code if isinstance(stop.code, int) else BAD_INPUT if stop.code else 0
            with suppress(OSError) if lasting else nullcontext():
                flush_stdout()
        except Stopped as stopped:
            tell(stopped.how)
            end.status = stopped.status
        except KeyboardInterrupt:
            # torchrun sends Ctrl-C to every rank.
            if is_first_rank():
                tell("interrupted")
            end.status = INTERRUPTED
        except Exception as error:
            if isinstance(error, BrokenPipeError) and stdout_has_no_reader():
                drop_stdout()
                end.status = 0
            elif lasting and not (isinstance(error, ConfigError) or _is_of_a_path(error)):
                raise
            else:
                end.status = refuse(error, program)
                # An answer that could not be written is dropped: Python would try again at its exit.
                with suppress(OSError):
                    flush_stdout()


def refuse(error: Exception, program: str) -> int:
    """Print what is wrong, once if all ranks found it alike; returns the exit status."""
    status, text = explained(error, program)
    text = visible(redact_text(f"error: {text}"))
    if isinstance(error, RankError) or not hasattr(error, "exit_code") or is_first_rank():
        tell(text)
        file = os.environ.get(_ERROR_FILE)
        if file:  # torchrun ends its report with it, below a traceback of torchrun that no rank can prevent
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            with suppress(OSError):
                Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
        if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
            tell("".join(traceback.format_exception(error)).rstrip("\n"))
    elif UNDER_TORCHRUN in os.environ:
        # torchrun ends all ranks as soon as one has failed: let rank 0 be the first, as soon as it has printed.
        time.sleep(5.0)
    return status


def explained(error: Exception, program: str) -> tuple[int, str]:
    """Exit status and the line without its `error: `."""
    status, text = _explained(error, program)
    return status, "; ".join([text, *getattr(error, "__notes__", [])])


def _explained(error: Exception, program: str) -> tuple[int, str]:
    names = {base.__name__ for base in type(error).__mro__}
    # torch's by name: most commands start without it.
    if isinstance(status := getattr(error, "exit_code", None), int):
        return status, str(error)
    if isinstance(error, OSError):
        return BAD_INPUT, _of_system(error)
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
        f"{program} has a bug: {type(error).__name__}{first_line}, in {_place(error)}; this is no mistake of yours: run "
        f"it again with {DEBUG_FLAG} and report the traceback that it then prints"
    )


def _of_system(error: OSError) -> str:
    if error.errno is None or error.strerror is None:
        return str(error) or type(error).__name__
    files = " and ".join(str(file) for file in (error.filename, error.filename2) if file is not None)
    text = f"{files}: {error.strerror}" if files else error.strerror
    remedy = _REMEDIES.get(error.errno)
    return f"{text}; {remedy}" if remedy else text


def _is_of_a_path(error: Exception) -> bool:
    """A path that cannot be used as it was meant, whatever the disk does."""
    return isinstance(error, OSError) and error.filename is not None and error.errno in _OF_PATHS


def _place(error: Exception) -> str:
    """The innermost line of ours that the error came through."""
    home = Path(megalite.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(frame for frame in reversed(frames) if Path(frame.filename).is_relative_to(home))
    return f"{Path(frame.filename).relative_to(home.parent)}:{frame.lineno} ({frame.name})"


@contextmanager
def _debugging(wanted: bool) -> Iterator[None]:
    """Tracebacks are shown, here and in the processes that are started meanwhile."""
    before = os.environ.get(DEBUG_VARIABLE)
    if wanted:
        os.environ[DEBUG_VARIABLE] = "1"
    try:
        yield
    finally:
        if wanted:
            os.environ.pop(DEBUG_VARIABLE)
            if before is not None:
                os.environ[DEBUG_VARIABLE] = before


def is_first_rank() -> bool:
    """Rank 0, or a process without a launcher."""
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0
