"""Work on a thread whose outcome is asked for later."""

import threading
from collections.abc import Callable
from pathlib import Path


class BackgroundSave:
    """A save under way. The thread does not keep the process alive: what it leaves behind the next save removes.

    Args:
        work: returns the checkpoint's folder, or raises.
    """

    def __init__(self, work: Callable[[], Path]) -> None:
        self._work = work
        self._outcome: Path | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="save", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """`result` would not wait."""
        return not self._thread.is_alive()

    def result(self) -> Path:
        """Wait; the folder, or what the work raised."""
        self._thread.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def _run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:
            self._outcome = error
