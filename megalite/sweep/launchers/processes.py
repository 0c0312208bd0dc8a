"""All processes below one, found and ended: torchrun's ranks are in sessions of their own, out of its group's reach."""

import contextlib
import os
import signal
import time
from pathlib import Path

END_SECONDS = 6.0
"""For a launcher to end its ranks by itself, and for what is killed to be gone."""
_LOOK_SECONDS = 0.02
_STATE, _PARENT = 0, 1
"""Places in /proc/PID/stat, counted from the state."""


def descendants(pid: int) -> set[int]:
    """Live processes below `pid`, itself left out; none where the system does not tell."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            # The name before the state, in brackets, may hold anything.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[_STATE] != "Z":
                children.setdefault(int(fields[_PARENT]), []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        below = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(below)
        waiting += below
    return found


def kill_below(pid: int) -> None:
    """Kill every process below `pid` and wait until they are gone.

    Memory of a device is free again only then, and the next run is about to ask for it.
    """
    last = time.monotonic() + END_SECONDS
    while (below := descendants(pid)) and time.monotonic() < last:
        for child in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
