"""A sha256 that is computed beside the writing, on a thread: both let go of the interpreter while they work."""

import hashlib
import queue
import threading

_IN_FLIGHT = 4
"""Chunks that may wait to be hashed; they keep what they are part of in memory."""


class RunningDigest:
    """The sha256 of everything given to `update`, in that order. No torch."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._chunks: queue.Queue[memoryview | None] = queue.Queue(_IN_FLIGHT)
        self._thread: threading.Thread | None = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def update(self, chunk: memoryview) -> None:
        """Add bytes, which must not change before `finish` has returned."""
        self._chunks.put(chunk)

    def finish(self) -> str:
        """The hash in hexadecimal."""
        self.close()
        return self._hash.hexdigest()

    def close(self) -> None:
        """End the thread; again is harmless."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            self._chunks.put(None)
            thread.join()

    def _run(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._hash.update(chunk)
            del chunk  # or its tensor would stay alive while this waits for the next
