"""What the datasets over some documents of a token file have in common."""

import numpy as np

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.stretches import StretchReader


class DocumentDataset:
    """The documents of one split and how they are read; subclasses say which of their tokens sample k holds.

    Args:
        indexed: the token file.
        documents: sequence numbers that belong to this split.
        seq_length: inputs of a sample; a sample has one token more.
        seed: of the order.
        name: of the split, for messages.
        vocab_size: ids must be below it; not checked if None.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        documents: range,
        seq_length: int,
        seed: int,
        name: str,
        vocab_size: int | None,
    ) -> None:
        assert 0 <= documents.start <= documents.stop <= len(indexed) and documents.step == 1, documents
        self.indexed = indexed
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.name = name
        self._sizes = indexed.sizes[documents.start : documents.stop]
        self._reader = StretchReader(indexed, vocab_size)
        self.num_tokens = int(self._sizes.sum(dtype=np.int64))
        """Tokens of this split."""

    @property
    def _holds(self) -> str:
        """The start of an error about too little of it."""
        return f"{self.indexed.prefix}: the {self.name} split holds {self.num_tokens} tokens in {len(self.documents)} documents"
