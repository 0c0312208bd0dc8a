"""Where the documents of a dataset are, in blocks: a file may have a billion of them."""

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset

BLOCK = 1 << 17
"""Documents that are looked at together."""


def token_ends(dataset: IndexedDataset, documents: range) -> NDArray[np.int64]:
    """The token after the last one of each document, counted from the start of .bin."""
    following = np.array(dataset.document_indices[documents.start + 1 : documents.stop + 1])
    ends = np.full(len(following), dataset.num_tokens, dtype=np.int64)
    # Indices rise: those of the last documents, behind which no sequence starts, are at the end.
    within = int(np.searchsorted(following, len(dataset)))
    ends[:within] = dataset.pointers[following[:within]] // dataset.dtype.itemsize
    return ends


def first_token(dataset: IndexedDataset, document: int) -> int:
    """First token of a document; of the one after the last, the number of tokens."""
    sequence = int(dataset.document_indices[document])
    if sequence == len(dataset):
        return dataset.num_tokens
    return int(dataset.pointers[sequence]) // dataset.dtype.itemsize


def document_of_token(dataset: IndexedDataset, token: int) -> int:
    """The document that holds a token."""
    return bisect_right(range(dataset.num_documents), token, key=lambda i: first_token(dataset, i)) - 1


def sequence_of_token(dataset: IndexedDataset, token: int) -> int:
    """The sequence that holds a token."""
    start = token * dataset.dtype.itemsize
    return bisect_right(range(len(dataset)), start, key=lambda i: int(dataset.pointers[i])) - 1


def lengths_in_blocks(dataset: IndexedDataset, documents: range) -> Iterator[NDArray[np.int64]]:
    """Tokens of each of `documents`, block after block."""
    before = first_token(dataset, documents.start)
    for first in range(documents.start, documents.stop, BLOCK):
        ends = token_ends(dataset, range(first, min(first + BLOCK, documents.stop)))
        yield np.diff(ends, prepend=before)
        before = int(ends[-1])


def parse_documents(text: str, dataset: IndexedDataset) -> range:
    """`3:10` (3 up to and without 10), `3:`, `:10` or `3` as a range of the documents of a dataset.

    Raises:
        ConfigError: something else, or a range that is empty or goes beyond the last document.
    """
    first, colon, last = text.partition(":")
    count = dataset.num_documents
    if not count:
        raise ConfigError(f"documents {text!r}: {dataset.prefix} has no documents; give a dataset that has")
    example = f"give a range such as 0:{min(count, 3)}"
    try:
        start = int(first) if first or not colon else 0
        stop = start + 1 if not colon else int(last) if last else count
    except ValueError:
        raise ConfigError(f"documents {text!r} is no range of numbers; {example}") from None
    if 0 <= stop <= start <= count and last:
        how = "ends before it starts" if stop < start else "holds none"
        raise ConfigError(f"documents {text!r}: the range {how} (the end is not part of it); {example}")
    if not 0 <= start < stop <= count:
        raise ConfigError(
            f"documents {text!r}: {dataset.prefix} has the documents 0 to {count - 1}; {example}"
        )
    return range(start, stop)
