"""How likely a model finds tokens given those before them: the perplexity of a text, and the ends of given sequences."""

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
    """Arrays of token ids, one after the other; those of token files stay on the disk until they are read."""

    parts: Sequence[NDArray[np.integer]]
    text_bytes: int | None = None  # of UTF-8 text that it stands for; None: not known

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        found, first = [], 0
        for part in self.parts:
            found.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return np.concatenate(found).astype(np.int64)


def stream_of_files(prefixes: Sequence[str], vocab_size: int, tokenizer: str | None = None) -> TokenStream:
    """The documents of token files, in their order, as they were written. `tokenizer`: fingerprint of the model's, where
    it is known. Raises ConfigError: one is missing or damaged, has ids that the model does not know, or records another
    tokenizer."""
    files = TokenFiles(vocab_size)
    if tokenizer is not None:
        for prefix in prefixes:
            require_recorded_tokenizer(prefix, tokenizer)
    return TokenStream([files.open(prefix).tokens for prefix in prefixes])


def stream_of_texts(patterns: Sequence[str], *, key: str, limits: Limits, tokenizer: Tokenizer) -> TokenStream:
    """The documents of text, jsonl or parquet files, each with an end of document behind it. `patterns`: as those of
    `find_inputs`. `key`: of the text in a line of JSON or a row. Raises ConfigError: a file cannot be read, or has a
    line that is no document."""
    parts, text_bytes = [], 0
    end = np.array([tokenizer.eod], dtype=np.int32)
    for texts in good_texts(find_inputs(patterns), key, limits):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            text_bytes += len(text.encode())
            parts += [np.asarray(ids, dtype=np.int32), end]
    if not parts:
        raise ConfigError(f"{' '.join(patterns)}: there is no text")
    return TokenStream([np.concatenate(parts)], text_bytes)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """How a sequence of `tokens` tokens is cut into inputs of at most `length`, each `stride` behind the one before.

    Every token but the first is predicted, and counted once: in the first window that has it as a label. Windows that
    do not overlap (stride = length) take one pass over the tokens, and a token sees from none to length - 1 others before
    the one that predicts it; with a smaller stride each but the first few sees length - stride at least, for length/stride
    times the work.

    Raises ConfigError: sizes that cannot be."""

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
        """(first input, first input with a prediction that counts, end of inputs): places among the tokens."""
        start = window * self.stride
        counted = start if window == 0 else start - self.stride + self.length
        return start, counted, min(start + self.length, self.tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    loss: float  # mean cross-entropy of a predicted token, in nats
    tokens: int  # predicted tokens
    windows: int
    text_bytes: int | None  # bytes of the text that the tokens stand for, if that is known

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float | None:
        """Cross-entropy of the whole text in bits over its bytes: models with different tokenizers can be compared by it."""
        if self.text_bytes is None:
            return None
        return self.loss * self.tokens / math.log(2) / self.text_bytes


def check_windows(model: ModelConfig, windows: Windows) -> None:
    """Raises ConfigError unless learned positions reach as far as a window."""
    limit = model.max_position_embeddings
    if model.position_embedding_type == "learned_absolute" and limit is not None and windows.length > limit:
        raise ConfigError(f"seq_length {windows.length} is above {limit} positions; --seq-length {limit} works")


def measure(chain: Chain, stream: TokenStream, windows: Windows, topology: Topology, *, batch_size: int) -> Perplexity:
    """The perplexity of a stream, the same on every rank and, up to the rounding of the losses themselves, in every layout.

    Batches of windows are dealt out over dp, and run through the stages one after the other. The losses of windows are added up
    exactly, so that neither dp nor the batch size changes a bit of their sum.

    `windows`: of this stream, and of lengths that the model takes. `batch_size`: windows that go through the model
    together. Raises ConfigError: a loss is not a number; the same on every rank.

    Collectives: those of the forward; over the world one all-reduce of a number for each window."""
    check_windows(chain.stage.config, windows)
    losses = _dealt_out(
        chain, range(len(windows)), topology, batch_size, lambda batch: _losses(chain, stream, windows, batch)
    )
    predicted = windows.tokens - 1
    loss = math.fsum(losses[:, 0].tolist()) / predicted
    if not math.isfinite(loss):
        raise ConfigError(f"the loss is {loss}: damaged weights, or too large for their type; try --dtype fp32")
    return Perplexity(loss=loss, tokens=predicted, windows=len(windows), text_bytes=stream.text_bytes)


def _dealt_out(
    chain: Chain,
    items: Sequence[int],
    topology: Topology,
    batch_size: int,
    score: Callable[[Sequence[int]], torch.Tensor | None],
) -> torch.Tensor:
    """What `score` gives for each of the items 0 to n - 1, in float64 [n, numbers], the same on every rank. Batches are
    dealt out over dp in the order of `items`.

    Collectives: those of `score`; an all-reduce over the world."""
    found = torch.zeros(len(items), 2, dtype=torch.float64)
    for first in range(topology.dp.rank * batch_size, len(items), topology.dp.size * batch_size):
        batch = items[first : first + batch_size]
        scores = score(batch)
        if scores is not None and topology.tp.rank == 0:
            found[list(batch), : scores.shape[1]] = scores.cpu()
    chain.drain()
    found = found.to(topology.device)
    topology.world.all_reduce(found)  # one rank has the numbers of an item, the others 0: nothing is rounded
    return found


@torch.no_grad()
def _losses(chain: Chain, stream: TokenStream, windows: Windows, batch: Sequence[int]) -> torch.Tensor | None:
    """This stage's part of the forward of some windows; on the last the sum of what counts in each, float64 [b, 1]."""
    stage, width = chain.stage, min(windows.length, windows.tokens - 1)
    # A window at the end may be shorter: nothing sees what is behind its end, and nothing of that counts.
    tokens = torch.zeros(len(batch), width + 1, dtype=torch.int64)
    counts = torch.zeros(len(batch), width, dtype=torch.bool)
    if chain.is_first or chain.is_last:
        for row, window in enumerate(batch):
            start, counted, stop = windows.span(window)
            tokens[row, : stop + 1 - start] = torch.from_numpy(stream.read(start, stop + 1))
            counts[row, counted - start : stop - start] = True
    context = stage.generation_context(width)
    x = tokens[:, :-1].to(stage.device) if chain.is_first else chain.activations(width, len(batch))
    if not chain.is_last:
        chain.pass_on(stage(x, context))
        return None
    losses: torch.Tensor = stage(x, context, labels=tokens[:, 1:].to(stage.device))
    return losses.double().masked_fill(~counts.to(stage.device), 0.0).sum(dim=1, keepdim=True)


class Scored(NamedTuple):
    tokens: Sequence[int]
    last: int  # so many at the end are scored, given all those before


def likelihoods(
    chain: Chain, requests: Sequence[Scored], topology: Topology, *, batch_size: int
) -> list[tuple[float, bool]]:
    """Of each the sum of the log-probabilities of its last tokens, and whether each of them is the likeliest; the same on
    every rank, in the order of the requests.

    Sequences of like length go through together, padded at their ends, which nothing sees; batches are dealt out over dp.

    Collectives: those of the forward; for each request an all-gather over tp; an all-reduce over the world."""
    order = sorted(range(len(requests)), key=lambda index: (-len(requests[index].tokens), index))
    found = _dealt_out(chain, order, topology, batch_size, lambda batch: _score(chain, [requests[i] for i in batch]))
    return [(total, bool(greedy)) for total, greedy in found.tolist()]


@torch.no_grad()
def _score(chain: Chain, batch: Sequence[Scored]) -> torch.Tensor | None:
    """This stage's part of a forward; on the last [b, 2] in float64."""
    stage, width = chain.stage, len(batch[0].tokens) - 1
    rows = [[*one.tokens, *[0] * (width + 1 - len(one.tokens))] for one in batch]
    tokens = torch.tensor(rows, dtype=torch.int64, device=stage.device)
    x = tokens[:, :-1] if chain.is_first else chain.activations(width, len(batch))
    x = stage(x, stage.generation_context(width))
    if not chain.is_last:
        chain.pass_on(x)
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
