"""Megatron-LM's order of samples: the arrays that its GPTDataset makes, value for value and type for type.

One `numpy.random.RandomState(seed)`, whose stream numpy has frozen, is drawn from in this order: the document index, then
the shuffle index. (megatron-core 0.5 to 0.16: gpt_dataset.py, helpers.cpp.)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.data.index_cache import Arrays
from megalite.data.indexed_dataset import IndexedDataset

_BLOCK = 1 << 20
_INT32_MAX = (1 << 31) - 1
_LAST_EPOCH = 0.80
"""A last epoch that gives fewer of its samples than this is shuffled by itself."""


@dataclass(frozen=True)
class MegatronPlan:
    """What follows from the numbers alone."""

    epochs: int
    """As few as hold the samples asked for."""
    num_samples: int
    """All that fit into the tokens of these epochs: at least as many as asked for."""
    shuffled_apart: int | None
    """Samples before the last epoch, if that is shuffled by itself, documents and samples; else None."""

    @classmethod
    def of(cls, *, num_tokens: int, num_samples: int | None, seq_length: int) -> "MegatronPlan":
        """The plan for an epoch of `num_tokens` > 0 tokens; num_samples None asks for one epoch."""
        assert num_tokens > 0, num_tokens
        epochs = 1
        if num_samples is not None:
            epochs = max(1, -(-(num_samples * seq_length + 1) // num_tokens))
        apart = None
        if epochs > 1:
            assert num_samples is not None
            before_last = ((epochs - 1) * num_tokens - 1) // seq_length
            per_epoch = (num_tokens - 1) // seq_length
            if num_samples - before_last < int(_LAST_EPOCH * per_epoch):
                apart = before_last
        return cls(epochs, (epochs * num_tokens - 1) // seq_length, apart)

    def arrays(self, documents: int) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Types and shapes of the three arrays for so many documents an epoch."""
        places = documents * self.epochs
        return {
            "document_index": (np.dtype(np.int32), (places,)),
            "sample_index": (
                np.dtype(np.int32 if places <= _INT32_MAX else np.int64),
                (self.num_samples + 1, 2),
            ),
            "shuffle_index": (
                np.dtype(np.uint32 if self.num_samples < (1 << 32) - 2 else np.int64),
                (self.num_samples,),
            ),
        }


def fill_megatron_arrays(
    arrays: Arrays,
    plan: MegatronPlan,
    *,
    indexed: IndexedDataset,
    documents: range,
    seq_length: int,
    seed: int,
) -> None:
    """Fill the three arrays.

    Args:
        arrays: `document_index` [epochs·documents]: sequence numbers, all epochs of them; `sample_index` [samples + 1, 2]:
            where in it each sample starts (place, token); `shuffle_index` [samples]: which of those sample k is.
    """
    random = np.random.RandomState(seed)
    document_index, shuffle_index = arrays["document_index"], arrays["shuffle_index"]
    epoch = np.arange(documents.start, documents.stop, dtype=np.int32)
    apart = len(document_index) if plan.shuffled_apart is None else (plan.epochs - 1) * len(epoch)
    for part in (document_index[:apart], document_index[apart:]):
        part.reshape(-1, len(epoch))[:] = epoch
        if len(part):
            random.shuffle(part)
    # A copy, since those of the file may lie at odd addresses, which numpy would copy block by block.
    sizes = np.array(indexed.sizes[documents.start : documents.stop])
    _fill_sample_index(arrays["sample_index"], document_index, sizes, documents.start, seq_length)
    shuffle_index[:] = np.arange(len(shuffle_index), dtype=shuffle_index.dtype)
    apart = len(shuffle_index) if plan.shuffled_apart is None else plan.shuffled_apart
    for part in (shuffle_index[:apart], shuffle_index[apart:]):
        if len(part):
            random.shuffle(part)


def _fill_sample_index(
    sample_index: NDArray[np.signedinteger],
    document_index: NDArray[np.int32],
    sizes: NDArray[np.int32],
    first_document: int,
    seq_length: int,
) -> None:
    """Sample i starts at token i·seq_length of the documents laid end to end; row i says where that is.

    In blocks of documents, and of samples within them, so that the temporaries have a fixed size.
    """
    sample_index[0] = 0  # also where the first documents hold nothing
    total, samples = 0, len(sample_index)
    next_sample = 1
    for first in range(0, len(document_index), _BLOCK):
        lengths = sizes[document_index[first : first + _BLOCK] - first_document]
        ends = total + np.cumsum(lengths, dtype=np.int64)
        total = ends.item(len(ends) - 1)
        here = min(samples, -(-total // seq_length))  # samples that start before `total`
        while next_sample < here:
            stop = min(here, next_sample + _BLOCK)
            starts = np.arange(next_sample, stop, dtype=np.int64) * seq_length
            places = ends.searchsorted(starts, "right")
            sample_index[next_sample:stop, 0] = places + first
            sample_index[next_sample:stop, 1] = starts - (ends[places] - lengths[places])
            next_sample = stop
    assert next_sample == samples, (next_sample, samples)
