"""What the kernel says of a process of this host, and how one is signalled."""

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

from megalite.config.exit_codes import HUNG

STOPPED, TRACED, GONE, RUNNING = "stopped", "traced", "gone", "running"


def stat_fields(pid: int) -> list[str] | None:
    """What stands behind the name in /proc/PID/stat: state, parent, ...; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name, in brackets, may hold anything


def start_time(pid: int) -> int | None:
    """When the process was started, in ticks since the host was: with it a process id is never taken for another's."""
    fields = stat_fields(pid)
    return None if fields is None else int(fields[19])


def started_at(pid: int) -> float | None:
    """Time of day at which the process was started, in seconds since 1970; None where the system does not say it."""
    ticks = start_time(pid)
    if ticks is None:
        return None
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def state(pid: int, started: int) -> str:
    """Whether the process runs (or sleeps), is stopped, is held by a debugger, or is gone."""
    fields = stat_fields(pid)
    if fields is None or int(fields[19]) != started:
        return GONE
    return {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE}.get(fields[0], RUNNING)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_the_kernel(pid: int) -> str:
    """The kernel's function that the process sleeps in, if it says so: a hung disk shows here."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip().strip("0")
    except OSError:
        return ""


def network_key() -> str:
    """The same for two processes exactly if what they send each other crosses no network."""
    try:
        return f"{host_key()} {Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return host_key()


def host_key() -> str:
    """The same for two processes exactly if each can see the other by its process id."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return platform.node()
    return f"{platform.node()} {boot} {space}"


_DUMP = 43
_QUIET_SECONDS = 0.1  # a file of stacks that has not grown for so long is complete


def supported() -> bool:
    """Linux: signals of these numbers, and /proc."""
    return sys.platform == "linux"


class Handlers:
    """This process can be asked for its stacks, and ended. `stacks`: file that gets the stacks; must not exist."""

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

    A process that is stopped is continued for it. `processes`: process id and file of stacks, by rank."""
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
    """End it with status `HUNG`, stopped or not."""
    send(pid, HUNG)
    send(pid, signal.SIGCONT)


def send(pid: int, number: int) -> None:
    """Signal a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
