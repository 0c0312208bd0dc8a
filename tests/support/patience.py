"""A bound on what one of many cases may take."""

import time
from collections.abc import Iterator
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
