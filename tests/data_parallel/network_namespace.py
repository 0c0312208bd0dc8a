"""Give a process a separate network that carries only its children's loopback traffic, to count the bytes."""

import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 0x1


def enter() -> str | None:
    """Move this single-threaded process into a new network with `lo` up; return the reason if that failed."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no user namespace, and may not be allowed to create one.
    if libc.unshare(_NEW_NETWORK) != 0 and libc.unshare(_NEW_USER | _NEW_NETWORK) != 0:
        return f"no network namespace can be made here: {os.strerror(ctypes.get_errno())}"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("16sH14x", b"lo", 0)
            (flags,) = struct.unpack_from("16xH", fcntl.ioctl(any_socket, _GET_FLAGS, request))
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
        except OSError as error:
            return f"lo does not come up in a network namespace: {error.strerror}"
    return None


def bytes_sent() -> int:
    """Return the bytes that `lo` has sent since it came up, including headers."""
    table = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in table if line.strip().startswith("lo:")]
    return int(line.split(":")[1].split()[8])
