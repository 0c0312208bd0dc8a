"""Samples of whole documents, packed by best fit: sample k is a pure function of (documents, seq_length, seed, k)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.document_dataset import DocumentDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.packing import best_fit
from megalite.data.random_draws import KeyedPermutation, permutation
from megalite.data.sample_source import Packing

_DOCUMENT_STREAM, _SAMPLE_STREAM = 0, 1


@dataclass(frozen=True)
class _Piece:
    """A stretch of a document that lies in one sample."""

    sequence: int
    start: int
    """Tokens of the document before it."""
    length: int
    """Its tokens; each but the first is the label of the one before."""


@dataclass(frozen=True)
class _Epoch:
    """Which documents go together in one epoch."""

    number: int
    documents: NDArray[np.int64] | NDArray[np.int32]
    """Documents of the split that have a last piece, in the order of their bins."""
    samples: KeyedPermutation
    """What the epoch's i-th sample is: a full piece, or, counted after those, a bin."""


class PackedDataset(DocumentDataset):
    """An endless sequence of samples, each of whole documents that see only themselves.

    A document of L tokens has L - 1 predictions, and all of them are made once an epoch. One with at most seq_length
    of them is never cut. A longer one is cut after each seq_length predictions: such a piece fills a sample, and its
    last label is the first token of the next piece. What is left over, and the documents that are short, are packed
    into as few samples as best fit needs; the lengths that go together are the same in each epoch, but which
    documents of those lengths, and the order of the samples, are drawn from (seed, epoch). So neither a longer run
    nor a resumed one changes what sample k is. A document of fewer than two tokens predicts nothing and is left out.

    A sample holds seq_length inputs and one token more; a document that ends on that token is the only one whose last
    token is no input (see `Packing`). After the last document comes `pad_token`. A document is a sequence of the file:
    end-of-document tokens within one have no part in this.

    Args:
        indexed: the token file.
        documents: sequence numbers that belong to this split.
        seq_length: inputs of a sample; a sample has one token more.
        seed: of the draws.
        name: of the split, for messages.
        vocab_size: ids must be below it; not checked if None.
        pad_token: what stands where no document is.

    Raises:
        ConfigError: no document of the split has two tokens.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        documents: range,
        seq_length: int,
        seed: int,
        name: str,
        vocab_size: int | None = None,
        pad_token: int = 0,
    ) -> None:
        super().__init__(
            indexed,
            documents=documents,
            seq_length=seq_length,
            seed=seed,
            name=name,
            vocab_size=vocab_size,
        )
        self.pad_token = pad_token
        predictions = self._predictions()
        self.num_predictions = int(predictions.sum())
        """Labels that count in an epoch: every token of the split that is not the first of its document."""
        # Up to and with each document: where a full piece is found by its number.
        self._full_ends = np.cumsum(predictions // seq_length)
        self._full = int(self._full_ends[-1]) if len(predictions) else 0
        rest = predictions % seq_length
        counts = np.bincount(rest[rest > 0] + 1, minlength=seq_length + 2)
        self._bins = best_fit(counts, seq_length + 1)
        self._bin_ends = np.cumsum(self._bins.items())
        """Documents in a bin and in those before it."""
        self.samples_per_epoch = self._full + self._bins.count
        """Samples before a document is seen again."""
        if self.samples_per_epoch < 1:
            raise ConfigError(
                f"{self._holds}, none "
                f"of which has the two that a prediction needs; give {name} a larger share of --split or more documents"
            )
        self._epochs: tuple[_Epoch, ...] = ()
        self._last: tuple[int, list[_Piece]] = (-1, [])

    @property
    def idle_share(self) -> float:
        """Share of the positions of an epoch that predict nothing: padding and last tokens of documents."""
        return 1.0 - self.num_predictions / (self.samples_per_epoch * self.seq_length)

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k >= 0: int64 `[seq_length + 1]`, documents end to end and then padding.

        Raises:
            ConfigError: a token id is not in the vocabulary; names file, document and id.
        """
        sample = np.full(self.seq_length + 1, self.pad_token, dtype=np.int64)
        position = 0
        for piece in self._pieces(k):
            tokens = self._reader.read(np.array([piece.sequence]), 0, piece.start, piece.length)
            sample[position : position + piece.length] = tokens
            position += piece.length
        return sample

    def packing(self, k: int) -> Packing:
        """Where the documents of sample k are."""
        starts, position = [], 0
        for piece in self._pieces(k):
            starts.append(position)
            position += piece.length
        return Packing(starts=tuple(starts), used=position - 1)

    def _pieces(self, k: int) -> list[_Piece]:
        """What sample k holds, in order. The last answer is kept: `sample` and `packing` are asked in turn."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        last, pieces = self._last
        if last != k:
            pieces = self._found_pieces(k)
            # One assignment: the prefetch thread may be reading the old one.
            self._last = (k, pieces)
        return pieces

    def _found_pieces(self, k: int) -> list[_Piece]:
        number, within = divmod(k, self.samples_per_epoch)
        epoch = self._epoch(number)
        index = epoch.samples(within)
        if index < self._full:
            document = int(np.searchsorted(self._full_ends, index, side="right"))
            before = int(self._full_ends[document - 1]) if document else 0
            start = (index - before) * self.seq_length
            return [_Piece(self.documents.start + document, start, self.seq_length + 1)]
        index -= self._full
        first = int(self._bin_ends[index - 1]) if index else 0
        return [
            self._last_piece(int(document))
            for document in epoch.documents[first : int(self._bin_ends[index])]
        ]

    def _last_piece(self, document: int) -> _Piece:
        size = int(self._sizes[document])
        start = (size - 1) // self.seq_length * self.seq_length
        return _Piece(self.documents.start + document, start, size - start)

    def _predictions(self) -> NDArray[np.int64]:
        """Predictions of each document, `[documents]`."""
        return np.maximum(self._sizes.astype(np.int64) - 1, 0)

    def _epoch(self, number: int) -> _Epoch:
        """One epoch's dealing. Two are kept: batches cross from one to the next, and prefetch runs ahead."""
        for epoch in self._epochs:
            if epoch.number == number:
                return epoch
        rest = self._predictions() % self.seq_length
        documents = np.flatnonzero(rest)
        if len(self.documents) < 1 << 31:
            documents = documents.astype(np.int32)
        if self.seq_length < 1 << 16:
            rest = rest.astype(np.uint16)  # numpy sorts these by radix
        order = permutation(len(documents), seed=self.seed, index=number, stream=_DOCUMENT_STREAM)
        documents = documents[order]
        # Bins take any document of a length: by length in ascending order, at random within one, as `of_items` counts.
        documents = documents[np.argsort(rest[documents], kind="stable")]
        documents = documents[np.argsort(self._bins.of_items(), kind="stable")]
        samples = KeyedPermutation(
            self.samples_per_epoch, seed=self.seed, index=number, stream=_SAMPLE_STREAM
        )
        epoch = _Epoch(number=number, documents=documents, samples=samples)
        # One assignment of a new tuple: the prefetch thread may be reading the old one.
        self._epochs = (*self._epochs[-1:], epoch)
        return epoch
