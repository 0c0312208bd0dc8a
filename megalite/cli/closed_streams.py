"""Standard streams that whoever started a program has closed."""

import os


def occupy_closed_streams() -> None:
    """Put the null device where stdin, stdout or stderr is closed, lest a file of the output gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
