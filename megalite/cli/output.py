"""Answers on stdout."""

import os
import sys


def show(text: str) -> None:
    """Print an answer; a reader that has read enough of it (`| head`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # Python flushes stdout once more on its way out.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
