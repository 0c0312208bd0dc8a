"""Read and write token files in Megatron-LM's format: tokens in `<prefix>.bin`, positions of sequences in `<prefix>.idx`.

`.bin` contains the tokens of all sequences, one after another, without a header. `.idx` is little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code of the tokens (see TOKEN_DTYPES)
    u64       S, number of sequences
    u64       D, number of document indices (documents + 1)
    i32[S]    tokens in each sequence
    i64[S]    byte offset of each sequence in .bin
    i64[D]    document i consists of the sequences [d[i], d[i+1]); d[0] = 0, d[-1] = S

A document may have no sequence, and a sequence no token: Megatron-LM and datatrove write the latter for empty text."""

import contextlib
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import sync_folder
from megalite.config.errors import ConfigError
from megalite.config.reading import open_regular

SUFFIXES = (".bin", ".idx", ".json")
"""Files of one dataset: tokens, index and, if megalite preprocessed it, the side file (see `token_files`)."""
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TOKEN_DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Token types by their code in the header."""
_FLOATS = {6: "float64", 7: "float32"}
_OLD_MAGIC = b"TNTIDX\x00\x00"
_VERSIONS = 100  # a higher version number is treated as damage

_REMEDY = "write the dataset again with megalite preprocess, or copy it again from an undamaged one"
_VERSION_AT, _CODE_AT, _SEQUENCES_AT = 9, 17, 18
LENGTH = np.dtype("<i4")  # type of a length on disk, in .idx and .lengths
_CHECKED_BYTES = 1 << 17  # block size of the index checks: fits into the processor's cache
_BLOCK_BYTES = 1 << 20
_BUFFER = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type that stores token ids below `vocab_size`: uint16 below 65500, else int32 (Megatron's rule)."""
    return TOKEN_DTYPES[8] if vocab_size < 65500 else TOKEN_DTYPES[4]


