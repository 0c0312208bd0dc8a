"""Makes the state of a run safe against a kill, beside the work."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from megalite.data.inputs.places import Place
from megalite.data.preprocess.job import Progress
from megalite.data.preprocess.journal import Journal, Mark
from megalite.data.preprocess.output import Output


class Safekeeper:
    """Puts outputs on the disk and then a mark into the journal, in a thread: a slow disk does not hold up the work.

    Args:
        last: the mark that the run goes on from.
        seconds: how often `save_soon` does something; 0 is always, even if it has to wait for the time before.
    """

    def __init__(
        self, journal: Journal, outputs: Sequence[Output], last: Mark | None, faults: int, seconds: float
    ) -> None:
        self._journal, self._outputs, self._seconds = journal, outputs, seconds
        self.safe = last
        """The last mark in the journal."""
        self._captured = last
        self._faults = faults
        self._captured_at = time.monotonic()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._saving: Future[None] | None = None

    def save_soon(self, place: Place, progress: Progress) -> None:
        """Make what there is safe while the work goes on, if it is time to and the last time is over.

        Raises:
            OSError: it could not be written then.
        """
        if time.monotonic() - self._captured_at < self._seconds:
            return
        if self._saving is not None:
            if self._seconds and not self._saving.done():
                return
            self._saving.result()
        self._saving = self._thread.submit(self._save, self._capture(place, progress))

    def save_now(self, place: Place | None, progress: Progress) -> None:
        """Make what there is safe before going on.

        Raises:
            OSError: it cannot be written.
        """
        self.wait()
        if place is not None and (self._captured is None or self._captured.place != place):
            self._save(self._capture(place, progress))

    def wait(self) -> None:
        """Wait for what is being saved.

        Raises:
            OSError: it could not be written.
        """
        # There is one thread, and it works in order: this comes after a save that a signal has cut off from its future, too.
        self._thread.submit(lambda: None).result()
        if self._saving is not None:
            self._saving.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()

    def _capture(self, place: Place, progress: Progress) -> Mark:
        """The state now, all of it handed to the system."""
        self._captured = mark = Mark(
            place=place,
            input_bytes=progress.input_bytes,
            disk_bytes=progress.disk_bytes,
            bad=dict(progress.bad),
            faults=progress.faults[self._faults :],
            outputs=[output.state() for output in self._outputs],
        )
        self._faults = len(progress.faults)
        self._captured_at = time.monotonic()
        return mark

    def _save(self, mark: Mark) -> None:
        for output in self._outputs:
            output.sync()
        self._journal.mark(mark)
        self.safe = mark
