"""From samples to the microbatches of one data-parallel rank, loaded one step ahead."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from megalite.config.errors import ConfigError
from megalite.data.sample_source import SampleSource


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass of one rank reads; `b` = micro_batch_size, `s` = the positions that it holds."""

    tokens: torch.Tensor
    """Inputs, int64 `[b, s]`."""
    labels: torch.Tensor
    """The token after each input, int64 `[b, s]`."""
    loss_mask: torch.Tensor
    """1 where the prediction counts, else 0, float32 `[b, s]`."""
    sample_ids: tuple[int, ...]
    """Global number of each sample: the same in every layout, so dropout streams are keyed by it."""
    document_starts: tuple[tuple[int, ...], ...] | None = None
    """Of each sample the positions in the whole sequence at which a document starts, 0 first; None: not looked for."""


def sample_ids(
    first_sample: int, microbatch: int, *, dp_rank: int, dp_size: int, micro_batch_size: int
) -> tuple[int, ...]:
    """Global numbers of the samples in one microbatch of one data-parallel rank (Megatron's cut of a batch)."""
    first = first_sample + (microbatch * dp_size + dp_rank) * micro_batch_size
    return tuple(range(first, first + micro_batch_size))


class BatchLoader:
    """Cuts a global batch as Megatron does: microbatch m of data-parallel rank d holds the samples
    first + (m·dp_size + d)·micro_batch_size + [0, micro_batch_size).

    There is no state to save: a run resumes by asking for the sample it stopped at.

    Args:
        dataset: where samples come from.
        seq_length: inputs of a sample.
        eod_token: end-of-document id; needed for eod_mask_loss alone.
        eod_mask_loss: leave positions whose input is eod_token out of the loss: what follows them is another document.
        dp_rank, dp_size: which share is loaded here.
        micro_batch_size: samples of one microbatch.
        spans: half-open ranges of positions that this rank holds, one after the other; default: the whole sequence.
        find_documents: say where documents start; a document ends with eod_token.
        pin: put tensors where a GPU can copy them from while the host goes on.
    """

    def __init__(
        self,
        dataset: SampleSource,
        *,
        seq_length: int,
        eod_token: int | None,
        eod_mask_loss: bool,
        dp_rank: int,
        dp_size: int,
        micro_batch_size: int,
        spans: tuple[tuple[int, int], ...] | None = None,
        find_documents: bool = False,
        pin: bool = False,
    ) -> None:
        assert 0 <= dp_rank < dp_size, (dp_rank, dp_size)
        if (eod_mask_loss or find_documents) and eod_token is None:
            name = "eod_mask_loss" if eod_mask_loss else "reset_attention_mask or reset_position_ids"
            raise ConfigError(
                f"{name} is set but the end-of-document token is unknown; give the tokenizer that made the data "
                "(--tokenizer-model), or leave it out"
            )
        self.dataset = dataset
        self.seq_length = seq_length
        self.eod_token = eod_token
        self.eod_mask_loss = eod_mask_loss
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.micro_batch_size = micro_batch_size
        self.spans = spans or ((0, seq_length),)
        self.find_documents = find_documents
        self.pin = pin
        self._thread: ThreadPoolExecutor | None = None
        self._ahead: tuple[tuple[int, int], Future[list[Microbatch]]] | None = None

    def load(self, first_sample: int, global_batch_size: int) -> list[Microbatch]:
        """This rank's microbatches of the step that consumes samples [first_sample, first_sample + global_batch_size).

        Raises:
            ConfigError: global_batch_size does not divide by micro_batch_size · dp_size, or the data is bad.
        """
        key = (first_sample, global_batch_size)
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            if ahead[0] == key:
                return ahead[1].result()
            _discard(ahead[1])
        return self._read(*key)

    def prefetch(self, first_sample: int, global_batch_size: int) -> None:
        """Start to load a step in the background; the next load() takes it if it asks for the same samples."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="megalite-loader")
        if self._ahead is not None:
            _discard(self._ahead[1])
        key = (first_sample, global_batch_size)
        self._ahead = (key, self._thread.submit(self._read, *key))

    def close(self) -> None:
        """End the background thread; the loader may still be used."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._ahead = None

    def _read(self, first_sample: int, global_batch_size: int) -> list[Microbatch]:
        chunk = self.micro_batch_size * self.dp_size
        if global_batch_size < chunk or global_batch_size % chunk:
            works = max(1, round(global_batch_size / chunk)) * chunk
            raise ConfigError(
                f"global_batch_size {global_batch_size} does not divide by micro_batch_size {self.micro_batch_size} · "
                f"data-parallel size {self.dp_size} = {chunk}; {works} works"
            )
        return [self._microbatch(first_sample, m) for m in range(global_batch_size // chunk)]

    def _microbatch(self, first_sample: int, microbatch: int) -> Microbatch:
        ids = sample_ids(
            first_sample,
            microbatch,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
            micro_batch_size=self.micro_batch_size,
        )
        samples = torch.from_numpy(np.stack([self.dataset.sample(k) for k in ids]))
        assert samples.shape[1] == self.seq_length + 1, (samples.shape, self.seq_length)
        tokens = torch.cat([samples[:, start:stop] for start, stop in self.spans], dim=1)
        labels = torch.cat([samples[:, start + 1 : stop + 1] for start, stop in self.spans], dim=1)
        if self.eod_mask_loss and self.eod_token is not None:
            loss_mask = torch.ne(tokens, self.eod_token).to(torch.float32)
        else:
            loss_mask = torch.ones_like(tokens, dtype=torch.float32)
        starts = None
        if self.find_documents:
            starts = tuple(_document_starts(sample, self.eod_token) for sample in samples[:, :-1])
        if self.pin:
            tokens, labels, loss_mask = (part.pin_memory() for part in (tokens, labels, loss_mask))
        return Microbatch(tokens, labels, loss_mask, ids, starts)


def _document_starts(tokens: torch.Tensor, eod_token: int | None) -> tuple[int, ...]:
    """0 and every position after an end of document, which belongs to the document that it ends."""
    assert eod_token is not None
    after = torch.eq(tokens[:-1], eod_token).nonzero().flatten() + 1
    return (0, *after.tolist())


def _discard(future: Future[list[Microbatch]]) -> None:
    """Let a load that nobody wants end; datasets are read by one thread at a time."""
    if not future.cancel():
        future.exception()
