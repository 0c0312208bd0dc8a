"""Write answers to stdout and messages to stderr, even if the stream is closed or cannot encode the text."""

import contextlib
import io
import json
import os
import select
import sys
from typing import Any, TextIO


def show(text: str) -> None:
    """Print an answer to stdout. A reader that closes the pipe early (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_stdout()


def json_text(value: Any) -> str:
    """Return a value as JSON, with NaN and infinity as the strings "NaN" and "Infinity"."""
    return json.dumps(json.loads(json.dumps(value), parse_constant=str), indent=2)


def notify(text: str) -> None:
    """Print a message to stderr. A closed stderr is no error."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Escape control characters: text from a file of unknown origin must not control the terminal."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def escape_unprintable() -> None:
    """Make stdout print escapes for characters outside its encoding, such as a file name that is not UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_stdout() -> None:
    """Flush stdout. A closed pipe is no error. Raises OSError if the output cannot be written, as on a full disk; the
    rest of the output is then dropped."""
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
    """Return whether stdout is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(state & select.POLLERR for _, state in poll.poll(0))
    except (AttributeError, OSError, ValueError):  # closed, or not a file
        return False


def drop_stdout() -> None:
    """Redirect stdout to the null device, because Python flushes stdout again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def occupy_closed_streams() -> None:
    """Open the null device for closed stdin, stdout or stderr, so that no output file gets descriptor 0, 1 or 2."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is `number`


def stderr_is_terminal() -> bool:
    return _is_terminal(sys.stderr)


def stdout_is_terminal() -> bool:
    return _is_terminal(sys.stdout)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False