class DatasetFault(ConfigError):
    """Raised for a token file that violates the format, with the file and, if known, the first wrong byte."""

    def __init__(self, message: str, path: str = "", offset: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.offset = offset


class UnsupportedDataset(DatasetFault):
    """Raised for an index of another layout or of a multimodal dataset, which may be valid."""


class IndexedDataset:
    """Memory-mapped sequences of tokens; `dataset[i]` is sequence i as an array of `dataset.dtype`.

    Opening checks the header, the counts against the size of `.idx`, every offset, length and document index, and the
    size of `.bin`, so that a truncated or mismatched pair is an error here instead of wrong tokens during a run. It
    reads `.idx` once, in small blocks, and no tokens.

    Raises DatasetFault if the pair is damaged, with the file, the byte, the value found and the value expected;
    UnsupportedDataset for other versions, Megatron-LM's previous format, floats and images; ConfigError if a file is
    missing, not readable or not a regular file."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.idx_path = Path(f"{prefix}.idx")
        self.bin_path = Path(f"{prefix}.bin")
        for path in (self.idx_path, self.bin_path):
            if not os.path.lexists(path):
                raise ConfigError(f"{path} does not exist; a dataset is a pair {prefix}.bin and {prefix}.idx")
        with _open(self.idx_path) as file:
            self.dtype, sequences, indices = self._read_header(file)
            self.num_tokens = self._check_pointers(file, sequences)
            self._check_documents(file, sequences, indices)
            # One map, and so one open file, for all three arrays, because a blend may have a thousand datasets.
            index = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        offset = HEADER.size
        self.sizes = np.frombuffer(index, LENGTH, sequences, offset)  # tokens in each sequence, int32 `[S]`
        self.pointers = np.frombuffer(index, "<i8", sequences, offset + 4 * sequences)
        """Byte offset of each sequence in .bin, int64 `[S]`."""
        self.document_indices = np.frombuffer(index, "<i8", indices, offset + 12 * sequences)
        """First sequence of each document, then S, int64 `[D]`."""
        self.tokens = self._map_tokens()  # all tokens of .bin, `[num_tokens]`, read from disk on access

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> NDArray:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)} in {self.prefix}")
        first = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[first : first + int(self.sizes[i])]

    @property
    def num_documents(self) -> int:
        """Number of documents, including those without tokens."""
        return len(self.document_indices) - 1

    def _fault(self, offset: int | None, found: str, expected: str) -> DatasetFault:
        place = "" if offset is None else f" byte {offset}:"
        message = f"{self.idx_path}:{place} {found}, expected {expected}; {_REMEDY}"
        return DatasetFault(message, str(self.idx_path), offset)

    def _unsupported(self, offset: int, found: str) -> UnsupportedDataset:
        message = (
            f"{self.idx_path}: byte {offset}: {found}: not supported; write the dataset again from its text with "
            "megalite preprocess"
        )
        return UnsupportedDataset(message, str(self.idx_path), offset)

    def _read_header(self, file: BinaryIO) -> tuple[np.dtype, int, int]:
        """Return (token type, S, D). Checks that the file has the length that follows from them."""
        size = os.fstat(file.fileno()).st_size
        header = os.pread(file.fileno(), HEADER.size, 0)
        if header.startswith(_OLD_MAGIC):
            raise self._unsupported(0, "starts with TNTIDX, the format that fairseq and Megatron-LM had before MMIDIDX")
        if header[: len(MAGIC)] != MAGIC:
            found = f"starts with {header[: len(MAGIC)]!r}"
            with _open(self.bin_path) as bin_file:
                is_index = os.pread(bin_file.fileno(), len(MAGIC), 0) == MAGIC
            if is_index:
                found += f" and {self.bin_path} like an index (are the two names swapped?)"
            raise self._fault(0, found, f"{MAGIC!r} of a token index")
        if len(header) < HEADER.size:
            raise self._fault(None, f"{size} bytes", f"at least the header's {HEADER.size}")
        _, version, code, sequences, indices = HEADER.unpack(header)
        if VERSION < version < _VERSIONS:
            raise self._unsupported(_VERSION_AT, f"version {version} of the format, expected {VERSION}")
        if version != VERSION:
            raise self._fault(_VERSION_AT, f"version {version}", str(VERSION))
        if code in _FLOATS:
            raise self._unsupported(_CODE_AT, f"dtype code {code}, {_FLOATS[code]}, which is no type of token ids")
        if code not in TOKEN_DTYPES:
            known = ", ".join(f"{c} {d.name}" for c, d in TOKEN_DTYPES.items())
            raise self._fault(_CODE_AT, f"dtype code {code}", f"one of {known}")
        expected = HEADER.size + 12 * sequences + 8 * indices
        if size == expected + sequences and sequences:
            found = f"mode bytes of a multimodal dataset ({size} bytes, text has {expected})"
            raise self._unsupported(expected, found)
        if size != expected:
            stated = (
                f"{expected} for {sequences} sequences and {indices} document indices (by bytes {_SEQUENCES_AT} to 33)"
            )
            raise self._fault(None, f"{size} bytes", stated)
        return TOKEN_DTYPES[code], sequences, indices

    def _check_pointers(self, file: BinaryIO, sequences: int) -> int:
        """Return the number of tokens. Checks that sequences are contiguous, as all writers of the format store
        them."""
        itemsize = self.dtype.itemsize
        sizes_at, pointers_at = HEADER.size, HEADER.size + 4 * sequences
        end = 0
        items, checked = range(sequences), _CHECKED_BYTES
        lengths = _blocks(self.idx_path, file, LENGTH, sizes_at, items, checked)
        starts = _blocks(self.idx_path, file, "<i8", pointers_at, items, 2 * checked)
        for (first, sizes), (_, pointers) in zip(lengths, starts, strict=True):
            if sizes.min() < 0:
                bad = int(np.argmax(sizes < 0))
                found = f"sequence {first + bad} has length {sizes[bad]}"
                raise self._fault(sizes_at + 4 * (first + bad), found, "a length of at least 0")
            steps = np.multiply(sizes, itemsize, dtype=np.int64)
            # A difference that wraps around at 2^64 cannot equal a length, since lengths are below 2^34 bytes.
            wrong = pointers[1:] - pointers[:-1] != steps[:-1]
            if pointers[0] != end or wrong.any():
                bad = 0 if pointers[0] != end else int(np.argmax(wrong)) + 1
                expected = end + int(steps[:bad].sum())
                found = f"sequence {first + bad} starts at byte {pointers[bad]}"
                raise self._fault(pointers_at + 8 * (first + bad), found, f"{expected} by the lengths before it")
            end = int(pointers[-1]) + int(steps[-1])
        return end // itemsize

    def _check_documents(self, file: BinaryIO, sequences: int, indices: int) -> None:
        start = HEADER.size + 12 * sequences
        before = 0
        for first, documents in _blocks(self.idx_path, file, "<i8", start, range(indices), _CHECKED_BYTES):
            if first == 0 and documents[0] != 0:
                raise self._fault(start, f"document indices start with {documents[0]}", "0")
            falls = documents[1:] < documents[:-1]
            if documents[0] < before or falls.any():
                bad = 0 if documents[0] < before else int(np.argmax(falls)) + 1
                previous = int(documents[bad - 1]) if bad else before
                found = f"document {first + bad - 1} holds sequences {previous} to {documents[bad]}"
                raise self._fault(start + 8 * (first + bad), found, "ascending indices")
            before = int(documents[-1])
        if indices == 0 or before != sequences:
            found = f"document indices end with {before}" if indices else "no document indices"
            place = start + 8 * (indices - 1) if indices else _SEQUENCES_AT + 8
            raise self._fault(place, found, f"{sequences}, the number of sequences, as the last one")

    def _map_tokens(self) -> NDArray:
        with _open(self.bin_path) as file:
            found = os.fstat(file.fileno()).st_size
            expected = self.num_tokens * self.dtype.itemsize
            if found != expected:
                fault = "truncated" if found < expected else "longer than in its index"
                raise DatasetFault(
                    f"{self.bin_path}: {fault}: {found} bytes, expected {expected} for the {self.num_tokens} "
                    f"{self.dtype.name} tokens of {self.idx_path}; {_REMEDY}",
                    str(self.bin_path),
                    min(found, expected),
                )
            if not expected:
                return np.empty(0, dtype=self.dtype)  # an empty file cannot be mapped
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), self.dtype)


BLOCK = 1 << 17  # documents processed at once, because a file may have a billion


def token_ends(dataset: IndexedDataset, documents: range) -> NDArray[np.int64]:
    """Return the position in .bin, in tokens, after the last token of each document."""
    following = np.array(dataset.document_indices[documents.start + 1 : documents.stop + 1])
    ends = np.full(len(following), dataset.num_tokens, dtype=np.int64)
    # Indices are ascending, so documents that no sequence follows are at the end.
    within = int(np.searchsorted(following, len(dataset)))
    ends[:within] = dataset.pointers[following[:within]] // dataset.dtype.itemsize
    return ends


def first_token(dataset: IndexedDataset, document: int) -> int:
    """Return the position of a document's first token; for the number of documents, the number of tokens."""
    return 0 if not document else int(token_ends(dataset, range(document - 1, document))[0])


def lengths_in_blocks(dataset: IndexedDataset, documents: range) -> Iterator[NDArray[np.int64]]:
    """Yield the token counts of `documents` in blocks."""
    before = first_token(dataset, documents.start)
    for first in range(documents.start, documents.stop, BLOCK):
        ends = token_ends(dataset, range(first, min(first + BLOCK, documents.stop)))
        yield np.diff(ends, prepend=before)
        before = int(ends[-1])


def token_blocks(dataset: IndexedDataset, tokens: range) -> Iterator[tuple[int, NDArray]]:
    """Yield (position of the first token, tokens) of consecutive blocks of .bin; each overwrites the previous one."""
    with _open(dataset.bin_path) as file:
        yield from _blocks(dataset.bin_path, file, dataset.dtype, 0, tokens, _BLOCK_BYTES)


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; use the prefix of a .bin and an .idx file"
        ) from None


