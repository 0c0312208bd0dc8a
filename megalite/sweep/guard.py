"""`python -m megalite.sweep.guard PARENT COMMAND...` runs COMMAND and leaves nothing of it behind.

torchrun that is ended while it starts its ranks forgets some of them, and a sweep that is killed ends none. The guard
stands between: when it is asked to end, when process PARENT has ended, or when COMMAND has, it kills what is left below
it. For that it asks the system for a signal at PARENT's end, and to become the parent of orphans; Linux alone does both,
elsewhere only COMMAND's process group is ended.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from megalite.watchdog.processes import stat_fields

END_SECONDS = 6.0  # for a launcher to end its ranks by itself, and for what is killed to be gone
_LOOK_SECONDS = 0.02


def descendants(pid: int) -> set[int]:
    """Live processes below `pid`, itself left out; none where the system does not tell."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        fields = stat_fields(int(entry.name))
        if fields and fields[0] != "Z":
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(below)
        waiting += below
    return found


def kill_below(pid: int) -> None:
    """Kill every process below `pid` and wait until they are gone. Memory of a device is free again only then, and the
    next run is about to ask for it."""
    last = time.monotonic() + END_SECONDS
    while (below := descendants(pid)) and time.monotonic() < last:
        for child in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.05
_BY_SIGNAL = 128  # what shells add to the number of a signal that ended a process


def main(arguments: list[str]) -> int:
    parent, *command = arguments
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        # No more than that: an exception might come while a process is being started, and lose it.
        received.append(number)

    signal.signal(signal.SIGTERM, note)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != int(parent):  # it ended before it could be watched
            return _BY_SIGNAL + signal.SIGTERM
    process = subprocess.Popen(command, start_new_session=True)
    while process.poll() is None and not received:
        time.sleep(_POLL_SECONDS)
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
