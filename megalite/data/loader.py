"""From samples to the microbatches of one data-parallel rank, loaded one step ahead."""

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
"""From the length of sequences and the documents' starts of a microbatch to what each context-parallel rank holds."""

_PATIENCE = 10.0  # seconds that close() waits for reads in progress


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass of one rank reads; `b` = micro_batch_size, `s` = the positions that it holds."""

    tokens: torch.Tensor  # inputs, int64 `[b, s]`
    labels: torch.Tensor  # the token after each input, int64 `[b, s]`
    loss_mask: torch.Tensor  # 1 where the prediction counts, else 0, float32 `[b, s]`
    sample_ids: tuple[int, ...]
    """Global number of each sample: the same in every layout, so dropout streams are keyed by it."""
    document_starts: tuple[tuple[int, ...], ...] | None = None
    """Of each sample the positions in the whole sequence at which a document starts, 0 first; None: not looked for."""
    mtp_labels: torch.Tensor | None = None
    """The label k positions on, for each number k of further tokens that are predicted, int64 `[k, b, s]`; 0 behind the end."""
    mtp_mask: torch.Tensor | None = None  # 1 where those count, float32 `[k, b, s]`
    spans: tuple[Spans, ...] | None = None
    """What each context-parallel rank holds of the sequences, where that depends on their documents."""


def sample_ids(
    first_sample: int, microbatch: int, *, dp_rank: int, dp_size: int, micro_batch_size: int
) -> tuple[int, ...]:
    """Global numbers of the samples in one microbatch of one data-parallel rank (Megatron's cut of a batch)."""
    first = first_sample + (microbatch * dp_size + dp_rank) * micro_batch_size
    return tuple(range(first, first + micro_batch_size))


_Task = tuple["Future[Microbatch]", Callable[[], Microbatch]]


class _Ahead(NamedTuple):
    """A step that is being read: its first sample, batch size and length, and its microbatches in order."""

    key: tuple[int, int, int]
    microbatches: list["Future[Microbatch]"]


@dataclass(eq=False)
class BatchLoader:
    """Cuts a global batch as Megatron does: microbatch m of data-parallel rank d holds the samples
    first + (m·dp_size + d)·micro_batch_size + [0, micro_batch_size).

    There is no state to save: a run resumes by asking for the sample it stopped at.

    Packed samples themselves have the places of their documents. The last token of each predicts nothing, and the
    padding after them is one more document, none of its predictions counting.
    """

    dataset: SampleSource
    _: KW_ONLY
    seq_length: int  # inputs of a sample
    eod_token: int | None
    """End-of-document id; needed for eod_mask_loss, and to find the documents of samples not packed."""
    eod_mask_loss: bool
    """Leave positions with eod_token as input out of the loss: what follows is another document. Packed samples ignore
    it."""
    dp_rank: int
    dp_size: int
    micro_batch_size: int
    cp_rank: int = 0  # this rank among those that share sequences
    cp_size: int = 1
    """How many those are."""
    balance: Balance | None = None
    """What each of those holds; None: `sequence_spans`, whatever the documents are."""
    find_documents: bool = False  # find where documents start; a document ends with eod_token
    packed: bool = False  # the dataset's samples are packed
    mtp_num_layers: int = 0  # further tokens that each position predicts
    pin: bool = False  # pin the tensors' memory, for asynchronous copies to a GPU
    num_workers: int = 1  # threads that read ahead, each a microbatch; 0: the caller of `load` reads

    def __post_init__(self) -> None:
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)
        if (self.eod_mask_loss or self.find_documents) and self.eod_token is None and not self.packed:
            name = "eod_mask_loss" if self.eod_mask_loss else "reset_attention_mask or reset_position_ids"
            raise ConfigError(
                f"{name} is set but the end-of-document token is unknown; give the tokenizer that made the data "
                "(--tokenizer-model), or leave it out"
            )
        self.waited = 0.0  # seconds that the last load() took: next to nothing where the batch was ready
        self._ahead: _Ahead | None = None
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._readers: list[threading.Thread] = []

    def load(self, first_sample: int, global_batch_size: int, length: int | None = None) -> list[Microbatch]:
        """This rank's microbatches of the step that consumes samples [first_sample, first_sample + global_batch_size), of each
        the first `length` inputs; None: all.

        Raises ConfigError: the data is bad."""
        started = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.key == (first_sample, global_batch_size, length or self.seq_length):
            batches = [each.result() for each in ahead.microbatches]
        else:
            for each in () if ahead is None else ahead.microbatches:
                if not each.cancel():
                    each.exception()  # in progress: with one reader, datasets are read by one thread at a time
            batches = [self.microbatch(ids, length) for ids in self.sample_ids(first_sample, global_batch_size)]
        self.waited = time.perf_counter() - started
        return batches

    def prefetch(self, first_sample: int, global_batch_size: int, length: int | None = None) -> None:
        """Have a step read in the background; the next load() takes it if it asks for the same samples. Of another one that
        is not wanted any more, microbatches in progress are still read."""
        key = (first_sample, global_batch_size, length or self.seq_length)
        if self.num_workers == 0 or (self._ahead is not None and self._ahead.key == key):
            return
        self._drop()
        while len(self._readers) < self.num_workers:
            # Daemons: a disk that never answers must not delay the end of the process.
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
        """End the readers, but for those that wait for a disk that does not answer; the loader may still be used."""
        self._drop()
        for _ in self._readers:
            self._tasks.put(None)
        for reader in self._readers:
            reader.join(_PATIENCE / len(self._readers))
        self._tasks, self._readers = SimpleQueue(), []

    def sample_ids(self, first_sample: int, global_batch_size: int) -> list[tuple[int, ...]]:
        """Global numbers of the samples in each of this rank's microbatches."""
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
        source = cast(PackedSource, self.dataset)  # where `packed`
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
        starts = None
        if self.find_documents:
            starts = tuple(map(self._document_starts, inputs, packings))
        labels = samples[:, 1:]
        length = length or self.seq_length
        if length < self.seq_length:
            inputs, labels, mask = inputs[:, :length], labels[:, :length], mask[:, :length]
            starts = starts and tuple(tuple(start for start in each if start < length) for each in starts)
        arrays: list[NDArray] = [inputs, labels, mask, *self._mtp_targets(labels, mask, starts)]
        held = None
        if self.balance is None:
            spans = sequence_spans(length, cp_rank=self.cp_rank, cp_size=self.cp_size)
        else:
            assert starts is not None
            held = self.balance(length, starts)
            spans = held[self.cp_rank]
        parts = [_local(array, spans) for array in arrays]
        tokens, local_labels, loss_mask, *mtp = (part.pin_memory() if self.pin else part for part in parts)
        mtp_labels, mtp_mask = mtp or (None, None)
        return Microbatch(tokens, local_labels, loss_mask, ids, starts, mtp_labels, mtp_mask, held)

    def _mtp_targets(
        self, labels: NDArray[np.int64], mask: NDArray[np.float32], starts: tuple[tuple[int, ...], ...] | None
    ) -> tuple[NDArray, ...]:
        """Labels and mask [k, b, s] of further tokens: what counts k positions on, within one document where these are looked
        for."""
        if not self.mtp_num_layers:
            return ()
        moved, counts = (np.zeros((self.mtp_num_layers, *array.shape), dtype=array.dtype) for array in (labels, mask))
        for k in range(1, self.mtp_num_layers + 1):
            moved[k - 1, :, :-k], counts[k - 1, :, :-k] = labels[:, k:], mask[:, k:]
            for row, places in zip(counts[k - 1], starts or (), strict=False):
                for start in places[1:]:
                    row[max(start - k, 0) : start] = 0.0
        return moved, counts

    def _document_starts(self, tokens: NDArray[np.int64], packing: Packing | None) -> tuple[int, ...]:
        """Positions at which a document, or the padding after the last, starts; an end of document belongs to its own."""
        if packing is not None:
            return (*packing.starts, packing.used) if packing.used < len(tokens) else packing.starts
        return (0, *(np.flatnonzero(tokens[:-1] == self.eod_token) + 1).tolist())


def _local(array: NDArray, spans: Spans) -> torch.Tensor:
    """These positions of an array `[..., seq_length]`."""
    return torch.from_numpy(np.concatenate([array[..., start:stop] for start, stop in spans], axis=-1))


def _work(tasks: "SimpleQueue[_Task | None]") -> None:
    """A reader's life: one task after the other until there is None."""
    while (task := tasks.get()) is not None:
        future, read = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(read())
            except BaseException as fault:  # `load` would wait forever
                future.set_exception(fault)
        del task, future, read  # the batch is the step's alone
