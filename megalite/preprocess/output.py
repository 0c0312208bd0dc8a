"""Tokenize pieces of input and append them to the files of an output, with statistics and the side file."""

import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.data.indexed_writer import LENGTH, TokenCounts, TokenStream
from megalite.data.token_files import SUFFIXES
from megalite.preprocess.documents import BadLine, PieceTexts, read_piece
from megalite.preprocess.job import MAX_FAULTS, PreprocessJob, Progress, job_inputs, require_tokenizer
from megalite.preprocess.pieces import Piece
from megalite.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class TokenizedPiece:
    """The tokens of a piece's good documents, and its bad lines."""

    lines: int  # lines of the piece, including bad and blank ones
    first_line: int | None  # line in the piece of the first good document
    tokens: list[NDArray]  # for each key the concatenated tokens of all documents, in the stored type
    lengths: list[NDArray[np.int64]]  # for each key the length of each document `[documents]`
    bad: dict[str, int]  # bad lines, by kind
    faults: list[tuple[int, str]]  # (line in the piece, reason) of the first of them, in order


class PieceTokenizer:
    def __init__(self, job: PreprocessJob, tokenizer: Tokenizer | None = None) -> None:
        self._keys, self._limits = job.json_keys, job.limits
        self._tokenizer = tokenizer or require_tokenizer(job)
        self._ending = [self._tokenizer.eod] if job.append_eod else []
        self._dtype = token_dtype(self._tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> TokenizedPiece:
        """Parse and tokenize a piece. A bad document is left out under all keys. Raises ConfigError if the tokenizer
        returns ids outside its vocabulary."""
        read = self._read(piece)
        left_out: dict[int, tuple[str, str]] = {}
        encoded = self._encode_all(read, left_out)
        good = [i for i in range(len(encoded[0])) if i not in left_out]
        bad = sorted([*read.bad, *(BadLine(read.at[i], kind, reason) for i, (kind, reason) in left_out.items())])
        joined = [self._join([ids[i] for i in good]) for ids in encoded]
        return TokenizedPiece(
            lines=read.lines,
            first_line=read.at[good[0]] if good else None,
            tokens=[tokens for tokens, _ in joined],
            lengths=[lengths for _, lengths in joined],
            bad=dict(Counter(kind for _, kind, _ in bad)),
            faults=[(line, reason) for line, _, reason in bad[:MAX_FAULTS]],
        )

    def _read(self, piece: Piece) -> PieceTexts:
        return read_piece(piece, self._keys, self._limits)

    def _encode_all(
        self, read: PieceTexts, left_out: dict[int, tuple[str, str]]
    ) -> list[Sequence[Sequence[int] | NDArray]]:
        """Return [key][document] ids; add document -> (kind, reason) to `left_out` for documents without ids."""
        return [self._encode(key, texts, left_out) for key, texts in zip(self._keys, read.texts, strict=True)]

    def _encode(
        self, key: str, texts: Sequence[str], left_out: dict[int, tuple[str, str]]
    ) -> Sequence[Sequence[int] | NDArray]:
        """Return [document] ids; add document -> (kind, reason) to `left_out` for documents without ids."""
        try:
            encoded: Sequence[Sequence[int] | NDArray] = self._tokenizer.encode_batch(texts)
        except ConfigError:
            encoded = [self._encode_one(i, text, left_out) for i, text in enumerate(texts)]
        where = f" under {key!r}" if len(self._keys) > 1 else ""
        for i, document in enumerate(encoded):
            if not len(document):
                left_out.setdefault(i, ("no tokens", f"no tokens{where}"))
        return encoded

    def _encode_one(self, i: int, text: str, left_out: dict[int, tuple[str, str]]) -> list[int]:
        try:
            return self._tokenizer.encode(text)
        except ConfigError as error:
            left_out.setdefault(i, ("not tokenized", str(error)))
            return []

    def _join(self, documents: Sequence[Sequence[int] | NDArray]) -> tuple[NDArray, NDArray[np.int64]]:
        """Return (all tokens in the stored type, length of each document), including EOD tokens."""
        lengths = np.array([len(ids) + len(self._ending) for ids in documents], dtype=np.int64)
        if documents and isinstance(documents[0], np.ndarray):
            ending = np.array(self._ending, dtype=self._dtype)
            tokens = np.concatenate([part for ids in documents for part in (ids, ending)])
        else:
            flat: list[int] = []
            for ids in documents:
                flat += ids
                flat += self._ending
            tokens = np.fromiter(flat, np.int64, len(flat))
        size = self._tokenizer.vocab_size
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
            wrong = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
            raise ConfigError(f"{self._tokenizer.name} returns token id {wrong}, beyond its {size} ids; fetch it again")
        return tokens.astype(self._dtype), lengths


class LengthStatistics:
    """Statistics of document lengths for the side file, independent of the order and grouping of documents."""

    def __init__(self) -> None:
        self._documents = self._tokens = self._longest = 0
        self._shortest: int | None = None
        # Bucket b counts lengths from 2^(b-1) to 2^b - 1; bucket 0 counts empty documents.
        self._buckets = np.zeros(33, dtype=np.int64)

    def add(self, lengths: NDArray) -> None:
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self._documents += len(lengths)
        self._tokens += int(lengths.sum(dtype=np.int64))
        self._shortest = low if self._shortest is None else min(self._shortest, low)
        self._longest = max(self._longest, high)
        self._buckets += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=33)

    def facts(self) -> dict[str, Any]:
        buckets = enumerate(self._buckets.tolist())
        return {
            "min": self._shortest or 0,
            "mean": round(self._tokens / max(self._documents, 1), 2),
            "max": self._longest,
            "buckets": {str(1 << (b - 1) if b else 0): count for b, count in buckets if count},
        }


