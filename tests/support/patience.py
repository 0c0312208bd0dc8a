"""Limits on the processor time of a case, and waiting for another process."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megalite.watchdog.processes import stat_fields

LONGEST_CASE = 5.0


@contextmanager
def within(what: object, seconds: float = LONGEST_CASE) -> Iterator[None]:
    """Fail with `what` if the block takes more processor time, over all threads.

    Wall-clock time does not count, as the machine may be busy. A hang is stopped by the test's own timeout."""
    started = time.process_time()
    yield
    taken = time.process_time() - started
    assert taken < seconds, f"{taken:.1f} s of processor time, more than {seconds}: {what}"


def is_gone(pid: int) -> bool:
    """Whether the process has ended; a zombie has."""
    fields = stat_fields(pid)
    return fields is None or fields[0] == "Z"


def wait_until(
    condition: Callable[[], object],
    *,
    seconds: float = 60.0,
    running: Callable[[], object] = lambda: True,
    said: Callable[[], str] = str,
) -> None:
    """Poll the condition every few milliseconds. Fails with `said()` after `seconds`, or once `running()` is false: then
    the condition cannot become true."""
    end = time.monotonic() + seconds
    while not condition():
        time.sleep(0.005)
        assert running(), f"it ended before the condition was met\n{said()}"
        assert time.monotonic() < end, f"the condition was not met within {seconds:g} s\n{said()}"
