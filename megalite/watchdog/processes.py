"""Reads the state of this host's processes from /proc, and signals them.

`python -m megalite.watchdog.processes PARENT COMMAND...` runs COMMAND and leaves none of its processes running. torchrun
loses track of some ranks if it is terminated while it starts them, and a killed sweep terminates none. This guard kills
all its descendants when it is terminated, when process PARENT ends, or when COMMAND ends. For that it receives a signal
at PARENT's end and adopts orphaned processes; this works only on Linux, elsewhere only COMMAND's process group is
killed."""

import contextlib
import ctypes
import faulthandler
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

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


END_SECONDS = 6.0  # for a launcher to end its ranks, and for killed processes to disappear


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
    while below := descendants(pid):  # on a busy host, listing them may take all this time: kill them at least once
        for child in below:
            with contextlib.suppress(PermissionError):
                send(child, signal.SIGKILL)
        if time.monotonic() > last:
            return
        time.sleep(0.02)


_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_BY_SIGNAL = 128  # shells report signal N as exit status 128 + N


def main() -> int:
    """Run the guard, and return the exit status of COMMAND."""
    _, parent, *command = sys.argv
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
        time.sleep(0.05)
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
    sys.exit(main())
