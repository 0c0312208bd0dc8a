"""One piece of input to tokens: what a worker does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.data.inputs.pieces import Piece
from megalite.data.inputs.read import read_piece
from megalite.data.preprocess.job import MAX_FAULTS, PreprocessJob, require_tokenizer
from megalite.data.tokenizers.base import Tokenizer

NO_TOKENS, NOT_TOKENIZED = "no tokens", "not tokenized"
"""Kinds of bad documents that reading cannot see."""


@dataclass(frozen=True)
class TokenizedPiece:
    """The good documents of a piece, and what was left out."""

    lines: int
    """Lines of the piece, whatever they hold."""
    tokens: list[NDArray]
    """For each key the tokens of all documents, one after another, in the type that they are stored in."""
    lengths: list[NDArray[np.int64]]
    """For each key the tokens of each document `[documents]`."""
    bad: dict[str, int]
    """Lines left out, by kind."""
    faults: list[tuple[int, str]]
    """(line within the piece, reason) of the first of them, in order."""


class PieceTokenizer:
    """Tokenizes pieces; built once in each process."""

    def __init__(self, job: PreprocessJob, tokenizer: Tokenizer | None = None) -> None:
        self._keys, self._limits = job.json_keys, job.limits
        self._tokenizer = tokenizer or require_tokenizer(job)
        self._ending = [self._tokenizer.eod] if job.append_eod else []
        self._dtype = token_dtype(self._tokenizer.vocab_size)

    def __call__(self, piece: Piece) -> TokenizedPiece:
        """Read the piece and tokenize it. A document is left out whole, so that all keys keep in step.

        Raises:
            ConfigError: the input cannot be read, or the tokenizer gives ids that it does not have.
        """
        read = read_piece(piece, self._keys, self._limits)
        bad = [(fault.line, fault.kind, fault.reason) for fault in read.bad]
        encoded, left_out = self._encode_all(read.texts)
        good = [i for i in range(len(encoded[0])) if i not in left_out]
        bad += [(read.at[i], kind, reason) for i, (kind, reason) in left_out.items()]
        bad.sort()
        kinds: dict[str, int] = {}
        for _, kind, _ in bad:
            kinds[kind] = kinds.get(kind, 0) + 1
        joined = [self._join([ids[i] for i in good]) for ids in encoded]
        return TokenizedPiece(
            lines=read.lines,
            tokens=[tokens for tokens, _ in joined],
            lengths=[lengths for _, lengths in joined],
            bad=kinds,
            faults=[(line, reason) for line, _, reason in bad[:MAX_FAULTS]],
        )

    def _encode_all(
        self, texts: Sequence[Sequence[str]]
    ) -> tuple[list[Sequence[Sequence[int] | NDArray]], dict[int, tuple[str, str]]]:
        """([key][document] ids, document -> (kind, reason) of those that have none)."""
        encoded: list[Sequence[Sequence[int] | NDArray]] = []
        left_out: dict[int, tuple[str, str]] = {}
        for key, key_texts in zip(self._keys, texts, strict=True):
            try:
                ids: Sequence[Sequence[int] | NDArray] = self._tokenizer.encode_batch(key_texts)
            except ConfigError:
                ids = self._encode_singly(key_texts, left_out)
            for i, document in enumerate(ids):
                if not len(document):
                    named = f" under {key!r}" if len(self._keys) > 1 else ""
                    left_out.setdefault(i, (NO_TOKENS, f"no tokens{named}"))
            encoded.append(ids)
        return encoded, left_out

    def _encode_singly(self, texts: Sequence[str], left_out: dict[int, tuple[str, str]]) -> list[list[int]]:
        """One text that cannot be tokenized is one bad line."""
        encoded = []
        for i, text in enumerate(texts):
            try:
                encoded.append(self._tokenizer.encode(text))
            except ConfigError as error:
                left_out.setdefault(i, (NOT_TOKENIZED, str(error)))
                encoded.append([])
        return encoded

    def _join(self, documents: Sequence[Sequence[int] | NDArray]) -> tuple[NDArray, NDArray[np.int64]]:
        """(all tokens in the stored type, tokens of each document); ends of documents are put in."""
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
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer.vocab_size:
            wrong = int(tokens.max()) if int(tokens.min()) >= 0 else int(tokens.min())
            raise ConfigError(
                f"{self._tokenizer.name} gives token id {wrong}, but its vocabulary is {self._tokenizer.vocab_size} ids; "
                "its files do not belong together: fetch them again"
            )
        return tokens.astype(self._dtype), lengths
