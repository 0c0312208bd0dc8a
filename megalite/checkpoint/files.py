"""Files that are on the disk when a function returns, and reads that refuse anything but a plain file."""

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from megalite.config.errors import CheckpointError

T = TypeVar("T")

CHUNK = 8 << 20
"""Bytes a write or a hash takes at once: small enough that hashing finds them in the processor's cache."""

THREADS = min(4, os.cpu_count() or 1)  # that read, hash or copy at once

MAX_TEXT = 1 << 30
"""Bytes of a manifest: a sparse file could say that it has any number."""


class BackgroundWork(Generic[T]):
    """Work on data that is done on `threads` further threads, while the caller makes the next; of it `most` wait."""

    def __init__(self, threads: int, most: int) -> None:
        self._pool, self._most = ThreadPoolExecutor(threads), most
        self._waiting: deque[Future[T]] = deque()
        self._results: list[T] = []

    def run(self, work: Callable[..., T], *given: object) -> None:
        """Begin it, once fewer than `most` wait. Raises what earlier work raised."""
        if len(self._waiting) == self._most:
            self._results.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(work, *given))

    def results(self) -> list[T]:
        """Wait for all of it; what it returned, in the order in which it was begun."""
        while self._waiting:
            self._results.append(self._waiting.popleft().result())
        return self._results

    def close(self) -> None:
        """End the threads; what waits is not begun. Again is harmless."""
        self._pool.shutdown(cancel_futures=True)


def create(path: Path) -> int:
    """Open a new file for writing; one that is there already, a link among them, is an error."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte; the system may take fewer than it is offered."""
    while data:
        data = data[os.write(descriptor, data[:CHUNK]) :]


def write_at(path: Path, descriptor: int, data: memoryview, start: int) -> None:
    """`write_all` at a place of a file. The disk begins at once with every whole `CHUNK`: `fsync` has less to wait for."""
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        write_all(descriptor, data)
    except OSError as error:
        raise named(error, path) from None
    first, last = start // CHUNK * CHUNK, (start + len(data)) // CHUNK * CHUNK
    advise(descriptor, first, last - first, "POSIX_FADV_DONTNEED")  # what is not on the disk yet stays in memory


def advise(descriptor: int, start: int, length: int, advice: str) -> None:
    """Tell the system what will be needed of a file, where it takes advice (macOS does not)."""
    if length > 0 and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, getattr(os, advice))


def write_durably(path: Path, data: bytes) -> None:
    """Create a file, with its content on the disk."""
    descriptor = create(path)
    try:
        write_at(path, descriptor, memoryview(data), 0)
        sync_file(path, descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path, descriptor: int) -> None:
    """Put the content of an open file on the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise named(error, path) from None


def named(error: OSError, path: Path) -> OSError:
    """The error with the file's name: the system gives none for an open file."""
    return OSError(error.errno, error.strerror, str(path))


def replace_durably(path: Path, data: bytes) -> None:
    """Give a file new content so that at every instant, even across a crash, it has the old one or the new one."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    try:
        write_durably(beside, data)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    beside.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Put the names in a folder (what was created, renamed or removed there) on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder with all in it, or a link (never what it points to)."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def open_plain(path: Path) -> int:
    file_length(path)
    try:
        # Should it have become something else meanwhile: no link is followed, no pipe waited for.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None


def file_length(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path.name}: not a plain file")
    return status.st_size


def read_text(path: Path) -> str:
    length = file_length(path)
    if length > MAX_TEXT:
        raise CheckpointError(f"{path.name}: {length} bytes long; what can be read has at most {MAX_TEXT}")
    try:
        with open(open_plain(path), encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise CheckpointError(f"{path.name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path.name}: {error}") from None


def lock_folder(folder: Path) -> int | None:
    """Keep a folder for this process until the descriptor is closed, or the process ends in whatever way.

    Returns:
        The descriptor; None on a file system that cannot do it.

    Raises:
        BlockingIOError: another process has it.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def not_writable(folder: Path) -> tuple[Path, str] | None:
    """What keeps a file from being made in a folder that may not exist yet, and why; None: nothing that can be seen."""
    there = Path(os.path.abspath(folder))  # noqa: PTH100 resolve() would fail where there is a loop of links
    while not os.path.lexists(there):
        there = there.parent
    if not there.is_dir():
        return there, os.strerror(errno.ENOTDIR)
    if os.access(there, os.W_OK | os.X_OK):
        return None
    return there, os.strerror(errno.EROFS if os.statvfs(there).f_flag & os.ST_RDONLY else errno.EACCES)


def free_bytes(folder: Path) -> int:
    """Free bytes on the disk that holds `folder` (or, before it exists, its nearest parent that answers)."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0
