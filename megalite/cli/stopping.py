"""Ctrl-C and SIGTERM, told apart from everything else that may go wrong, while work is done that wants to be saved."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_LAST = 3


class Stopped(BaseException):
    """SIGINT or SIGTERM has come."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def how(self) -> str:
        """In a word."""
        return "interrupted" if self.number == signal.SIGINT else "terminated"

    @property
    def status(self) -> int:
        """Exit status, as shells have it."""
        return 128 + self.number


@contextmanager
def first_signal_raises() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise Stopped, once.

    A second one is not heard, so that what is done can be saved: who stops a job often sends both, one right after the
    other. The third ends the process at once.
    """
    heard = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1
        if heard == 1:
            raise Stopped(number)
        if heard == _LAST:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
