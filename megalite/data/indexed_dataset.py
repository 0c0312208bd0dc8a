"""Read token files in Megatron-LM's format: `<prefix>.bin` holds tokens, `<prefix>.idx` says where sequences are.

`.bin` is the tokens of all sequences, one after another, with no header. `.idx` is little-endian:

    9 bytes   b"MMIDIDX\\0\\0"
    u64       version, 1
    u8        dtype code of the tokens (see TOKEN_DTYPES)
    u64       S, number of sequences
    u64       D, number of document indices (documents + 1)
    i32[S]    tokens in each sequence
    i64[S]    byte offset of each sequence in .bin
    i64[D]    document i holds the sequences [d[i], d[i+1]); d[0] = 0, d[-1] = S
"""

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError

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
"""Token types by their code in the header. Codes 6 and 7 are floats, which no token file holds."""

_REMEDY = "write the dataset again with tools/preprocess_data.py, or copy it again from where it is whole"
_BLOCK = 1 << 20


def token_dtype(vocab_size: int) -> np.dtype:
    """Type that token ids below `vocab_size` are stored in: uint16 below 65500, else int32 (Megatron's rule)."""
    return TOKEN_DTYPES[8] if vocab_size < 65500 else TOKEN_DTYPES[4]


class IndexedDataset:
    """Memory-mapped sequences of tokens; `dataset[i]` is sequence i as an array of `dataset.dtype`.

    Opening checks the header, the counts against the size of `.idx`, every offset and the size of `.bin`, so that a
    truncated or mismatched pair is found here and not as wrong tokens in the middle of a run.

    Raises:
        ConfigError: a file is missing or the pair is not whole; names the file, what it holds and what it should.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.idx_path = Path(f"{prefix}.idx")
        self.bin_path = Path(f"{prefix}.bin")
        for path in (self.idx_path, self.bin_path):
            if not path.is_file():
                raise ConfigError(f"{path} does not exist; a dataset is a pair {prefix}.bin and {prefix}.idx")
        self.dtype, sequences, indices = self._read_header()
        offset = HEADER.size
        self.sizes = self._map("<i4", sequences, offset)
        """Tokens in each sequence, int32 `[S]`."""
        self.pointers = self._map("<i8", sequences, offset + 4 * sequences)
        """Byte offset of each sequence in .bin, int64 `[S]`."""
        self.document_indices = self._map("<i8", indices, offset + 12 * sequences)
        """First sequence of each document, then S, int64 `[D]`."""
        self.num_tokens = self._check_pointers()
        self._check_documents(sequences)
        self._check_bin_size()
        self.tokens = _map_file(self.bin_path, self.dtype, self.num_tokens, 0)
        """Every token of .bin, `[num_tokens]`, on disk until touched."""

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> NDArray:
        if not -len(self) <= i < len(self):
            raise IndexError(f"sequence {i} of {len(self)} in {self.prefix}")
        return self.read(i % len(self))

    def read(self, i: int, offset: int = 0, length: int | None = None) -> NDArray:
        """`length` tokens of sequence i from token `offset` on (to its end by default); a view, not a copy."""
        size = int(self.sizes[i])
        stop = size if length is None else offset + length
        if not 0 <= offset <= stop <= size:
            raise IndexError(f"tokens [{offset}, {stop}) of sequence {i}, which has {size}, in {self.prefix}")
        first = int(self.pointers[i]) // self.dtype.itemsize
        return self.tokens[first + offset : first + stop]

    def max_token_id(self, *, sample: int | None = None) -> int:
        """Largest token id, -1 if there are none; exact, or over about `sample` tokens in evenly spaced blocks."""
        blocks = -(-self.num_tokens // _BLOCK)
        step = 1 if sample is None else max(1, self.num_tokens // max(1, sample))
        largest = -1
        for block in range(0, blocks, step):
            largest = max(largest, int(self.tokens[block * _BLOCK : (block + 1) * _BLOCK].max()))
        return largest

    def _read_header(self) -> tuple[np.dtype, int, int]:
        """(token type, S, D); checks that the file is as long as they say."""
        size = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            header = file.read(HEADER.size)
        if header[: len(MAGIC)] != MAGIC:
            found, wanted = header[: len(MAGIC)], MAGIC
            raise ConfigError(
                f"{self.idx_path}: starts with {found!r}, expected {wanted!r}: no token index; {_REMEDY}"
            )
        if len(header) < HEADER.size:
            raise ConfigError(
                f"{self.idx_path}: {size} bytes, expected at least the header's {HEADER.size}; {_REMEDY}"
            )
        _, version, code, sequences, indices = HEADER.unpack(header)
        if version != VERSION:
            raise ConfigError(f"{self.idx_path}: version {version}, expected {VERSION}; {_REMEDY}")
        if code not in TOKEN_DTYPES:
            known = ", ".join(f"{c} {d.name}" for c, d in TOKEN_DTYPES.items())
            raise ConfigError(f"{self.idx_path}: dtype code {code}, expected one of {known}; {_REMEDY}")
        expected = HEADER.size + 12 * sequences + 8 * indices
        if size == expected + sequences and sequences:
            raise ConfigError(
                f"{self.idx_path}: holds mode bytes of a multimodal dataset ({size} bytes, text has {expected}); "
                "multimodal datasets are not supported: write a text dataset with tools/preprocess_data.py"
            )
        if size != expected:
            raise ConfigError(
                f"{self.idx_path}: {size} bytes, expected {expected} for {sequences} sequences and {indices} "
                f"document indices; {_REMEDY}"
            )
        return TOKEN_DTYPES[code], sequences, indices

    def _map(self, dtype: str, count: int, offset: int) -> NDArray:
        return _map_file(self.idx_path, np.dtype(dtype), count, offset)

    def _check_pointers(self) -> int:
        """Total tokens; sequences must lie one after another, as every writer of the format lays them."""
        itemsize = self.dtype.itemsize
        expected_start = 0
        # In blocks: an index of a billion sequences must not need gigabytes of temporaries.
        for first in range(0, len(self.sizes), _BLOCK):
            sizes = self.sizes[first : first + _BLOCK].astype(np.int64)
            if sizes.min() < 0:
                bad = int(np.argmax(sizes < 0))
                raise ConfigError(
                    f"{self.idx_path}: sequence {first + bad} has length {sizes[bad]}; {_REMEDY}"
                )
            ends = expected_start + np.cumsum(sizes) * itemsize
            starts = ends - sizes * itemsize
            pointers = self.pointers[first : first + _BLOCK]
            if not np.array_equal(pointers, starts):
                bad = int(np.argmax(pointers != starts))
                raise ConfigError(
                    f"{self.idx_path}: sequence {first + bad} starts at byte {pointers[bad]}, expected {starts[bad]} "
                    f"by the lengths before it; {_REMEDY}"
                )
            expected_start = int(ends[-1])
        return expected_start // itemsize

    def _check_documents(self, sequences: int) -> None:
        indices = self.document_indices
        if len(indices) == 0 or indices[0] != 0 or indices[-1] != sequences:
            found = f"{indices[0]} to {indices[-1]}" if len(indices) else "nothing"
            raise ConfigError(
                f"{self.idx_path}: document indices run {found}, expected 0 to {sequences}; {_REMEDY}"
            )
        falls = indices[1:] < indices[:-1]
        if falls.any():
            bad = int(np.argmax(falls))
            raise ConfigError(
                f"{self.idx_path}: document {bad} holds sequences {indices[bad]} to {indices[bad + 1]}, expected "
                f"rising indices; {_REMEDY}"
            )

    def _check_bin_size(self) -> None:
        found = self.bin_path.stat().st_size
        expected = self.num_tokens * self.dtype.itemsize
        if found != expected:
            fault = "truncated" if found < expected else "longer than its index says"
            raise ConfigError(
                f"{self.bin_path}: {fault}: {found} bytes, expected {expected} for the {self.num_tokens} "
                f"{self.dtype.name} tokens of {self.idx_path}; {_REMEDY}"
            )


def _map_file(path: Path, dtype: np.dtype, count: int, offset: int) -> NDArray:
    """`count` items of a file from byte `offset`; an empty file cannot be memory-mapped, so none is."""
    if count == 0:
        return np.empty(0, dtype=dtype)
    # A plain ndarray over the map: slicing np.memmap itself costs ten times as much.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))).view(np.ndarray)
