"""Compute the perplexity of texts, and the log-likelihoods of the last tokens of sequences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.data.token_files import TokenFiles, require_recorded_tokenizer
from megalite.generation.generate import Chain, whole_vocabulary
from megalite.preprocess.documents import good_texts
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.pieces import Limits
from megalite.tokenizers.base import Tokenizer
from megalite.topology.topology import Topology


@dataclass(frozen=True)
class TokenStream:
    """Concatenated arrays of token ids. Arrays of token files stay on the disk until they are read."""

    parts: Sequence[NDArray[np.integer]]
    text_bytes: int | None = None  # UTF-8 bytes of the text, if known

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        found, first = [], 0
        for part in self.parts:
            found.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return np.concatenate(found).astype(np.int64)


def stream_of_files(prefixes: Sequence[str], vocab_size: int, tokenizer: str | None = None) -> TokenStream:
    """Open the documents of token files, in order. `tokenizer`: fingerprint of the model's tokenizer, if known.

    Raises ConfigError: a file is missing or damaged, has ids beyond `vocab_size`, or records another tokenizer."""
    files = TokenFiles(vocab_size)
    if tokenizer is not None:
        for prefix in prefixes:
            require_recorded_tokenizer(prefix, tokenizer)
    return TokenStream([files.open(prefix).tokens for prefix in prefixes])


def stream_of_texts(patterns: Sequence[str], *, key: str, limits: Limits, tokenizer: Tokenizer) -> TokenStream:
    """Tokenize the documents of text, jsonl or parquet files, each followed by an end of document. `patterns`: see
    `find_inputs`. `key`: key of the text in a line of JSON or a row. Raises ConfigError: a file cannot be read, or has
    an invalid line."""
    parts, text_bytes = [], 0
    end = np.array([tokenizer.eod], dtype=np.int32)
    for texts in good_texts(find_inputs(patterns), key, limits):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            text_bytes += len(text.encode())
            parts += [np.asarray(ids, dtype=np.int32), end]
    if not parts:
        raise ConfigError(f"{' '.join(patterns)}: no text found")
    return TokenStream([np.concatenate(parts)], text_bytes)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Windows over a sequence of `tokens` tokens: inputs of at most `length`, each `stride` after the previous one.

    Every token except the first is predicted and counted once, in the first window that has it as a label. Without
    overlap (stride = length) this is one pass over the tokens, with 0 to length - 1 tokens of context before the input
    that predicts a token. A smaller stride gives all but the first few at least length - stride, for length/stride times
    the work.

    Raises ConfigError: invalid sizes."""

    tokens: int
    length: int
    stride: int

    def __post_init__(self) -> None:
        if self.tokens < 2:
            raise ConfigError(f"there are {self.tokens} tokens; two are needed, to predict the second")
        if self.length < 1:
            raise ConfigError(f"seq_length is {self.length}; it must be at least 1")
        if not 1 <= self.stride <= self.length:
            raise ConfigError(f"stride is {self.stride}; it must be from 1 to seq_length, {self.length}")

    def __len__(self) -> int:
        return 1 + -(-max(0, self.tokens - 1 - self.length) // self.stride)

    def span(self, window: int) -> tuple[int, int, int]:
        """Return token positions (first input, first input with a counted prediction, end of inputs) of a window."""
        start = window * self.stride
        counted = start if window == 0 else start - self.stride + self.length
        return start, counted, min(start + self.length, self.tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    loss: float  # mean cross-entropy per predicted token, in nats
    tokens: int  # predicted tokens
    windows: int
    text_bytes: int | None  # UTF-8 bytes of the text, if known

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Cross-entropy of the text in bits per byte, which is comparable between tokenizers."""
        if self.text_bytes is None:
            return None
        return self.loss * self.tokens / math.log(2) / self.text_bytes


def check_windows(model: ModelConfig, windows: Windows) -> None:
    """Raise ConfigError if a window is longer than the learned positions."""
    limit = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and limit is not None and windows.length > limit:
        raise ConfigError(f"seq_length {windows.length} is above {limit} positions; --seq-length {limit} works")


def measure(chain: Chain, stream: TokenStream, windows: Windows, topology: Topology, *, batch_size: int) -> Perplexity:
    """Compute the perplexity of a stream. It is equal on all ranks and, except for rounding of the losses, in all layouts.

    Batches of windows are distributed over dp and run through the stages one after the other. The losses of windows are
    summed exactly, so that dp and batch size do not change the sum.

    `windows`: windows of this stream, not longer than the model's positions. `batch_size`: windows per forward. Raises
    ConfigError, on every rank: the loss is not finite.

    Collectives: those of the forward; an all-reduce over the world with one number per window."""
    check_windows(chain.stage.config, windows)
    losses = _distribute(
        chain, range(len(windows)), topology, batch_size, lambda batch: _losses(chain, stream, windows, batch)
    )
    predicted = windows.tokens - 1
    loss = math.fsum(losses[:, 0].tolist()) / predicted
    if not math.isfinite(loss):
        raise ConfigError(f"the loss is {loss}: damaged weights, or too large for their type; try --dtype fp32")
    return Perplexity(loss=loss, tokens=predicted, windows=len(windows), text_bytes=stream.text_bytes)


def _distribute(
    chain: Chain,
    items: Sequence[int],
    topology: Topology,
    batch_size: int,
    score: Callable[[Sequence[int]], torch.Tensor | None],
) -> torch.Tensor:
    """Return the results of `score` for the items 0 to n - 1 on every rank, float64 [n, 2]. Batches are distributed
    over dp in the order of `items`. Collectives: those of `score`; an all-reduce over the world."""
    found = torch.zeros(len(items), 2, dtype=torch.float64)
    for first in range(topology.dp.rank * batch_size, len(items), topology.dp.size * batch_size):
        batch = items[first : first + batch_size]
        scores = score(batch)
        if scores is not None and topology.tp.rank == 0:
            found[list(batch), : scores.shape[1]] = scores.cpu()
    chain.drain()
    found = found.to(topology.device)
    topology.world.all_reduce(found)  # exact: for each item all ranks but one have 0
    return found


@torch.no_grad()
def _losses(chain: Chain, stream: TokenStream, windows: Windows, batch: Sequence[int]) -> torch.Tensor | None:
    """Run this stage's forward of a batch of windows. The last stage returns their summed losses, float64 [b, 1]."""
    stage, width = chain.stage, min(windows.length, windows.tokens - 1)
    # The last window may be shorter. Attention is causal, so its padding affects no counted prediction.
    tokens = torch.zeros(len(batch), width + 1, dtype=torch.int64)
    counts = torch.zeros(len(batch), width, dtype=torch.bool)
    if chain.is_first or chain.is_last:
        for row, window in enumerate(batch):
            start, counted, stop = windows.span(window)
            tokens[row, : stop + 1 - start] = torch.from_numpy(stream.read(start, stop + 1))
            counts[row, counted - start : stop - start] = True
    context = stage.generation_context(width)
    x = tokens[:, :-1].to(stage.device) if chain.is_first else chain.receive_activations(width, len(batch))
    if not chain.is_last:
        chain.send_activations(stage(x, context))
        return None
    losses: torch.Tensor = stage(x, context, labels=tokens[:, 1:].to(stage.device))
    return losses.double().masked_fill(~counts.to(stage.device), 0.0).sum(dim=1, keepdim=True)


class Scored(NamedTuple):
    tokens: Sequence[int]
    last: int  # number of tokens at the end to score, given the ones before


def likelihoods(
    chain: Chain, requests: Sequence[Scored], topology: Topology, *, batch_size: int
) -> list[tuple[float, bool]]:
    """Return for each request the summed log-probability of its last tokens, and whether greedy decoding gives them.

    The results are equal on all ranks. Sequences of similar length form a batch, padded at the end; batches are
    distributed over dp.

    Collectives: those of the forward; per request an all-gather over tp; an all-reduce over the world."""
    order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].tokens), index))
    found = _distribute(chain, order, topology, batch_size, lambda batch: _score(chain, [requests[i] for i in batch]))
    return [(total, bool(greedy)) for total, greedy in found.tolist()]


@torch.no_grad()
def _score(chain: Chain, batch: Sequence[Scored]) -> torch.Tensor | None:
    """Run this stage's forward of a batch. The last stage returns log-likelihood and greedy flag, float64 [b, 2]."""
    stage, width = chain.stage, len(batch[0].tokens) - 1
    rows = [[*one.tokens, *[0] * (width + 1 - len(one.tokens))] for one in batch]
    tokens = torch.tensor(rows, dtype=torch.int64, device=stage.device)
    x = tokens[:, :-1] if chain.is_first else chain.receive_activations(width, len(batch))
    x = stage(x, stage.generation_context(width))
    if not chain.is_last:
        chain.send_activations(x)
        return None
    found = []
    for row, one in enumerate(batch):
        end = len(one.tokens) - 1
        logits, labels = (
            whole_vocabulary(stage, x[end - one.last : end, row]),
            tokens[row, end - one.last + 1 : end + 1],
        )
        scores = (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(dim=-1)
        total, likeliest = scores.gather(1, labels.unsqueeze(1)).double().sum(), scores.argmax(dim=-1)
        found.append(torch.stack([total, (likeliest == labels).all().double()]))
    return torch.stack(found)
