"""Write token files in Megatron-LM's format (layout in `indexed_dataset`), all or nothing."""

import hashlib
import os
import secrets
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import HEADER, MAGIC, TOKEN_DTYPES, VERSION


class IndexedDatasetWriter:
    """Appends documents to `<prefix>.bin` and `<prefix>.idx`; each document is one sequence.

    Both files are written under temporary names in the same folder. `finish()` flushes them to disk and renames
    `.bin`, then `.idx`, so that an `.idx` never stands beside a `.bin` that it does not describe. As a context
    manager it finishes at the end of the block, and leaves nothing behind if the block raises.

    Args:
        prefix: path without `.bin` and `.idx`; its folder is made if need be.
        dtype: type of the stored ids, as `token_dtype(vocab_size)` gives it.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype | type) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = [code for code, known in TOKEN_DTYPES.items() if known == self.dtype]
        if not codes:
            names = ", ".join(known.name for known in TOKEN_DTYPES.values())
            raise ConfigError(
                f"{prefix}: tokens of type {self.dtype.name} cannot be stored; use one of {names}"
            )
        self._code = codes[0]
        self.num_tokens = 0
        """Tokens added."""
        self._sizes = array("i")
        self._document_indices = array("q", [0])
        self._sha256 = hashlib.sha256()
        Path(f"{prefix}.bin").parent.mkdir(parents=True, exist_ok=True)
        unique = f"{os.getpid()}-{secrets.token_hex(4)}.tmp"
        self._partial = {suffix: Path(f"{prefix}{suffix}.{unique}") for suffix in (".bin", ".idx")}
        self._bin = self._partial[".bin"].open("xb")

    @property
    def num_documents(self) -> int:
        """Documents added."""
        return len(self._document_indices) - 1

    @property
    def sha256(self) -> str:
        """Hex digest of the bytes that .bin holds so far."""
        return self._sha256.hexdigest()

    def add_document(self, tokens: Sequence[int] | NDArray) -> None:
        """Append one document; an empty one is a document without a sequence, as in Megatron's files."""
        ids = np.asarray(tokens, dtype=np.int64)
        self.add_documents(ids, [len(ids)])

    def add_documents(self, tokens: NDArray, lengths: Sequence[int]) -> None:
        """Append several documents whose tokens lie one after another in `tokens` `[sum(lengths)]`.

        Raises:
            ConfigError: an id does not fit the dtype.
        """
        assert sum(lengths) == len(tokens), (sum(lengths), len(tokens))
        if tokens.dtype != self.dtype and len(tokens):
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high > limits.max:
                raise ConfigError(
                    f"{self.prefix}: token id {low if low < 0 else high} does not fit {self.dtype.name} "
                    f"(0 to {limits.max}); give the writer token_dtype(vocab_size)"
                )
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        self._bin.write(data)
        self._sha256.update(data)
        self.num_tokens += len(tokens)
        for length in lengths:
            if length:
                self._sizes.append(length)
            self._document_indices.append(len(self._sizes))

    def finish(self) -> None:
        """Write the index, flush both files to disk and give them their names."""
        sizes = np.frombuffer(self._sizes, dtype=np.int32) if self._sizes else np.empty(0, dtype=np.int32)
        pointers = np.zeros(len(sizes), dtype="<i8")
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        with self._partial[".idx"].open("xb") as idx:
            idx.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(self._document_indices)))
            idx.write(sizes.astype("<i4").tobytes())
            idx.write(pointers.tobytes())
            idx.write(np.frombuffer(self._document_indices, dtype=np.int64).astype("<i8").tobytes())
            idx.flush()
            os.fsync(idx.fileno())
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        # The old index goes first: killed between the two renames, we leave no index rather than a wrong one.
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        for suffix in (".bin", ".idx"):
            self._partial[suffix].replace(f"{self.prefix}{suffix}")
        sync_folder(Path(f"{self.prefix}.bin").parent)

    def abandon(self) -> None:
        """Drop what was written; earlier files of the same name stay as they were."""
        self._bin.close()
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


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
