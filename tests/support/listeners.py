"""Listening sockets of processes, read from /proc."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
_READS = 3


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket."""

    process: int
    command: str
    address: str
    """Hexadecimal, as in /proc."""
    port: int

    @property
    def on_all_addresses(self) -> bool:
        """Whether the socket accepts connections on every address of the host."""
        return int(self.address, 16) == 0


def listening_here() -> set[str]:
    """Inodes of the listening sockets of this process, by asking each socket."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        name = _target(entry)
        if name.startswith("socket:"):
            try:
                with socket.socket(fileno=os.dup(int(entry.name))) as own:
                    if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found.add(name)
            except OSError:  # closed in the meantime
                continue
    return found


def listeners(root: int) -> list[Listener]:
    """Listening sockets of a process and its descendants."""
    ports: dict[str, tuple[str, int]] = {}
    # Linux returns a table page by page: a read may miss sockets while other processes open and close some.
    for table in ("tcp", "tcp6") * _READS:
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING:
                address, port = words[1].split(":")
                ports[words[9]] = (address, int(port, 16))
    found = []
    for pid in sorted(descendants(root)):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            entries = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # the process has ended
            continue
        inodes = [match[1] for entry in entries if (match := re.fullmatch(r"socket:\[(\d+)\]", _target(entry)))]
        found += [Listener(pid, command, *ports[inode]) for inode in inodes if inode in ports]
    return found


def _target(entry: Path) -> str:
    try:
        return str(entry.readlink())
    except OSError:  # closed in the meantime, as the descriptor of the listing itself
        return ""


def descendants(root: int) -> set[int]:
    """A process and its descendants."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
