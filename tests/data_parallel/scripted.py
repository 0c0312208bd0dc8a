"""The order of a server as a list says it."""

from collections import deque
from collections.abc import Iterable, Sequence

from megalite.data_parallel.more.server_link import Event, Ledger


class Scripted:
    """What a list says, each as soon as it comes; then by arrival."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._left = deque(events)

    def __call__(self, waiting: Sequence[Event], ledger: Ledger) -> Event | None:
        """The next of the list, if it is there."""
        if not self._left:
            return waiting[0]
        if self._left[0] not in waiting:
            return None
        return self._left.popleft()
