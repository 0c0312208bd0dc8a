"""Write token files in Megatron-LM's format (see `indexed_dataset`) atomically and with little memory."""

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import sync_folder
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION
from megalite.data.token_files import SUFFIXES

LENGTH = np.dtype("<i4")  # type of a document's length on disk, in .idx and .lengths
_BUFFER = 1 << 20
_BLOCK = 1 << 20

Blocks = Callable[[], Iterator[NDArray]]  # each call yields the blocks of an array from the start


def move_into_place(folder: Path, prefixes: Sequence[str]) -> None:
    """Rename the complete output `folder/NUMBER.bin`, .idx and .json to its prefixes. A second call continues after a
    kill. The .idx and .json of an earlier output are removed before its .bin is replaced, so neither ever exists beside
    a .bin that it does not describe."""
    for number, prefix in enumerate(prefixes):
        for suffix in SUFFIXES:
            made = folder / f"{number}{suffix}"
            if not made.exists():
                continue
            if suffix == ".bin":
                for old in (".json", ".idx"):
                    Path(f"{prefix}{old}").unlink(missing_ok=True)
                sync_folder(Path(f"{prefix}{suffix}").parent)
            made.replace(f"{prefix}{suffix}")
    sync_folder(folder.parent)


@contextlib.contextmanager
def new_files(prefixes: Sequence[str]) -> Iterator[Path]:
    """Create a temporary folder beside the outputs for the files `NUMBER.bin`, .idx and .json of each prefix. At the
    end of the context all files are renamed to their prefixes; if anything raises before, none is."""
    named = {f"{number}{suffix}": f"{prefix}{suffix}" for number, prefix in enumerate(prefixes) for suffix in SUFFIXES}
    home = Path(f"{prefixes[0]}.bin").parent
    with tempfile.TemporaryDirectory(prefix=".new-", dir=home) as place:
        folder = Path(place)
        yield folder
        made = {path.name for path in folder.iterdir()} & named.keys()
        try:
            move_into_place(folder, prefixes)
        except BaseException:
            for name in made - {path.name for path in folder.iterdir()}:
                Path(named[name]).unlink(missing_ok=True)
            raise


class TokenCounts:
    """Counts and running digests of the bytes written so far."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.tokens = self.documents = 0
        self.sequences = 0  # documents with tokens
        self.bin_sha256, self.lengths_sha256 = hashlib.sha256(), hashlib.sha256()

    def add_tokens(self, data: memoryview) -> None:
        self.bin_sha256.update(data)
        self.tokens += len(data) // self.dtype.itemsize

    def add_lengths(self, lengths: NDArray) -> None:
        """Count documents with these lengths, of type LENGTH."""
        self.lengths_sha256.update(lengths.data)
        self.documents += len(lengths)
        self.sequences += int(np.count_nonzero(lengths))


class TokenStream:
    """Appends documents to two files, tokens to `stem.bin` and lengths to `stem.lengths`. No length stays in memory;
    `write_index` converts the lengths to an .idx at the end. `counts`: current contents of the files. `name`: name of
    the output in errors."""

    def __init__(self, stem: Path, counts: TokenCounts, *, name: str) -> None:
        self.stem, self.counts, self.name = stem, counts, name
        with contextlib.ExitStack() as stack:
            self._bin = stack.enter_context(self.path(".bin").open("ab", buffering=_BUFFER))
            self._lengths = stack.enter_context(self.path(".lengths").open("ab", buffering=_BUFFER))
            stack.pop_all()

    def path(self, suffix: str) -> Path:
        return self.stem.with_suffix(suffix)

    def append(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        """Append documents, with their tokens concatenated in `tokens` `[sum(lengths)]`. Raises ConfigError if an id
        does not fit the type of the file, or a document is too long for the format."""
        dtype = self.counts.dtype
        sizes = np.asarray(lengths, dtype=np.int64)
        assert int(sizes.sum()) == len(tokens), (int(sizes.sum()), len(tokens))
        if tokens.dtype != dtype:
            require_fit(self.name, tokens, dtype, "write it with token_dtype(vocab_size)")
        longest = np.iinfo(LENGTH).max
        if len(sizes) and int(sizes.max()) > longest:
            raise ConfigError(
                f"{self.name}: a document has {int(sizes.max())} tokens; the format allows at most {longest}: split it"
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
        """Sync flushed data to disk."""
        os.fsync(self._lengths.fileno())
        os.fsync(self._bin.fileno())

    def close(self) -> None:
        """Close the files, ignoring write errors of a full disk."""
        for file in (self._bin, self._lengths):
            with contextlib.suppress(OSError):
                file.close()

    def write_index(self) -> tuple[int, str]:
        """Write `stem.idx`, with each non-empty document as one sequence. Return its size in bytes and its sha256."""

        def blocks() -> Iterator[NDArray]:
            with self.path(".lengths").open("rb") as file:
                while data := file.read(_BLOCK * LENGTH.itemsize):  # unlike np.fromfile this raises read errors
                    yield np.frombuffer(data[: len(data) // LENGTH.itemsize * LENGTH.itemsize], dtype=LENGTH)

        def ends() -> Iterator[NDArray]:
            before = 0
            for lengths in blocks():
                stops = before + np.cumsum(lengths != 0, dtype="<i8")
                yield stops
                before = int(stops[-1])

        counts = self.counts
        return write_index(
            self.path(".idx"),
            counts.dtype,
            sequences=counts.sequences,
            documents=counts.documents,
            tokens=counts.tokens,
            sizes=lambda: (lengths[lengths != 0] for lengths in blocks()),
            ends=ends,
        )


def require_fit(name: str, tokens: NDArray, dtype: np.dtype, remedy: str) -> None:
    """Raise ConfigError if a token id does not fit `dtype`."""
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
    """Write and sync a new .idx block by block. Return its size in bytes and its sha256. `sizes`: tokens of each
    sequence `[sequences]`. `ends`: index after the last sequence of each document `[documents]`. Raises ConfigError if
    the blocks do not match the counts."""
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
                f"{path}: {tokens} tokens in {documents} documents were written, but their lengths sum to {total}; "
                "another program has changed the files: start again"
            )
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()


def write_documents(
    prefix: str | Path, blocks: Iterable[tuple[NDArray, Sequence[int] | NDArray]], dtype: np.dtype | type
) -> None:
    """Write or replace `<prefix>.bin` and `<prefix>.idx` atomically. `blocks`: documents as (concatenated tokens,
    length of each); an empty document has no sequence, as in Megatron's files. `dtype`: type of the stored ids, from
    `token_dtype(vocab_size)`. Raises ConfigError if an id does not fit."""
    stored = np.dtype(dtype).newbyteorder("<")
    if stored not in TOKEN_DTYPES.values():
        names = ", ".join(known.name for known in TOKEN_DTYPES.values())
        raise ConfigError(f"{prefix}: tokens of type {stored.name} cannot be stored; use one of {names}")
    Path(f"{prefix}.bin").parent.mkdir(parents=True, exist_ok=True)
    with new_files([str(prefix)]) as folder:
        stream = TokenStream(folder / "0", TokenCounts(stored), name=str(prefix))
        with contextlib.closing(stream):
            for tokens, lengths in blocks:
                stream.append(tokens, lengths)
            stream.flush()
            stream.sync()
        stream.write_index()
