"""What the kernel says of a process of this host."""

import platform
from pathlib import Path

STOPPED, TRACED, GONE, RUNNING = "stopped", "traced", "gone", "running"


def _fields(pid: int) -> list[str] | None:
    """What stands behind the name in /proc/PID/stat; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def start_time(pid: int) -> int | None:
    """When the process was started, in ticks since the host was: with it a process id is never taken for another's."""
    fields = _fields(pid)
    return None if fields is None else int(fields[19])


def state(pid: int, started: int) -> str:
    """Whether the process runs (or sleeps), is stopped, is held by a debugger, or is gone."""
    fields = _fields(pid)
    if fields is None or int(fields[19]) != started:
        return GONE
    return {"T": STOPPED, "t": TRACED, "Z": GONE, "X": GONE}.get(fields[0], RUNNING)


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
