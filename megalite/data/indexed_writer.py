"""Write token files in Megatron-LM's format (layout in `indexed_dataset`), all or nothing, in little memory."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import sync_folder
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION

LENGTH = np.dtype("<i4")
"""Type of a document's length on disk, in the index and before there is one."""
_BUFFER = 1 << 20
_BLOCK = 1 << 20


def stored_dtype(dtype: np.dtype | type, name: str) -> np.dtype:
    """The little-endian type that tokens of `dtype` are stored in.

    Raises:
        ConfigError: the format has no code for it; names `name`.
    """
    stored = np.dtype(dtype).newbyteorder("<")
    if stored not in TOKEN_DTYPES.values():
        names = ", ".join(known.name for known in TOKEN_DTYPES.values())
        raise ConfigError(f"{name}: tokens of type {stored.name} cannot be stored; use one of {names}")
    return stored


class TokenCounts:
    """What the bytes written so far amount to: counts and digests that go on from where they are."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.tokens = self.documents = self.sequences = 0
        """Sequences are the documents that hold tokens."""
        self.bin_sha256, self.lengths_sha256 = hashlib.sha256(), hashlib.sha256()

    def add_tokens(self, data: memoryview) -> None:
        """Count the bytes of tokens."""
        self.bin_sha256.update(data)
        self.tokens += len(data) // self.dtype.itemsize

    def add_lengths(self, lengths: NDArray) -> None:
        """Count documents; lengths are of type LENGTH."""
        self.lengths_sha256.update(lengths.data)
        self.documents += len(lengths)
        self.sequences += int(np.count_nonzero(lengths))


class TokenStream:
    """Two files that grow together: the tokens of documents (a .bin) and the length of each document, int32.

    So no length is kept in memory; `write_index` makes the .idx of them in the end.

    Args:
        bin_path: file that tokens are appended to; made if need be.
        lengths_path: file that lengths are appended to.
        counts: what the files hold already.
        name: what errors call it.
    """

    def __init__(self, bin_path: Path, lengths_path: Path, counts: TokenCounts, *, name: str) -> None:
        self.counts, self.name = counts, name
        self.lengths_path = lengths_path
        self._bin = bin_path.open("ab", buffering=_BUFFER)
        try:
            self._lengths = lengths_path.open("ab", buffering=_BUFFER)
        except BaseException:
            self._bin.close()
            raise

    def append(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        """Append documents whose tokens lie one after another in `tokens` `[sum(lengths)]`.

        Raises:
            ConfigError: an id does not fit the type of the file, or a document is too long for the format.
        """
        dtype = self.counts.dtype
        sizes = np.asarray(lengths, dtype=np.int64)
        assert int(sizes.sum()) == len(tokens), (int(sizes.sum()), len(tokens))
        if tokens.dtype != dtype and len(tokens):
            low, high = int(tokens.min()), int(tokens.max())
            limits = np.iinfo(dtype)
            if low < 0 or high > limits.max:
                raise ConfigError(
                    f"{self.name}: token id {low if low < 0 else high} does not fit {dtype.name} "
                    f"(0 to {limits.max}); give the writer token_dtype(vocab_size)"
                )
        longest = np.iinfo(LENGTH).max
        if len(sizes) and int(sizes.max()) > longest:
            raise ConfigError(
                f"{self.name}: a document of {int(sizes.max())} tokens; the format holds at most {longest}: split it"
            )
        data = np.ascontiguousarray(tokens, dtype=dtype).view(np.uint8).data
        stored = sizes.astype(LENGTH)
        self._bin.write(data)
        self._lengths.write(stored.data)
        self.counts.add_tokens(data)
        self.counts.add_lengths(stored)

    def flush(self) -> None:
        """Hand everything to the system."""
        self._bin.flush()
        self._lengths.flush()

    def sync(self) -> None:
        """Put what was flushed on the disk."""
        os.fsync(self._lengths.fileno())
        os.fsync(self._bin.fileno())

    def close(self) -> None:
        """Let go of the files; what could not be written on a full disk is dropped."""
        for file in (self._bin, self._lengths):
            with contextlib.suppress(OSError):
                file.close()


def write_index(path: Path, lengths_path: Path, counts: TokenCounts) -> tuple[int, str]:
    """Make the .idx of documents whose lengths are in a file, a block at a time; returns its bytes and sha256.

    The file is new, and on the disk when this returns.

    Raises:
        ConfigError: the lengths are not those that were counted.
    """
    code = next(code for code, dtype in TOKEN_DTYPES.items() if dtype == counts.dtype)
    digest = hashlib.sha256()
    seen = [0, 0, 0]
    with path.open("xb", buffering=_BUFFER) as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        put(HEADER.pack(MAGIC, VERSION, code, counts.sequences, counts.documents + 1))
        for lengths in _blocks(lengths_path):
            put(lengths[lengths != 0].data)
            seen[0] += len(lengths)
        for lengths in _blocks(lengths_path):
            sizes = lengths[lengths != 0].astype("<i8")
            ends = seen[1] + np.cumsum(sizes, dtype="<i8")
            put(((ends - sizes) * counts.dtype.itemsize).data)
            seen[1] += int(sizes.sum())
        put(np.zeros(1, dtype="<i8").data)
        for lengths in _blocks(lengths_path):
            indices = seen[2] + np.cumsum(lengths != 0, dtype="<i8")
            put(indices.data)
            seen[2] = int(indices[-1])
        if seen != [counts.documents, counts.tokens, counts.sequences]:
            raise ConfigError(
                f"{lengths_path}: holds {seen[0]} documents of {seen[1]} tokens, "
                f"{counts.documents} of {counts.tokens} were written; another program has changed it: start again"
            )
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def _blocks(lengths_path: Path) -> Iterator[NDArray]:
    with lengths_path.open("rb") as file:
        while data := file.read(_BLOCK * LENGTH.itemsize):
            yield np.frombuffer(data[: len(data) // LENGTH.itemsize * LENGTH.itemsize], dtype=LENGTH)


class IndexedDatasetWriter:
    """Appends documents to `<prefix>.bin` and `<prefix>.idx`; each document is one sequence.

    Both files are written under temporary names in the same folder, and the length of each document goes to a third
    beside them: memory does not grow with the number of documents. `finish()` flushes them to disk and renames
    `.bin`, then `.idx`, so that an `.idx` never stands beside a `.bin` that it does not describe. As a context
    manager it finishes at the end of the block, and leaves nothing behind if the block raises.

    Args:
        prefix: path without `.bin` and `.idx`; its folder is made if need be.
        dtype: type of the stored ids, as `token_dtype(vocab_size)` gives it.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = stored_dtype(dtype, self.prefix)
        Path(f"{prefix}.bin").parent.mkdir(parents=True, exist_ok=True)
        unique = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._partial = {
            suffix: Path(f"{prefix}{suffix}.{unique}") for suffix in (".bin", ".idx", ".lengths")
        }
        self._counts = TokenCounts(self.dtype)
        self._stream = TokenStream(
            self._partial[".bin"], self._partial[".lengths"], self._counts, name=self.prefix
        )

    @property
    def num_tokens(self) -> int:
        """Tokens added."""
        return self._counts.tokens

    @property
    def num_documents(self) -> int:
        """Documents added."""
        return self._counts.documents

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes that .bin holds so far."""
        return self._counts.bin_sha256.hexdigest()

    def add_document(self, tokens: Sequence[int] | NDArray) -> None:
        """Append one document; an empty one is a document without a sequence, as in Megatron's files."""
        ids = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens, dtype=np.int64)
        self.add_documents(ids, [len(ids)])

    def add_documents(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        """Append several documents whose tokens lie one after another in `tokens` `[sum(lengths)]`.

        Raises:
            ConfigError: an id does not fit the dtype, or a document is too long for the format.
        """
        self._stream.append(tokens, lengths)

    def finish(self) -> None:
        """Write the index, flush both files to disk and give them their names."""
        self._stream.flush()
        write_index(self._partial[".idx"], self._partial[".lengths"], self._counts)
        self._stream.sync()
        self._stream.close()
        self._partial[".lengths"].unlink()
        # The old index goes first: killed between the two renames, we leave no index rather than a wrong one.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            self._partial[suffix].replace(f"{self.prefix}{suffix}")
        sync_folder(Path(f"{self.prefix}.bin").parent)

    def abandon(self) -> None:
        """Drop what was written; earlier files of the same name stay as they were."""
        self._stream.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise
