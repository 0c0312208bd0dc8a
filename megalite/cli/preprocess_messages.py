"""Messages of preprocessing on stderr, also where nobody reads them."""

import contextlib
import os
import sys


def tell(text: str, end: str = "\n") -> None:
    """Print a message; that stderr is closed or its reader has gone stops no work."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(text, end=end, file=sys.stderr, flush=True)


def occupy_closed_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed, lest a file of the output gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
