"""Write token files in Megatron-LM's format (layout in `indexed_dataset`), all or nothing, in little memory."""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import sync_folder
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION

LENGTH = np.dtype("<i4")
"""Type of a document's length on disk, in the index and before there is one."""
_BUFFER = 1 << 20
_BLOCK = 1 << 20

Blocks = Callable[[], Iterator[NDArray]]
"""An array, block after block, as often as it is called."""


class TokenCounts:
    """What the bytes written so far amount to: counts and running digests."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.tokens = self.documents = self.sequences = 0
        """Sequences are the documents that hold tokens."""
        self.bin_sha256, self.lengths_sha256 = hashlib.sha256(), hashlib.sha256()

    def add_tokens(self, data: memoryview) -> None:
        self.bin_sha256.update(data)
        self.tokens += len(data) // self.dtype.itemsize

    def add_lengths(self, lengths: NDArray) -> None:
        """Count documents; lengths are of type LENGTH."""
        self.lengths_sha256.update(lengths.data)
        self.documents += len(lengths)
        self.sequences += int(np.count_nonzero(lengths))


class TokenStream:
    """Two files that grow together: the tokens of documents (a .bin) and the length of each document, int32.

    So no length is kept in memory; `write_lengths_index` makes the .idx of them in the end.

    Args:
        counts: what the files hold already.
        name: what errors call it.
    """

    def __init__(self, bin_path: Path, lengths_path: Path, counts: TokenCounts, *, name: str) -> None:
        self.counts, self.name = counts, name
        with contextlib.ExitStack() as stack:
            self._bin = stack.enter_context(bin_path.open("ab", buffering=_BUFFER))
            self._lengths = stack.enter_context(lengths_path.open("ab", buffering=_BUFFER))
            stack.pop_all()

    def append(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        """Append documents, their tokens one after another in `tokens` `[sum(lengths)]`.

        Raises:
            ConfigError: an id does not fit the type of the file, or a document is too long for the format.
        """
        dtype = self.counts.dtype
        sizes = np.asarray(lengths, dtype=np.int64)
        assert int(sizes.sum()) == len(tokens), (int(sizes.sum()), len(tokens))
        if tokens.dtype != dtype:
            require_fit(self.name, tokens, dtype, "give the writer token_dtype(vocab_size)")
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
        self._bin.flush()
        self._lengths.flush()

    def sync(self) -> None:
        """Put what was flushed on the disk."""
        os.fsync(self._lengths.fileno())
        os.fsync(self._bin.fileno())

    def close(self) -> None:
        """Close the files; what a full disk has no room for is dropped."""
        for file in (self._bin, self._lengths):
            with contextlib.suppress(OSError):
                file.close()


def require_fit(name: str, tokens: NDArray, dtype: np.dtype, remedy: str) -> None:
    """Raise a ConfigError if a token id does not fit `dtype`."""
    if not len(tokens):
        return
    low, high, limits = int(tokens.min()), int(tokens.max()), np.iinfo(dtype)
    if low < limits.min or high > limits.max:
        raise ConfigError(
            f"{name}: token id {low if low < limits.min else high} does not fit {dtype.name} ({limits.min} to "
            f"{limits.max}); {remedy}"
        )


def write_index(
    path: Path, dtype: np.dtype, *, sequences: int, documents: int, tokens: int, sizes: Blocks, ends: Blocks
) -> tuple[int, str]:
    """Write a new .idx, a block at a time, and put it on the disk; returns its bytes and sha256.

    Args:
        sizes: tokens of each sequence `[sequences]`.
        ends: for each document, the sequences up to and with its last one `[documents]`.

    Raises:
        ConfigError: the blocks are not as many and as long as stated.
    """
    code = next(code for code, known in TOKEN_DTYPES.items() if known == dtype)
    digest = hashlib.sha256()
    with path.open("xb", buffering=_BUFFER) as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        put(HEADER.pack(MAGIC, VERSION, code, sequences, documents + 1))
        for block in sizes():
            put(block.astype("<i4").data)
        total = 0
        for block in sizes():
            stops = total + np.cumsum(block, dtype="<i8")
            put(((stops - block) * dtype.itemsize).astype("<i8").data)
            total = int(stops[-1]) if len(stops) else total
        put(bytes(8))
        for block in ends():
            put(block.astype("<i8").data)
        if (total, file.tell()) != (tokens, HEADER.size + 12 * sequences + 8 * (documents + 1)):
            raise ConfigError(
                f"{path}: {tokens} tokens in {documents} documents were written, and their lengths sum to {total}; "
                "another program has changed the files: start again"
            )
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def write_lengths_index(path: Path, lengths_path: Path, counts: TokenCounts) -> tuple[int, str]:
    """`write_index` of documents, their lengths in a file; each with tokens is one sequence."""

    def blocks() -> Iterator[NDArray]:
        with lengths_path.open("rb") as file:
            while data := file.read(_BLOCK * LENGTH.itemsize):
                yield np.frombuffer(data[: len(data) // LENGTH.itemsize * LENGTH.itemsize], dtype=LENGTH)

    def ends() -> Iterator[NDArray]:
        before = 0
        for lengths in blocks():
            stops = before + np.cumsum(lengths != 0, dtype="<i8")
            yield stops
            before = int(stops[-1])

    return write_index(
        path,
        counts.dtype,
        sequences=counts.sequences,
        documents=counts.documents,
        tokens=counts.tokens,
        sizes=lambda: (lengths[lengths != 0] for lengths in blocks()),
        ends=ends,
    )


class IndexedDatasetWriter:
    """Appends documents to `<prefix>.bin` and `<prefix>.idx`; each document is one sequence.

    Both files are written under temporary names in the same folder, and the length of each document to a third: memory
    does not grow with the number of documents. `finish()` puts them on the disk and renames `.bin`, then `.idx`, so
    that an `.idx` never stands beside a `.bin` that it does not describe. As a context manager it finishes at the end
    of the block, and leaves nothing behind if the block raises.

    Args:
        prefix: path without `.bin` and `.idx`; its folder is made if need be.
        dtype: type of the stored ids, as `token_dtype(vocab_size)` gives it.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix, self.dtype = str(prefix), np.dtype(dtype).newbyteorder("<")
        if self.dtype not in TOKEN_DTYPES.values():
            names = ", ".join(known.name for known in TOKEN_DTYPES.values())
            raise ConfigError(f"{prefix}: tokens of type {self.dtype.name} cannot be stored; use one of {names}")
        self._folder = Path(f"{prefix}.bin").parent
        self._folder.mkdir(parents=True, exist_ok=True)
        unique = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._partial = {suffix: Path(f"{prefix}{suffix}.{unique}") for suffix in (".bin", ".idx", ".lengths")}
        self._counts = TokenCounts(self.dtype)
        self._stream = TokenStream(self._partial[".bin"], self._partial[".lengths"], self._counts, name=self.prefix)

    @property
    def num_tokens(self) -> int:
        return self._counts.tokens

    @property
    def num_documents(self) -> int:
        return self._counts.documents

    def add_document(self, tokens: Sequence[int] | NDArray) -> None:
        """Append one document; an empty one is a document without a sequence, as in Megatron's files."""
        ids = tokens if isinstance(tokens, np.ndarray) else np.asarray(tokens, dtype=np.int64)
        self.add_documents(ids, [len(ids)])

    def add_documents(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        self._stream.append(tokens, lengths)

    def finish(self) -> None:
        """Write the index, put both files on the disk and give them their names."""
        self._stream.flush()
        write_lengths_index(self._partial[".idx"], self._partial[".lengths"], self._counts)
        self._stream.sync()
        self._stream.close()
        self._partial[".lengths"].unlink()
        # The old index goes first: killed between the two renames, we leave no index rather than a wrong one.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            self._partial[suffix].replace(f"{self.prefix}{suffix}")
        sync_folder(self._folder)

    def abandon(self) -> None:
        """Drop what was written; earlier files of the same name stay as they were."""
        self._stream.close()
        for path in self._partial.values():
            path.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedDatasetWriter":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if error[0] is None:
                self.finish()
        finally:
            self.abandon()
