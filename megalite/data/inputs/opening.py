"""Opening input files so that nothing blocks, and what went wrong in one sentence."""

import os
import stat
import sys
from typing import BinaryIO

from megalite.config.errors import ConfigError

STDIN = "-"
"""The name of standard input."""


def unreadable(path: str, reason: object) -> ConfigError:
    """The error for an input that is missing, damaged or not allowed."""
    why = reason.strerror or str(reason) if isinstance(reason, OSError) else str(reason)
    return ConfigError(f"input {path} cannot be read: {why}; mend the file or leave it out")


def changed(path: str, expected: str) -> ConfigError:
    """The error for an input that is no longer what it was."""
    return ConfigError(
        f"input {path} has changed since it was first looked at: {expected}; start again once nothing writes to it"
    )


def open_regular(path: str) -> BinaryIO:
    """The file, opened for reading without a buffer.

    Raises:
        ConfigError: it cannot be opened, or is no regular file (to open a pipe would wait for its writer for ever).
    """
    try:
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise unreadable(path, error) from None
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise unreadable(path, "it is a pipe, folder or device, not a file (a pipe can be read as --input -)")
    return os.fdopen(number, "rb", buffering=0)


def stdin_number() -> int:
    """The file descriptor of standard input.

    Raises:
        ConfigError: there is none, or a person sits at it.
    """
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):
        raise ConfigError("input -: there is no standard input; pipe text into the command") from None
    if os.isatty(number):
        raise ConfigError("input -: standard input is a terminal; pipe text into the command")
    return number
