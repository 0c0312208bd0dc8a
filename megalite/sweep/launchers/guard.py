"""`python -m megalite.sweep.launchers.guard PARENT COMMAND...` runs COMMAND and leaves nothing of it behind.

torchrun that is ended while it starts its ranks forgets some of them, and a sweep that is killed ends nobody. The guard
stands between: when it is told to end, when process PARENT has ended, or when COMMAND has, it kills whatever is left
below it. For that it asks the system for a signal at PARENT's end, and to become the parent of orphans; Linux alone does
both, elsewhere only COMMAND's process group is ended.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from megalite.sweep.launchers.processes import END_SECONDS, kill_below

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOK_SECONDS = 0.05
_BY_SIGNAL = 128
"""What shells add to the number of a signal that ended a process."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    parent, *command = arguments
    told: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        # No more than that: an exception might come while a process is being started, and lose it.
        told.append(number)

    signal.signal(signal.SIGTERM, note)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != int(parent):  # it ended before it could be watched
            return _BY_SIGNAL + signal.SIGTERM
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None and not told:
        time.sleep(_LOOK_SECONDS)
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    kill_below(os.getpid())
    status = process.wait()
    return status if status >= 0 else _BY_SIGNAL - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
