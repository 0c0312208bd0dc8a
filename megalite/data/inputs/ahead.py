"""Work done ahead of its use by a thread."""

from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition, Event, Thread
from typing import Generic, TypeVar

from megalite.data.inputs.streams import Stopped

T = TypeVar("T")
_AHEAD_ITEMS, _AHEAD_BYTES = 8, 8 << 20


def ahead(make: Callable[[Event], Iterator[T]], num_bytes: Callable[[T], int]) -> Iterator[T]:
    """The items of an iterator that runs in a thread, some ahead: 8 at most, and no more than 8 MiB unless one item is
    larger.

    The thread ends with this generator, also if that is closed early: `make` is given an event that is then set and on
    which it raises Stopped. What else it raises is raised here.
    """
    queue = _Queue(num_bytes)
    stop = Event()

    def work() -> None:
        try:
            for item in make(stop):
                queue.put(item)
        except Stopped:
            pass
        except BaseException as error:
            queue.end(error)
            return
        queue.end(None)

    thread = Thread(target=work, name="input reader", daemon=True)
    thread.start()
    try:
        yield from queue.items()
    finally:
        stop.set()
        queue.close()
        thread.join()


class _Queue(Generic[T]):
    """A queue between two threads, bounded by number and bytes."""

    def __init__(self, num_bytes: Callable[[T], int]) -> None:
        self._num_bytes = num_bytes
        self._items: deque[T] = deque()
        self._bytes = 0
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False
        self._changed = Condition()

    def put(self, item: T) -> None:
        """Add an item once there is room for it.

        Raises:
            Stopped: the other side has closed the queue.
        """
        size = self._num_bytes(item)
        with self._changed:
            while self._items and (len(self._items) >= _AHEAD_ITEMS or self._bytes + size > _AHEAD_BYTES):
                if self._closed:
                    break
                self._changed.wait()
            if self._closed:
                raise Stopped
            self._items.append(item)
            self._bytes += size
            self._changed.notify_all()

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes."""
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        """Nobody takes anything more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def items(self) -> Iterator[T]:
        """Items until the end; then the other side's error is raised, if there was one."""
        while True:
            with self._changed:
                while not self._items and not self._ended:
                    self._changed.wait()
                if not self._items:
                    break
                item = self._items.popleft()
                self._bytes -= self._num_bytes(item)
                self._changed.notify_all()
            yield item
        if self._error is not None:
            raise self._error
