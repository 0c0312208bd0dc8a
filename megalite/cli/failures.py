"""How every command ends: with its answer, or with one line that says what to mend. Errors are caught here alone.

A user's mistake and an error of the system are one line and status 2. Anything else is a bug of ours: one line that says so
and where, and status 70. `--debug` behind any command, or MEGALITE_DEBUG=1, adds the traceback to either.
"""

import errno
import functools
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import megalite
from megalite.cli.output import (
    drop_stdout,
    escape_unprintable,
    flush_stdout,
    stdout_has_no_reader,
    tell,
    visible,
)
from megalite.cli.stopping import Stopped
from megalite.config.errors import ConfigError, RankError

BAD_INPUT, BUG, INTERRUPTED = 2, 70, 128 + signal.SIGINT
"""Exit statuses; 70 is what sysexits.h has for an internal error: commands say `damaged` or `different` with 1."""

DEBUG_FLAG, DEBUG_VARIABLE = "--debug", "MEGALITE_DEBUG"

_UNDER_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets."""

_REMEDIES = {
    errno.ENOSPC: "make room, or give another folder",
    errno.EDQUOT: "make room, or give another folder",
    errno.EACCES: "give a path that you may read and write",
    errno.EPERM: "give a path that you may read and write",
    errno.EROFS: "give a folder that can be written to",
    errno.EISDIR: "give a file, not a folder",
    errno.ENOTDIR: "a part of the path is a file; give a folder",
    errno.ENOENT: "check the path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENAMETOOLONG: "give a shorter path",
}

_OF_PATHS = frozenset(_REMEDIES) - {errno.ENOSPC, errno.EDQUOT, errno.EMFILE}

_LOST = ("Connection closed by peer", "Connection reset by peer", "Socket closed")
"""What gloo says when another rank has gone; torch has no type for it."""

Command = Callable[..., int | None]
"""`main(words, ...)` of a command: its words without the program's name -> exit status, None for 0."""


def command(program: str, *, lasting: bool = False) -> Callable[[Command], Callable[..., int]]:
    """Make a `main(argv=None)` of a function that is given a list of words and may raise whatever it likes.

    Args:
        program: as `guarded`, for messages.
        lasting: as `guarded`.
    """

    def wrap(run: Command) -> Callable[..., int]:
        @functools.wraps(run)
        def main(argv: Sequence[str] | None = None, **options: Any) -> int:
            words = list(sys.argv[1:] if argv is None else argv)
            with _debugging(DEBUG_FLAG in words):
                rest = [word for word in words if word != DEBUG_FLAG]
                return guarded(lambda: run(rest, **options), program, lasting=lasting)

        return main

    return wrap


def guarded(run: Callable[[], int | None], program: str, *, lasting: bool = False) -> int:
    """Call a command and end it as the module says; returns its exit status.

    Args:
        run: the call.
        program: what is being done, such as `megalite plan`.
        lasting: a run that cannot simply be done again. Only what the user can mend is caught: a bug, or a disk that
            fails in the midst of it, keeps its traceback with or without --debug, and torchrun its record of it.
    """
    try:
        escape_unprintable()
        status = _status_of(run)
        flush_stdout()
        return status
    except Stopped as stopped:
        tell(stopped.how)
        return stopped.status
    except KeyboardInterrupt:
        # torchrun hands Ctrl-C on to every rank.
        if _is_first_rank():
            tell("interrupted")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and stdout_has_no_reader():
            drop_stdout()
            return 0
        if lasting and not (isinstance(error, ConfigError) or _is_of_a_path(error)):
            raise
        status = refuse(error, program)
        # An answer that could not be written is dropped, lest Python tries again on its way out.
        with suppress(OSError):
            flush_stdout()
        return status


def refuse(error: Exception, program: str) -> int:
    """Say what is wrong, once if all ranks found it alike; returns the exit status."""
    status, text = explained(error, program)
    alike = isinstance(error, ConfigError) and not isinstance(error, RankError)
    if not alike or _is_first_rank():
        tell(f"error: {visible(text)}")
        show_traceback(error)
    elif _UNDER_TORCHRUN in os.environ:
        # torchrun ends all ranks as soon as one has failed: let rank 0 be the first, as soon as it has printed.
        time.sleep(5.0)
    return status


def show_traceback(error: BaseException) -> None:
    """Where an error came from, if the user wants to know."""
    if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
        tell("".join(traceback.format_exception(error)).rstrip("\n"))


def explained(error: Exception, program: str) -> tuple[int, str]:
    """Exit status and the line without its `error: `."""
    notes = getattr(error, "__notes__", [])
    status, text = _explained(error, program)
    return status, "; ".join([text, *notes])


def _explained(error: Exception, program: str) -> tuple[int, str]:
    names = {base.__name__ for base in type(error).__mro__}
    # torch's by name: most commands start without it.
    if isinstance(error, ConfigError):
        return BAD_INPUT, str(error)
    if isinstance(error, OSError):
        return BAD_INPUT, _of_system(error)
    if isinstance(error, UnicodeError):
        return BAD_INPUT, f"{program} was given text that is not UTF-8 ({error}); give it UTF-8 text"
    if isinstance(error, MemoryError) or "OutOfMemoryError" in names:
        return (
            BAD_INPUT,
            f"{program} ran out of memory{_first_line(error)}; give it less to do, or more memory",
        )
    if isinstance(error, ModuleNotFoundError) and not (error.name or "megalite").startswith("megalite"):
        return BAD_INPUT, f"{program} needs the package {error.name}, which is not installed; pip install it"
    if "DistError" in names or (
        isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)
    ):
        return (
            BAD_INPUT,
            f"{program} lost the other ranks{_first_line(error)}; see what the first to end says",
        )
    return BUG, (
        f"{program} has a bug: {type(error).__name__}{_first_line(error)}, in {_place(error)}; this is no mistake of "
        f"yours: run it again with {DEBUG_FLAG} and report the traceback that it then prints"
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


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return f": {line}" if line else ""


def _place(error: Exception) -> str:
    """The innermost line of ours that the error came through."""
    home = Path(megalite.__file__).parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(home):
            return f"{path.relative_to(home.parent)}:{frame.lineno} ({frame.name})"
    return "an unknown place"


def _status_of(run: Callable[[], int | None]) -> int:
    """Of a command; argparse exits by itself once it has shown the help."""
    try:
        return run() or 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else BAD_INPUT if end.code else 0


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


def _is_first_rank() -> bool:
    rank = os.environ.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0
