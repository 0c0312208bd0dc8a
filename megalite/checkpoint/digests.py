"""Compute and compare the hashes of a checkpoint's files on several threads (hashlib releases the GIL)."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megalite.checkpoint.files import THREADS, BackgroundWork, advise, file_length, open_plain
from megalite.checkpoint.manifest import FileEntry
from megalite.config.errors import CheckpointError

BLOCK = 8 << 20
"""Bytes of a file block; blocks are hashed separately and in parallel."""
_PIECE = 256 << 10
"""Bytes read and hashed at once; small enough to stay in the CPU cache."""


def entry_fault(path: Path, entry: FileEntry, *, from_disk: bool = False) -> str | None:
    """Read a file and return how it differs from its manifest entry, or None if it does not.

    Args:
        from_disk: drop the file, which must be synced, from the page cache first, so that the read comes from the disk.
    """
    try:
        length = file_length(path)
        if length != entry.length:
            return f"{path.name}: {length} bytes long, the manifest says {entry.length}"
        with os.fdopen(open_plain(path), "rb", buffering=0) as file:
            if from_disk:
                advise(file.fileno(), 0, length, "POSIX_FADV_DONTNEED")
            if entry.block:
                digest = _hash_of_blocks(file.fileno(), length, entry.block)
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
