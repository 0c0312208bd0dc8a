"""Answers on stdout and messages on stderr, also where no one reads them or they hold what a terminal cannot show."""

import contextlib
import io
import json
import os
import select
import sys
from typing import Any, TextIO


def show(text: str) -> None:
    """Print an answer; a reader that has read enough of it (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_stdout()


def json_text(value: Any) -> str:
    """An answer as JSON, which has no NaN and no infinity: they are words in it, "NaN" and "Infinity"."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=2)


def tell(text: str, end: str = "\n") -> None:
    """Print a message; that stderr is closed or its reader has gone stops no work."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """The text without control characters, which a file of unknown origin could use to write on the screen."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def escape_unprintable() -> None:
    """Print escapes for what stdout's encoding lacks, such as a file name that is no UTF-8, rather than fail."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_stdout() -> None:
    """Hand over what is printed; a reader that has gone is no error. Raises OSError: it cannot be written, on a full
    disk say; nothing of it is then tried again."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()
    except OSError as error:
        drop_stdout()
        raise OSError(error.errno, error.strerror, "the answer on stdout") from None


def stdout_has_no_reader() -> bool:
    """It is a pipe, and its reader has gone."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(state & select.POLLERR for _, state in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # closed, or no file at all
        return False


def drop_stdout() -> None:
    """Put the null device in stdout's place: Python flushes it once more on its way out."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def occupy_closed_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed, so that no file of the output gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one


def stderr_is_terminal() -> bool:
    """Progress may be drawn on it."""
    return _is_terminal(sys.stderr)


def stdout_is_terminal() -> bool:
    """Answers may be in colour."""
    return _is_terminal(sys.stdout)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
