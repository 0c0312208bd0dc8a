"""Kill the process at a system call on the run's checkpoints, or count these calls.

The functions of `os` stay wrapped for the life of the process, so a trap is set in a process forked for one life."""

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRITES = ("write", "writev", "pwrite", "pwritev")
"""Calls that can be interrupted halfway."""
ON_DESCRIPTORS = (*WRITES, "fsync", "fdatasync", "ftruncate", "posix_fallocate")
"""Calls with an open file as first argument."""
ON_PATHS = ("open", "rename", "replace", "link", "symlink", "unlink", "remove", "rmdir", "mkdir", "truncate")
"""Calls with a path as first argument."""
LOAD = "load"
"""Opening a file of a checkpoint for reading."""
REMOVAL = "removal"
"""Unlinking a file of a checkpoint; `unlink` is any other."""
OF_A_CHECKPOINT = ("manifest.json", ".safetensors")


@dataclass(frozen=True)
class Point:
    """A point in the life of one rank: `where` (before, inside, after) its `count`-th (from 1) call of a kind."""

    call: str
    where: str
    count: int

    def __str__(self) -> str:
        return f"{self.where} {self.call} {self.count}"


class Trap:
    """Counts the calls of each kind below a folder, and kills the process at one of them.

    Args:
        folder: absolute; other calls are ignored.
        point: where to kill; None: only count.
        note: descriptor of a file outside `folder`; gets the counts and finally the reached point."""

    def __init__(self, folder: Path, point: Point | None, note: int) -> None:
        self.folder, self.point, self.note = str(folder), point, note
        self.counts: Counter[str] = Counter()
        self.lock = threading.Lock()

    def set(self) -> None:
        """Watch this process from here on."""
        for name in (*ON_DESCRIPTORS, *ON_PATHS):
            setattr(os, name, self._around(name, getattr(os, name)))
        sys.addaudithook(self._heard)

    def _around(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_ours(name, args, kwargs):
                return real(*args, **kwargs)
            is_removal = name == "unlink" and os.fsdecode(args[0]).endswith(OF_A_CHECKPOINT)
            kind = REMOVAL if is_removal else name
            where = self._arrived(kind)
            if where == "before":
                self._spring(kind, where)
            if where == "inside":
                _write_half(name, real, args)
                self._spring(kind, where)
            try:
                return real(*args, **kwargs)
            finally:  # also after a failed call, such as removing a missing file
                if where == "after":
                    self._spring(kind, where)

        return call

    def _is_ours(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if name in ON_DESCRIPTORS:
            descriptor = args[0]
            if descriptor == self.note or not isinstance(descriptor, int):
                return False
            return self._is_below(f"/proc/self/fd/{descriptor}", is_link=True)
        if name == "open" and not (kwargs["flags"] if len(args) < 2 else args[1]) & os.O_CREAT:
            return False
        if isinstance(args[0], int):
            return self._is_below(f"/proc/self/fd/{args[0]}", is_link=True)
        base = kwargs.get("dir_fd")
        path = os.fsdecode(args[0])
        if base is not None:
            path = str(Path(f"/proc/self/fd/{base}").readlink() / path)
        return self._is_below(path)

    def _is_below(self, path: str, *, is_link: bool = False) -> bool:
        try:
            path = str(Path(path).readlink()) if is_link else path
        except OSError:
            return False
        return path.startswith(self.folder + "/")

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        path = os.fsdecode(args[0])
        is_file = path.endswith(OF_A_CHECKPOINT)
        # The last argument has the flags of open(2) in all of Python's functions.
        if is_file and args[2] & os.O_ACCMODE == os.O_RDONLY and self._is_below(path):
            if "/.tmp-" in path:
                return  # a save reads what it has written
            if self._arrived(LOAD) is not None:
                self._spring(LOAD, "before")

    def _arrived(self, name: str) -> str | None:
        """Count a call; if it is the point and can be interrupted, do so."""
        with self.lock:
            self.counts[name] += 1
            self._tell()
            point = self.point
            return point.where if point and (point.call, point.count) == (name, self.counts[name]) else None

    def _tell(self, died: str = "") -> None:
        os.pwrite(self.note, json.dumps({"counts": self.counts, "died": died}).encode(), 0)

    def _spring(self, name: str, where: str) -> None:
        with self.lock:
            self._tell(died=f"{where} {name}")
        os.kill(os.getpid(), signal.SIGKILL)


def _write_half(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> None:
    descriptor, data, *rest = args
    if name in ("writev", "pwritev"):
        data = [b"".join(bytes(part) for part in data)]
        half: Any = [data[0][: len(data[0]) // 2]]
    else:
        half = bytes(data)[: len(bytes(data)) // 2]
    real(descriptor, half, *rest)
