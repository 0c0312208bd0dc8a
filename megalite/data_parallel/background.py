"""What must happen between the parts of a collective, behind the computation."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from megalite.topology.group import DONE, Work

Job = tuple[Callable[[], None], "Future[None]"]


@dataclass
class Background:
    """One thread that runs what it is given, in that order.

    All ranks ask for the same things in the same order; nothing else may use the group meanwhile. On CUDA there is no
    thread: streams order the work.

    After something has failed nothing further is run: the peers wait for what did not happen, and to start more would
    only wait for them in turn. Whatever was asked for fails with the same error.
    """

    device: torch.device
    _jobs: "SimpleQueue[Job | None]" = field(default_factory=SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)
    _last: "Future[None] | None" = field(default=None, init=False)

    def run(self, work: Callable[[], None]) -> Work:
        """Start `work`; `wait()` on what is returned raises what it raised."""
        if self.device.type != "cpu":
            work()
            return DONE
        if self._thread is None:
            # A daemon: a run that fails must be able to end while this waits for a peer that will never come.
            self._thread = threading.Thread(
                target=_work_through, args=(self._jobs,), name="megalite-dp", daemon=True
            )
            self._thread.start()
        future: Future[None] = Future()
        self._last = future
        self._jobs.put((work, future))
        return _Waiting(future)

    def close(self) -> None:
        """Let the thread go; if it is still at work, it is left behind."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if self._last is None or self._last.done():
                thread.join()


def _work_through(jobs: "SimpleQueue[Job | None]") -> None:
    failed: BaseException | None = None
    while (job := jobs.get()) is not None:
        work, future = job
        if failed is None:
            try:
                work()
            except BaseException as error:  # it is raised where the work is waited for
                failed = error
        # What was queued holds tensors; they may go now.
        del work, job
        if failed is None:
            future.set_result(None)
        else:
            future.set_exception(failed)
        del future


@dataclass
class _Waiting:
    future: "Future[None]"

    def wait(self) -> Any:
        return self.future.result()
