"""Reads the state of this host's processes from /proc, and signals them."""

import contextlib
import ctypes
import faulthandler
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megalite.config.errors import HUNG

STOPPED, TRACED, GONE, RUNNING = "stopped", "traced", "gone", "running"


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields after the name in /proc/PID/stat: state, parent, ...; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name, in brackets, may contain any character


def start_time(pid: int) -> int | None:
    """Return the process's start in ticks since boot. It distinguishes processes when the kernel reuses an id."""
    fields = stat_fields(pid)
    return None if fields is None else int(fields[19])


def started_at(pid: int) -> float | None:
    """Return the process's start in seconds since 1970; None if the system does not report it."""
    ticks = start_time(pid)
    if ticks is None:
        return None
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def state(pid: int, started: int) -> str:
    """Return whether the process runs (or sleeps), is stopped, is traced by a debugger, or is gone."""
    fields = stat_fields(pid)
    if fields is None or int(fields[19]) != started:
        return GONE
    return {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE}.get(fields[0], RUNNING)


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_the_kernel(pid: int) -> str:
    """Return the kernel function in which the process sleeps, or an empty string. It reveals a hung disk."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip().strip("0")
    except OSError:
        return ""


def network_key() -> str:
    """Return a key that two processes share exactly if no network lies between them."""
    try:
        return f"{host_key()} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return host_key()


def host_key() -> str:
    """Return a key that two processes share exactly if each can address the other by its process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return platform.node()
    return f"{platform.node()} {boot} {space}"


_DUMP = 43
_QUIET_SECONDS = 0.1  # a file of stacks that has not grown for this time is complete


def supported() -> bool:
    """Return whether this is Linux, which has /proc and signals of these numbers."""
    return sys.platform == "linux"


class Handlers:
    """Signal handlers that write this process's stacks or end it. `stacks`: file for the stacks; must not exist."""

    def __init__(self, stacks: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_APPEND
        self._file = os.fdopen(os.open(stacks, flags, 0o600), "wb", buffering=0)
        faulthandler.register(_DUMP, self._file, all_threads=True, chain=False)
        libc = ctypes.CDLL(None)
        # A C handler runs while another thread has Python's lock. `_exit(signal number)` exits with status HUNG.
        _set_handler(ctypes.cast(libc._exit, ctypes.c_void_p).value)

    def close(self) -> None:
        """Remove both handlers."""
        _set_handler(int(signal.SIG_DFL))
        faulthandler.unregister(_DUMP)
        self._file.close()


def _set_handler(address: int | None) -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(HUNG, address)


def ask_for_stacks(processes: Mapping[int, tuple[int, Path]], *, seconds: float) -> dict[int, str]:
    """Return the stacks of all threads by rank; an empty string for a rank that does not answer.

    Continues stopped processes. `processes`: process id and file of stacks by rank."""
    processes = {rank: (pid, path) for rank, (pid, path) in processes.items() if path.exists()}
    for pid, _ in processes.values():
        send(pid, _DUMP)
        send(pid, signal.SIGCONT)
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
    """End a process, even a stopped one, with status `HUNG`."""
    send(pid, HUNG)
    send(pid, signal.SIGCONT)


def send(pid: int, number: int) -> None:
    """Signal a process, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
