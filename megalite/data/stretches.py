"""Read a stretch of a stream of documents, across their borders."""

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset


class StretchReader:
    """Copies consecutive tokens of documents that follow each other in some order.

    Args:
        indexed: the token file.
        vocab_size: ids must be below it; not checked if None.
    """

    def __init__(self, indexed: IndexedDataset, vocab_size: int | None) -> None:
        self._indexed = indexed
        self._itemsize = indexed.dtype.itemsize
        self._vocab_size = vocab_size
        self._checks = vocab_size is not None and (
            indexed.dtype.kind == "i" or np.iinfo(indexed.dtype).max >= vocab_size
        )

    def read(
        self, documents: NDArray[np.integer], position: int, offset: int, length: int
    ) -> NDArray[np.int64]:
        """`length` tokens, int64, from token `offset` of the document that is `position`-th in the order `documents`.

        Raises:
            ConfigError: a token id is not in the vocabulary; names file, document and id.
        """
        indexed = self._indexed
        tokens, sizes, pointers, itemsize = indexed.tokens, indexed.sizes, indexed.pointers, self._itemsize
        sample = np.empty(length, dtype=np.int64)
        at, filled = position, 0
        # item() gives Python numbers at once: numpy's scalars would cost more than the copying.
        while True:
            sequence = documents.item(at)
            first = pointers.item(sequence) // itemsize + offset
            take = sizes.item(sequence) - offset
            if take >= length - filled:
                sample[filled:] = tokens[first : first + length - filled]
                break
            sample[filled : filled + take] = tokens[first : first + take]
            filled += take
            at += 1
            offset = 0
        # Negative ids are huge as unsigned ones: one pass finds both kinds.
        if self._checks and np.maximum.reduce(sample.view(np.uint64)) >= self._vocab_size:
            self._refuse(sample, documents, position)
        return sample

    def _refuse(self, sample: NDArray[np.int64], documents: NDArray[np.integer], position: int) -> None:
        """Name the document: the first from `position` on that holds such an id at all."""
        indexed, vocab_size = self._indexed, self._vocab_size
        assert vocab_size is not None
        bad = int(sample[(sample < 0) | (sample >= vocab_size)][0])
        while bad not in indexed[documents.item(position)]:
            position += 1
        raise ConfigError(
            f"{indexed.bin_path}: document {documents.item(position)} holds token id {bad}, outside vocab_size "
            f"{vocab_size}; set vocab_size to that of the tokenizer that wrote the file"
        )
