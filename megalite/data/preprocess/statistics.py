"""Counts of token ids and of document lengths, for the side file."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST_VOCABULARY = 1 << 24
"""Ids of a larger vocabulary are not counted: the table would take more memory than all else."""
_MOST_COMMON = 20
_TEXT_LIMIT = 40


class DatasetStatistics:
    """Adds up what a dataset holds; the result does not depend on how the data came in pieces."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        counted = vocab_size <= LARGEST_VOCABULARY
        self._counts: NDArray[np.int64] | None = np.zeros(vocab_size, dtype=np.int64) if counted else None
        self._documents = self._tokens = self._longest = 0
        self._shortest: int | None = None
        # Bucket b holds lengths from 2^(b-1) to 2^b - 1; bucket 0 is for empty documents.
        self._buckets = np.zeros(33, dtype=np.int64)

    def add_tokens(self, tokens: NDArray) -> None:
        """Count ids, all of them in the vocabulary."""
        if self._counts is not None and len(tokens):
            found = np.bincount(tokens)
            self._counts[: len(found)] += found

    def add_lengths(self, lengths: NDArray) -> None:
        """Count documents by their lengths in tokens."""
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self._documents += len(lengths)
        self._tokens += int(lengths.sum(dtype=np.int64))
        self._shortest = low if self._shortest is None else min(self._shortest, low)
        self._longest = max(self._longest, high)
        self._buckets += np.bincount(np.frexp(lengths.astype(np.float64))[1], minlength=33)

    def lengths(self) -> dict[str, Any]:
        """`document_lengths` of the side file."""
        return {
            "min": self._shortest or 0,
            "mean": round(self._tokens / max(self._documents, 1), 2),
            "max": self._longest,
            "buckets": {
                str(1 << (b - 1) if b else 0): int(count) for b, count in enumerate(self._buckets) if count
            },
        }

    def histogram(self, text_of: Callable[[int], str]) -> dict[str, Any] | None:
        """`token_histogram` of the side file; None if the vocabulary is too large for one."""
        counts = self._counts
        if counts is None:
            return None
        used = np.flatnonzero(counts)
        common = used[np.argsort(-counts[used], kind="stable")][:_MOST_COMMON]
        shares = counts[used] / max(int(counts.sum()), 1)
        # Rounded, since the last bits of a sum of logarithms depend on the processor.
        entropy = round(abs(float(-(shares * np.log2(shares)).sum())), 4)
        return {
            "most_common": [
                {"id": int(i), "count": int(counts[i]), "text": text_of(int(i))[:_TEXT_LIMIT]} for i in common
            ],
            "unused": self._vocab_size - len(used),
            "max_id": int(used[-1]) if len(used) else -1,
            "entropy_bits": entropy,
        }
