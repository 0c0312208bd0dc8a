"""Two signals that work on a rank whatever it is at: one writes its stacks, one ends it with a status of its own.

Both are handled below Python, so neither waits for a lock that the rank may hold; a process that is stopped handles them
once it is continued. They are real-time signals, of which nothing else makes use, so schedulers' SIGUSR1 stays free.
"""

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megalite.config.exit_codes import HUNG

_DUMP = 43
_QUIET_SECONDS = 0.1
"""A file of stacks that has not grown for so long is complete."""


def supported() -> bool:
    """Linux: signals of these numbers, and /proc."""
    return sys.platform == "linux"


class Handlers:
    """This process can be asked for its stacks, and ended.

    Args:
        stacks: file that gets the stacks; must not exist.
    """

    def __init__(self, stacks: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND
        self._file = os.fdopen(os.open(stacks, flags, 0o600), "wb", buffering=0)
        faulthandler.register(_DUMP, self._file, all_threads=True, chain=False)
        libc = ctypes.CDLL(None)
        # The handler of a signal is called with its number, and _exit ends the process with what it is called with.
        _set_handler(ctypes.cast(libc._exit, ctypes.c_void_p).value)

    def close(self) -> None:
        """This process handles neither any more."""
        _set_handler(int(signal.SIG_DFL))
        faulthandler.unregister(_DUMP)
        self._file.close()


def _set_handler(address: int | None) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(HUNG, address)


def ask_for_stacks(processes: Mapping[int, tuple[int, Path]], *, seconds: float) -> dict[int, str]:
    """The stacks of all threads of some ranks; of one that does not answer, nothing.

    A process that is stopped is continued for it.

    Args:
        processes: process id and file of stacks, by rank.
    """
    processes = {rank: (pid, path) for rank, (pid, path) in processes.items() if path.exists()}
    for pid, _ in processes.values():
        _send(pid, _DUMP)
        _send(pid, signal.SIGCONT)
    end = time.monotonic() + seconds
    sizes: dict[int, tuple[int, float]] = {}
    while (now := time.monotonic()) < end:
        for rank, (_, path) in processes.items():
            size = path.stat().st_size
            if rank not in sizes or sizes[rank][0] != size:
                sizes[rank] = size, now
        if all(size > 0 and now - since > _QUIET_SECONDS for size, since in sizes.values()):
            break
        time.sleep(0.02)
    return {rank: path.read_text(errors="replace") for rank, (_, path) in processes.items()}


def end_process(pid: int) -> None:
    """End it with status `HUNG`, stopped or not."""
    _send(pid, HUNG)
    _send(pid, signal.SIGCONT)


def kill_process(pid: int) -> None:
    """End one that does not handle signals."""
    _send(pid, signal.SIGKILL)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
