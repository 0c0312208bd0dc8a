"""`python -m megalite.sweep.guard PARENT COMMAND...` runs COMMAND and leaves none of its processes running.

torchrun loses track of some ranks if it is terminated while it starts them, and a killed sweep terminates none. The guard
kills all its descendants when it is terminated, when process PARENT ends, or when COMMAND ends. For that it receives a
signal at PARENT's end and adopts orphaned processes; this works only on Linux, elsewhere only COMMAND's process group is
killed.
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

END_SECONDS = 6.0  # for a launcher to end its ranks, and for killed processes to disappear
_LOOK_SECONDS = 0.02


def descendants(pid: int) -> set[int]:
    """Return the live processes below `pid`; empty if the system does not list them."""
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
    """Kill all processes below `pid` and wait for their end: only then is device memory free for the next run."""
    last = time.monotonic() + END_SECONDS
    while (below := descendants(pid)) and time.monotonic() < last:
        for child in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_SECONDS = 0.05
_BY_SIGNAL = 128  # shells report signal N as exit status 128 + N


def main(arguments: list[str]) -> int:
    parent, *command = arguments
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        # Only that: an exception during the start of a process would lose the process.
        received.append(number)

    signal.signal(signal.SIGTERM, note)
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        library.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != int(parent):  # it ended before the signal was set up
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
