"""Training samples cut from documents: sample k is a pure function of (documents, seq_length, seed, k)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.random_draws import permutation

_DOCUMENT_STREAM, _SAMPLE_STREAM = 0, 1


@dataclass(frozen=True)
class _Epoch:
    """Where one epoch's samples are."""

    number: int
    documents: NDArray[np.int64]
    """Sequence numbers in this epoch's order."""
    ends: NDArray[np.int64]
    """Tokens up to and with each of them: the epoch is one stream of tokens."""
    samples: NDArray[np.int64]
    """Which stretch of the stream the epoch's i-th sample is."""


class GPTDataset:
    """An endless sequence of samples over some documents of a token file.

    An epoch lays the documents end to end in a random order and cuts this stream into stretches of seq_length
    tokens plus the one that follows (neighbours share a token: it is the label of one and the input of the other);
    the last partial stretch is dropped. The stretches come in a random order too. Each epoch draws its own two
    orders from (seed, epoch), so that neither a longer run nor a resumed one changes what sample k is.

    Args:
        indexed: the token file.
        documents: sequence numbers that belong to this split.
        seq_length: inputs of a sample; a sample has one token more.
        seed: of the two orders.
        name: of the split, for messages.
        vocab_size: ids must be below it; not checked if None.

    Raises:
        ConfigError: the split holds fewer than seq_length + 1 tokens.
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
    ) -> None:
        assert 0 <= documents.start <= documents.stop <= len(indexed) and documents.step == 1, documents
        self.indexed = indexed
        self.documents = documents
        self.seq_length = seq_length
        self.seed = seed
        self.name = name
        self.vocab_size = vocab_size
        self._sizes = indexed.sizes[documents.start : documents.stop]
        self.num_tokens = int(self._sizes.sum(dtype=np.int64))
        """Tokens of this split."""
        self.samples_per_epoch = (self.num_tokens - 1) // seq_length
        """Samples before a document is seen again."""
        if self.samples_per_epoch < 1:
            raise ConfigError(
                f"{indexed.prefix}: the {name} split holds {self.num_tokens} tokens in {len(documents)} documents, "
                f"fewer than the {seq_length + 1} of one sample with seq_length {seq_length}; give {name} a larger "
                f"share of --split or more documents{self._shorter()}"
            )
        self._epochs: tuple[_Epoch, ...] = ()

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k >= 0: int64 `[seq_length + 1]`; inputs are all but the last token, labels all but the first.

        Raises:
            ConfigError: a token id is not in the vocabulary; names file, document and id.
        """
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        number, within = divmod(k, self.samples_per_epoch)
        epoch = self._epoch(number)
        start = int(epoch.samples[within]) * self.seq_length
        sample = np.empty(self.seq_length + 1, dtype=np.int64)
        position = int(np.searchsorted(epoch.ends, start, side="right"))
        filled = 0
        while filled < len(sample):
            sequence = int(epoch.documents[position])
            left = int(epoch.ends[position]) - (start + filled)
            take = min(left, len(sample) - filled)
            offset = int(self.indexed.sizes[sequence]) - left
            sample[filled : filled + take] = self.indexed.read(sequence, offset, take)
            self._check(sample[filled : filled + take], sequence)
            filled += take
            position += 1
        return sample

    def _epoch(self, number: int) -> _Epoch:
        """Index of one epoch. Two are kept: batches cross from one to the next, and prefetch runs ahead."""
        for epoch in self._epochs:
            if epoch.number == number:
                return epoch
        order = permutation(len(self.documents), seed=self.seed, index=number, stream=_DOCUMENT_STREAM)
        epoch = _Epoch(
            number=number,
            documents=order + self.documents.start,
            ends=np.cumsum(self._sizes[order], dtype=np.int64),
            samples=permutation(self.samples_per_epoch, seed=self.seed, index=number, stream=_SAMPLE_STREAM),
        )
        # One assignment of a new tuple: the prefetch thread may be reading the old one.
        self._epochs = (*self._epochs[-1:], epoch)
        return epoch

    def _check(self, tokens: NDArray[np.int64], sequence: int) -> None:
        if self.vocab_size is None or not len(tokens):
            return
        if tokens.max() >= self.vocab_size or tokens.min() < 0:
            bad = int(tokens[(tokens >= self.vocab_size) | (tokens < 0)][0])
            raise ConfigError(
                f"{self.indexed.bin_path}: document {sequence} holds token id {bad}, outside vocab_size "
                f"{self.vocab_size}; set vocab_size to that of the tokenizer that wrote the file"
            )

    def _shorter(self) -> str:
        """The other way out, where there is one."""
        return f", or set seq_length to at most {self.num_tokens - 1}" if self.num_tokens > 1 else ""
