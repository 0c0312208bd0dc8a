"""Load the microbatches of one data-parallel rank, one step ahead."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import PackedSource, Packing, SampleSource
from megalite.topology.layout import Spans, sequence_spans

Balance = Callable[[int, tuple[tuple[int, ...], ...]], tuple[Spans, ...]]
"""(sequence length, document starts of each sample) -> the spans of each context-parallel rank."""

_PATIENCE = 10.0  # seconds that close() waits for reads in progress


@dataclass(frozen=True)
class Microbatch:
    """Input of one forward pass on one rank; `b` = micro_batch_size, `s` = sequence positions of this rank."""

    tokens: torch.Tensor  # inputs, int64 `[b, s]`
    labels: torch.Tensor  # the token after each input, int64 `[b, s]`
    loss_mask: torch.Tensor  # 1 if the prediction counts in the loss, else 0, float32 `[b, s]`
    sample_ids: tuple[int, ...]
    """Global number of each sample, equal in every layout: the key of dropout streams."""
    document_starts: tuple[tuple[int, ...], ...] | None = None
    """Per sample, the positions in the full sequence at which a document starts, 0 first; None if not requested."""
    mtp_labels: torch.Tensor | None = None
    """Labels of multi-token prediction: the label k positions later for k = 1, 2, ..., int64 `[k, b, s]`; 0 past the
    end."""
    mtp_mask: torch.Tensor | None = None  # 1 if those count in the loss, float32 `[k, b, s]`
    spans: tuple[Spans, ...] | None = None
    """Sequence positions of each context-parallel rank, if they depend on the documents."""


def sample_ids(
    first_sample: int, microbatch: int, *, dp_rank: int, dp_size: int, micro_batch_size: int
) -> tuple[int, ...]:
    """Return the global numbers of the samples in one microbatch of one data-parallel rank (Megatron's order)."""
    first = first_sample + (microbatch * dp_size + dp_rank) * micro_batch_size
    return tuple(range(first, first + micro_batch_size))


_Task = tuple["Future[Microbatch]", Callable[[], Microbatch]]


class _Ahead(NamedTuple):
    """A step that is being prefetched: (first sample, batch size, length), and its microbatches in order."""

    key: tuple[int, int, int]
    microbatches: list["Future[Microbatch]"]


@dataclass(eq=False)
class BatchLoader:
    """Splits a global batch like Megatron: microbatch m of data-parallel rank d contains the samples
    first + (m·dp_size + d)·micro_batch_size + [0, micro_batch_size).

    The loader has no state to save: a run resumes by loading the sample at which it stopped.

    Packed samples provide the positions of their documents. The last token of a document predicts nothing, and the
    padding at the end is one more document without predictions that count."""

    dataset: SampleSource
    _: KW_ONLY
    seq_length: int  # inputs of a sample
    eod_token: int | None
    """End-of-document id; required by eod_mask_loss, and by find_documents unless samples are packed."""
    eod_mask_loss: bool
    """Exclude positions with input eod_token from the loss, because the next token belongs to another document. Ignored
    for packed samples."""
    dp_rank: int
    dp_size: int
    micro_batch_size: int
    cp_rank: int = 0  # context-parallel rank
    cp_size: int = 1
    balance: Balance | None = None
    """Computes the positions of each context-parallel rank; None: `sequence_spans`, independent of the documents."""
    find_documents: bool = False  # find document starts; a document ends with eod_token
    packed: bool = False  # whether `dataset` is a PackedSource
    mtp_num_layers: int = 0  # number of additional tokens that each position predicts (MTP)
    samples: int | None = None
    """Number of samples; later ones only fill the last batch and have no loss. None: no limit."""
    pin: bool = False  # pin the tensors' memory, for asynchronous copies to a GPU
    num_workers: int = 1  # threads that prefetch, one microbatch each; 0: no prefetching

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)
        if (self.eod_mask_loss or self.find_documents) and self.eod_token is None and not self.packed:
            name = "eod_mask_loss" if self.eod_mask_loss else "reset_attention_mask or reset_position_ids"
            raise ConfigError(
                f"{name} is set but the end-of-document token is unknown; set --tokenizer-model to the tokenizer of the data, "
                f"or leave {name} out"
            )
        self.waited = 0.0  # seconds that the last load() took; almost 0 if the batch was prefetched
        self._ahead: _Ahead | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._readers: list[threading.Thread] = []

    def load(self, first_sample: int, global_batch_size: int, length: int | None = None) -> list[Microbatch]:
        """Return this rank's microbatches of the samples [first_sample, first_sample + global_batch_size).

        `length`: truncate samples to this number of inputs; None: do not. Raises ConfigError if the data is invalid."""
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.key == (first_sample, global_batch_size, length or self.seq_length):
            batches = [each.result() for each in ahead.microbatches]
        else:
            for each in () if ahead is None else ahead.microbatches:
                if not each.cancel():
                    each.exception()  # wait: with one reader, no two threads may read a dataset at the same time
            batches = [self.microbatch(ids, length) for ids in self.sample_ids(first_sample, global_batch_size)]
        self.waited = time.perf_counter() - started
        return batches

    def prefetch(self, first_sample: int, global_batch_size: int, length: int | None = None) -> None:
        """Read a step in the background, for a later load() with the same arguments. Cancels another prefetched step,
        except for microbatches in progress."""
        key = (first_sample, global_batch_size, length or self.seq_length)
        if self.num_workers == 0 or (self._ahead is not None and self._ahead.key == key):
            return
        self._drop()
        while len(self._readers) < self.num_workers:
            # Daemon threads, so that a disk that never answers cannot delay the end of the process.
            reader = threading.Thread(target=_work, args=(self._tasks,), name="megalite-loader", daemon=True)
            reader.start()
            self._readers.append(reader)
        self._ahead = _Ahead(key, [])
        for ids in self.sample_ids(first_sample, global_batch_size):
            future: Future[Microbatch] = Future()
            self._ahead.microbatches.append(future)
            self._tasks.put((future, partial(self.microbatch, ids, length)))

    def _drop(self) -> None:
        for each in () if self._ahead is None else self._ahead.microbatches:
            each.cancel()
        self._ahead = None

    def close(self) -> None:
        """End the reader threads, except those blocked by a disk. The loader may still be used afterwards."""
        self._drop()
        for _ in self._readers:
            self._tasks.put(None)
        for reader in self._readers:
            reader.join(_PATIENCE / len(self._readers))
        self._tasks, self._readers = SimpleQueue(), []

    def sample_ids(self, first_sample: int, global_batch_size: int) -> list[tuple[int, ...]]:
        """Return the global numbers of the samples in each of this rank's microbatches."""
        size, dp_size = self.micro_batch_size, self.dp_size
        count, rest = divmod(global_batch_size, size * dp_size)
        assert count and not rest, (global_batch_size, size, dp_size)
        return [
            sample_ids(first_sample, m, dp_rank=self.dp_rank, dp_size=dp_size, micro_batch_size=size)
            for m in range(count)
        ]

    def microbatch(self, ids: tuple[int, ...], length: int | None = None) -> Microbatch:
        samples = np.empty((len(ids), self.seq_length + 1), dtype=np.int64)
        packings: list[Packing | None] = []
        source = cast(PackedSource, self.dataset)  # true if `packed`
        for row, k in zip(samples, ids, strict=True):
            row[:] = source.sample(k)
            packings.append(source.packing(k) if self.packed else None)
        inputs = samples[:, :-1]
        mask = np.ones(inputs.shape, dtype=np.float32)
        for row, count, packing in zip(inputs, mask, packings, strict=True):
            if packing is not None:
                count[packing.used :] = 0.0
                count[[start - 1 for start in packing.starts[1:]]] = 0.0
                if packing.counts is not None:
                    count *= packing.counts
            elif self.eod_mask_loss:
                count[row == self.eod_token] = 0.0
        if self.samples is not None:
            mask[[k >= self.samples for k in ids]] = 0.0
        starts = None
        if self.find_documents:
            starts = tuple(map(self._document_starts, inputs, packings))
        labels = samples[:, 1:]
        length = length or self.seq_length
        if length < self.seq_length:
            inputs, labels, mask = inputs[:, :length], labels[:, :length], mask[:, :length]
            starts = starts and tuple(tuple(start for start in each if start < length) for each in starts)
        arrays: list[NDArray] = [inputs, labels, mask, *self._mtp_targets(labels, mask, starts)]
        all_spans = None
        if self.balance is None:
            spans = sequence_spans(length, cp_rank=self.cp_rank, cp_size=self.cp_size)
        else:
            assert starts is not None
            all_spans = self.balance(length, starts)
            spans = all_spans[self.cp_rank]
        parts = [_local(array, spans) for array in arrays]
        tokens, local_labels, loss_mask, *mtp = (part.pin_memory() if self.pin else part for part in parts)
        mtp_labels, mtp_mask = mtp or (None, None)
        return Microbatch(tokens, local_labels, loss_mask, ids, starts, mtp_labels, mtp_mask, all_spans)

    def _mtp_targets(
        self, labels: NDArray[np.int64], mask: NDArray[np.float32], starts: tuple[tuple[int, ...], ...] | None
    ) -> tuple[NDArray, ...]:
        """Return labels and mask [k, b, s] of multi-token prediction: both shifted by k positions, within a document if
        `starts` is known."""
        if not self.mtp_num_layers:
            return ()
        shifted, counts = (np.zeros((self.mtp_num_layers, *array.shape), dtype=array.dtype) for array in (labels, mask))
        for k in range(1, self.mtp_num_layers + 1):
            shifted[k - 1, :, :-k], counts[k - 1, :, :-k] = labels[:, k:], mask[:, k:]
            for row, positions in zip(counts[k - 1], starts or (), strict=False):
                for start in positions[1:]:
                    row[max(start - k, 0) : start] = 0.0
        return shifted, counts

    def _document_starts(self, tokens: NDArray[np.int64], packing: Packing | None) -> tuple[int, ...]:
        """Return the positions at which a document, or the final padding, starts. An EOD token ends its document."""
        if packing is not None:
            return (*packing.starts, packing.used) if packing.used < len(tokens) else packing.starts
        return (0, *(np.flatnonzero(tokens[:-1] == self.eod_token) + 1).tolist())


def _local(array: NDArray, spans: Spans) -> torch.Tensor:
    """Select the positions of `spans` from an array `[..., seq_length]`."""
    return torch.from_numpy(np.concatenate([array[..., start:stop] for start, stop in spans], axis=-1))


def _work(tasks: "SimpleQueue[_Task | None]") -> None:
    """Run tasks in a reader thread until a None arrives."""
    while (task := tasks.get()) is not None:
        future, read = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read())
            except BaseException as fault:  # otherwise `load` would wait forever
                future.set_exception(fault)
        del task, future, read  # keep no reference to the batch