def _blocks(
    path: Path, file: BinaryIO, dtype: np.dtype | str, offset: int, items: range, block_bytes: int
) -> Iterator[tuple[int, NDArray]]:
    """Yield (index of the first item, items) of consecutive blocks of an array at byte `offset`, in one reused buffer.

    Faster than a memory map if each byte is read once: no page tables to set up, and numpy gets aligned items."""
    dtype = np.dtype(dtype)
    count = max(block_bytes // dtype.itemsize, 1)
    buffer = np.empty(min(len(items), count), dtype)
    for first in range(items.start, items.stop, count):
        block = buffer[: min(count, items.stop - first)]
        view, at = block.data.cast("B"), offset + first * dtype.itemsize
        while view:
            read = os.preadv(file.fileno(), [view], at)
            if not read:
                raise ConfigError(f"{path} ends at byte {at}, sooner than when it was opened; {_REMEDY}")
            view, at = view[read:], at + read
        yield first, block


Blocks = Callable[[], Iterator[NDArray]]  # each call yields the blocks of an array from the start


def move_into_place(folder: Path, prefixes: Sequence[str]) -> None:
    """Rename the complete output `folder/NUMBER.bin`, .idx and .json to its prefixes. A second call continues after a
    kill. The .idx and .json of an earlier output are removed before its .bin is replaced, so neither ever describes
    another .bin."""
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
    """Create a temporary folder next to the outputs for the files `NUMBER.bin`, .idx and .json of each prefix. At the
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
                while data := file.read(BLOCK * LENGTH.itemsize):  # unlike np.fromfile this raises read errors
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
            put(block.astype(LENGTH).data)
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