class OutputState(NamedTuple):
    documents: int
    tokens: int
    bin_sha256: str  # of the .bin so far
    lengths_sha256: str  # of the .lengths so far

    @classmethod
    def of(cls, counts: TokenCounts) -> "OutputState":
        digests = counts.bin_sha256.hexdigest(), counts.lengths_sha256.hexdigest()
        return cls(counts.documents, counts.tokens, *digests)


class Output(TokenStream):
    """The files of one key in the folder of an unfinished run. `counts`, `lengths`: contents to keep; the files are
    truncated to them."""

    def __init__(self, stem: Path, counts: TokenCounts, lengths: LengthStatistics, *, name: str) -> None:
        self.lengths = lengths
        kept = {".bin": counts.tokens * counts.dtype.itemsize, ".lengths": counts.documents * LENGTH.itemsize}
        for suffix, size in kept.items():
            if stem.with_suffix(suffix).exists():
                os.truncate(stem.with_suffix(suffix), size)
        super().__init__(stem, counts, name=name)

    def append(self, tokens: NDArray, lengths: Sequence[int] | NDArray) -> None:
        super().append(tokens, lengths)
        self.lengths.add(np.asarray(lengths))

    def state(self) -> OutputState:
        """Flush the files and return the contents that they have after `sync`."""
        self.flush()
        return OutputState.of(self.counts)

    def side_facts(
        self,
        job: PreprocessJob,
        key: str,
        tokenizer: Tokenizer,
        progress: Progress,
        files: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Return the contents of the side file (see `megalite.data.token_files`); `files` describes .bin and .idx."""
        return {
            "documents": self.counts.documents,
            "tokens": self.counts.tokens,
            "dtype": self.counts.dtype.name,
            "key": key,
            "keys": list(job.json_keys),
            "append_eod": job.append_eod,
            "bad_lines": dict(sorted(progress.bad.items())),
            "tokenizer": {
                "kind": tokenizer.name,
                "sha256": tokenizer.fingerprint(),
                "vocab_size": tokenizer.vocab_size,
                "eod": tokenizer.eod,
            },
            "files": dict(files),
            **({"shard": job_inputs(job)[1]} if job.shard else {}),
            "document_lengths": self.lengths.facts(),
        }


def check_output_prefix(prefix: str | Path, *, example: str) -> None:
    """Raise ConfigError if a prefix has no name, such as `folder/`: its files would be hidden. The message suggests a
    prefix that ends in `example`."""
    if not Path(prefix).name or str(prefix).endswith(("/", "/.", "/..")):
        raise ConfigError(f"output_prefix {prefix} has no name; use one such as {Path(prefix) / example}")


def refuse_existing(prefixes: Sequence[str]) -> None:
    """Raise ConfigError if a new dataset would replace a file or has no name."""
    for prefix in prefixes:
        check_output_prefix(prefix, example="whole")
        for suffix in SUFFIXES:
            if Path(f"{prefix}{suffix}").exists():
                raise ConfigError(f"{prefix}{suffix} exists; use another --output-prefix or move it away")


def make_folder(prefix: str | Path) -> Path:
    """Create the folder of a prefix if it does not exist. Raises ConfigError if no file can be written there."""
    folder = Path(f"{prefix}.new").parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A permission check is not enough: it succeeds for the superuser even on a read-only disk.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"output_prefix {prefix}: cannot write to {folder}: {error.strerror}") from None
    return folder
