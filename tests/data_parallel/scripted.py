"""Serve the events of a server in the order of a list."""

from collections import deque
from collections.abc import Iterable, Sequence

from megalite.data_parallel.server import Event, Ledger


class Scripted:
    """Serves the events of a list, each as soon as it arrives; afterwards by arrival."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._left = deque(events)

    def __call__(self, waiting: Sequence[Event], ledger: Ledger) -> Event | None:
        """Return the next event of the list, if it has arrived."""
        if not self._left:
            return waiting[0]
        if self._left[0] not in waiting:
            return None
        return self._left.popleft()
