"""A bound on what one of many cases may take, and waiting for a moment of another process."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONGEST_CASE = 5.0


@contextmanager
def within(what: object, seconds: float = LONGEST_CASE) -> Iterator[None]:
    """Fail if the block takes more processor time of all threads; `what` is said then.

    A machine that stands still for a while is no failure. What waits for ever is stopped by the test's own timeout.
    """
    started = time.process_time()
    yield
    taken = time.process_time() - started
    assert taken < seconds, f"{taken:.1f} s of processor time, more than {seconds}: {what}"


def wait_until(
    condition: Callable[[], object],
    *,
    seconds: float = 60.0,
    running: Callable[[], object] = lambda: True,
    said: Callable[[], str] = str,
) -> None:
    """Look again and again, more often than steps are made. `running`: what is to bring it about still works; `said`:
    for the message if it does not come."""
    end = time.monotonic() + seconds
    while not condition():
        time.sleep(0.005)
        assert running(), f"it ended before the moment came\n{said()}"
        assert time.monotonic() < end, f"the moment did not come within {seconds:g} s\n{said()}"
