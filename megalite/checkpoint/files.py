"""Write files durably (synced to the disk before the function returns), read only regular files, and compare their hashes.

Hashes are computed on several threads (hashlib releases the GIL)."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from megalite.config.errors import CheckpointError

T = TypeVar("T")

CHUNK = 8 << 20
"""Bytes written at once."""

THREADS = min(4, os.cpu_count() or 1)
"""Number of threads that read, hash or copy in parallel."""

MAX_TEXT = 1 << 30
"""Maximum bytes of a manifest. A sparse file can claim any size."""


class BackgroundWork(Generic[T]):
    """Run work on `threads` background threads, with at most `most` pending items."""

    def __init__(self, threads: int, most: int) -> None:
        self._pool, self._most = ThreadPoolExecutor(threads), most
        self._waiting: deque[Future[T]] = deque()
        self._results: list[T] = []

    def run(self, work: Callable[..., T], *arguments: object) -> None:
        """Submit `work`, after waiting until fewer than `most` items are pending. Re-raise errors of earlier work."""
        if len(self._waiting) == self._most:
            self._results.append(self._waiting.popleft().result())
        self._waiting.append(self._pool.submit(work, *arguments))

    def results(self) -> list[T]:
        """Wait for all work and return its results in the order of submission."""
        while self._waiting:
            self._results.append(self._waiting.popleft().result())
        return self._results

    def close(self) -> None:
        """Cancel pending work and stop the threads. May be called several times."""
        self._pool.shutdown(cancel_futures=True)


def run_in_daemon(work: Callable[[], T], name: str) -> Future[T]:
    """Run `work` on a thread that is a daemon (an executor's is not), so the process can exit before it ends."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def create(path: Path) -> int:
    """Create a file and open it for writing. Raise FileExistsError if the path exists, also as a link."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)


def write_all(descriptor: int, data: memoryview) -> None:
    """Write all bytes; a single `os.write` may write fewer."""
    while data:
        data = data[os.write(descriptor, data[:CHUNK]) :]


def write_at(path: Path, descriptor: int, data: memoryview, start: int) -> None:
    """Write all bytes at offset `start`. Start writeback of each whole `CHUNK`, which shortens the later `fsync`."""
    try:
        os.lseek(descriptor, start, os.SEEK_SET)
        write_all(descriptor, data)
    except OSError as error:
        raise with_path(error, path) from None
    first, last = start // CHUNK * CHUNK, (start + len(data)) // CHUNK * CHUNK
    advise(descriptor, first, last - first, "POSIX_FADV_DONTNEED")  # dirty pages stay in memory


def advise(descriptor: int, start: int, length: int, advice: str) -> None:
    """Call `os.posix_fadvise` if the system has it (macOS does not)."""
    if length > 0 and hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, length, getattr(os, advice))


def write_durably(path: Path, data: bytes) -> None:
    """Create a file and sync its content to the disk."""
    descriptor = create(path)
    try:
        write_at(path, descriptor, memoryview(data), 0)
        sync_file(path, descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path, descriptor: int) -> None:
    """Sync the content of an open file to the disk."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise with_path(error, path) from None


def with_path(error: OSError, path: Path) -> OSError:
    """Return the error with the file's name, which errors on open descriptors lack."""
    return OSError(error.errno, error.strerror, str(path))


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a file's content atomically: after a crash it has either the old or the new content."""
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
    """Sync a folder's entries (files created, renamed or removed) to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder and its content, a file or a link (never the target of a link)."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def open_plain(path: Path) -> int:
    file_length(path)
    try:
        # If the path has been replaced in the meantime, do not follow a link or block on a pipe.
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
    """Lock a folder until the returned descriptor is closed or the process ends.

    Returns:
        The descriptor, or None on a file system without locks.

    Raises:
        BlockingIOError: another process holds the lock."""
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
    """Return the path that prevents creating files in `folder`, which may not exist yet, and the reason; else None."""
    nearest = Path(os.path.abspath(folder))  # noqa: PTH100 resolve() fails on a loop of links
    while not os.path.lexists(nearest):
        nearest = nearest.parent
    if not nearest.is_dir():
        return nearest, os.strerror(errno.ENOTDIR)
    if os.access(nearest, os.W_OK | os.X_OK):
        return None
    return nearest, os.strerror(errno.EROFS if os.statvfs(nearest).f_flag & os.ST_RDONLY else errno.EACCES)


def free_bytes(folder: Path) -> int:
    """Return the free bytes on the disk of `folder` or, if it does not exist, of its nearest existing parent."""
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(place).free
    return 0


BLOCK = 8 << 20
"""Bytes of a file block; blocks are hashed separately and in parallel."""
_PIECE = 256 << 10
"""Bytes read and hashed at once; small enough to stay in the CPU cache."""


@dataclass(frozen=True)
class FileEntry:
    """Length in bytes and hash of a file, in hexadecimal. The hash is the sha256 of the concatenated sha256 digests of
    the file's blocks of `block` bytes. If `block` is 0 or the file has only one block, it is the sha256 of the file."""

    length: int
    sha256: str
    block: int = 0


def length_fault(path: Path, entry: FileEntry) -> str | None:
    """Return how the length of a file differs from its manifest entry, or None if it does not."""
    try:
        length = file_length(path)
    except CheckpointError as error:
        return str(error)
    return None if length == entry.length else f"{path.name}: {length} bytes long, the manifest says {entry.length}"


def entry_fault(path: Path, entry: FileEntry, *, from_disk: bool = False) -> str | None:
    """Read a file and return how it differs from its manifest entry, or None if it does not.

    Args:
        from_disk: drop the file, which must be synced, from the page cache first, so that the read comes from the disk.
    """
    if (fault := length_fault(path, entry)) is not None:
        return fault
    try:
        with os.fdopen(open_plain(path), "rb", buffering=0) as file:
            if from_disk:
                advise(file.fileno(), 0, entry.length, "POSIX_FADV_DONTNEED")
            if entry.block:
                digest = _hash_of_blocks(file.fileno(), entry.length, entry.block)
            else:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{path.name}: {error.strerror}"
    if digest != entry.sha256:
        return f"{path.name}: sha256 is {digest[:12]}..., the manifest says {entry.sha256[:12]}..."
    return None


class RunningDigest:
    """Compute the hash of a `FileEntry` incrementally from the bytes passed to `update`, on background threads."""

    def __init__(self, block: int = BLOCK) -> None:
        self._behind = BackgroundWork[bytes](THREADS, THREADS)
        self._open: list[memoryview] = []
        self._left = self._block = block

    def update(self, chunk: bytes | memoryview) -> None:
        """Add bytes. They must not change before `hexdigest` returns, because a few blocks are queued for hashing."""
        view = memoryview(chunk)
        while view:
            self._open.append(view[: self._left])
            self._left -= len(self._open[-1])
            view = view[len(self._open[-1]) :]
            if not self._left:
                self._hash()

    def hexdigest(self) -> str:
        """Return the hash in hexadecimal and stop the threads."""
        if self._open:
            self._hash()
        digests = self._behind.results()
        self.close()
        return _joined(digests)

    def close(self) -> None:
        """Stop the threads. May be called several times."""
        self._behind.close()

    def _hash(self) -> None:
        self._behind.run(_sha256_of, self._open)
        self._open, self._left = [], self._block


def _sha256_of(parts: list[memoryview]) -> bytes:
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(part)
    parts.clear()  # release the tensors that own the memory
    return sha256.digest()


def _joined(digests: list[bytes]) -> str:
    """Return a file's hash, computed from the digests of its blocks."""
    return digests[0].hex() if len(digests) == 1 else hashlib.sha256(b"".join(digests)).hexdigest()


def _hash_of_blocks(descriptor: int, length: int, block: int) -> str:
    def of_block(start: int) -> bytes:
        sha256, buffer = hashlib.sha256(), memoryview(bytearray(_PIECE))
        place, stop = start, min(start + block, length)
        ahead = start + THREADS * block  # prefetched while the blocks before it are hashed
        advise(descriptor, ahead, min(block, length - ahead), "POSIX_FADV_WILLNEED")
        while place < stop and (count := os.preadv(descriptor, [buffer[: stop - place]], place)):
            sha256.update(buffer[:count])
            place += count
        return sha256.digest()

    with ThreadPoolExecutor(THREADS) as pool:
        return _joined(list(pool.map(of_block, range(0, length, block))))
