"""Read prompts, choose tokens, build the texts incrementally, and group continuations into batches."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.data.dataset import raw_draws
from megalite.models.context import KeyValueCache
from megalite.preprocess.documents import good_texts, parse_line, parse_object
from megalite.preprocess.inputs import STDIN, Input, Kind, open_regular
from megalite.preprocess.pieces import Limits
from megalite.preprocess.sft import messages_of

NOT_A_NUMBER = -1  # replaces a token if its logits contain a NaN, so that every rank raises the error


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of choosing the next token, applied in the order of the fields.

    `repetition_penalty` r (arXiv 1909.05858) divides the logits of tokens that occur in the prompt or text by r, or
    multiplies them by r if they are negative. `temperature` 0 chooses the likeliest token; otherwise it divides the
    logits. Sampling is restricted to the `top_k` likeliest tokens, and among them to the fewest that reach `top_p`."""

    max_new_tokens: int = 100
    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        rules = {
            "max_new_tokens": (self.max_new_tokens >= 1, "at least 1"),
            "repetition_penalty": (0.0 < self.repetition_penalty < math.inf, "above 0, e.g. 1.2 (1 changes nothing)"),
            "temperature": (0.0 <= self.temperature < math.inf, "0 (greedy) or above, e.g. 0.8"),
            "top_k": (self.top_k is None or self.top_k >= 1, "at least 1, e.g. 50"),
            "top_p": (self.top_p is None or 0.0 < self.top_p <= 1.0, "above 0 and at most 1, e.g. 0.95"),
        }
        for name, (holds, wanted) in rules.items():
            if not holds:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be {wanted}")


class Draws:
    """Random numbers in (0, 1) for the tokens of one text. They depend only on the arguments, not on the other prompts or
    the layout. `prompt`: token ids. `copy`: number of equal prompts before this one, so that they get different texts."""

    def __init__(self, seed: int, prompt: Sequence[int], copy: int) -> None:
        words = f"{seed}\0{copy}\0{' '.join(map(str, prompt))}".encode()
        digest = hashlib.blake2b(words, digest_size=16).digest()
        self._seed, self._index = (int.from_bytes(half, "little") for half in (digest[:8], digest[8:]))

    def __call__(self, number: int) -> float:
        word = int(raw_draws(1, seed=self._seed, index=self._index, stream=number)[0])
        return ((word >> 12) + 0.5) / (1 << 52)


def choose(
    logits: torch.Tensor, sampling: Sampling, draws: Sequence[float], *, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """Choose the next token of each row, int64 [b]; NOT_A_NUMBER if a logit is NaN. `logits`: [b, vocab_size], bitwise
    equal on every calling rank. `draws`: [b] in (0, 1), unused if the temperature is 0. `seen`: boolean [b,
    vocab_size], the tokens of prompt and text, for a repetition penalty."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    broken = logits.isnan().any(dim=-1)
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    chosen = logits.argmax(dim=-1) if sampling.temperature == 0.0 else _drawn(logits, sampling, draws)
    return chosen.masked_fill(broken, NOT_A_NUMBER)


def _drawn(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> torch.Tensor:
    """Sample the token of each row by inverting the cumulative distribution at the row's draw."""
    size = logits.shape[-1]
    scaled, order = logits.double() / sampling.temperature, None
    # The sort is stable, so that equal logits are ordered by id on every device.
    if sampling.top_k is not None or sampling.top_p is not None:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        size = min(sampling.top_k or size, size)
    probabilities = scaled[:, :size].softmax(dim=-1)
    if sampling.top_p is not None:
        # Keep a token if the tokens before it do not reach p, so the likeliest is always kept.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    reached = probabilities.cumsum(dim=-1)
    at = torch.tensor(draws, dtype=reached.dtype, device=reached.device).unsqueeze(-1) * reached[:, -1:]
    place = torch.searchsorted(reached, at, right=True).clamp(max=size - 1)
    return (place if order is None else order.gather(-1, place)).squeeze(-1)


_JSON_SUFFIXES = (".jsonl", ".ndjson")
_MAX_BYTES = 1 << 30


def read_prompts(path: str, key: str | None, *, chat: bool = False) -> list[Any]:
    """Read the prompts of a file: the texts under `key` of a .jsonl file, otherwise the non-blank lines. `path`: a
    file, or `-` for standard input. `key`: default `prompt`, or `messages` with `chat`. `chat`: also accept lists of
    messages as prompts. Raises ConfigError: the file cannot be read, has an invalid line or no prompt, or `key` has no
    effect."""
    is_json = Path(path).suffix.lower() in _JSON_SUFFIXES
    if key is not None and not is_json:
        raise ConfigError(f"--prompt-key {key} has no effect on {path}; leave it out, or give a .jsonl file")
    limits = Limits(max_document_bytes=_MAX_BYTES, text_documents="line")
    source = _source(path, "jsonl" if is_json else "text")
    key = key or ("messages" if chat else "prompt")
    found = good_texts([source], key, limits, _parse_chat if chat else None)
    prompts = [prompt for texts in found for prompt in texts]
    if not prompts:
        raise ConfigError(f"{path} has no prompts; write one per line")
    return prompts


def _parse_chat(raw: bytes, keys: Sequence[str]) -> list[Any]:
    (key,) = keys
    value = parse_object(raw).get(key)
    return [messages_of(value, key)] if isinstance(value, list) else parse_line(raw, keys)


def _source(path: str, kind: Kind) -> Input:
    if path == STDIN:
        return Input(path, kind, None, None)
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES:,} bytes; give prompts, not a corpus")
    return Input(path, kind, None, size)


_INCOMPLETE = "\ufffd"  # decoded from incomplete UTF-8
_BEFORE = 6  # prompt tokens decoded together with the first new one, because some tokenizers drop a leading space


class GrowingText:
    """The text of new tokens, decoded incrementally. Later tokens never change text that `take` has returned.

    So incomplete characters at the end, and text that may be the beginning of a stop string, are held back.

    `decode`: decodes token ids. `prompt`: tokens of the prompt. `stops`: the text ends before the first of these strings.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.stopped = False  # whether a stop string was found
        self._decode, self._stops = decode, stops
        self._held_back = max(map(len, stops), default=1) - 1
        self._ids = list(prompt[-_BEFORE:])
        self._first, self._decoded = 0, len(self._ids)
        self._taken = 0

    def push(self, token: int) -> None:
        """Add a token. Decodes only the last few tokens, so the time per token does not grow with the text."""
        self._ids.append(token)
        new = self._new()
        if new and not new.endswith(_INCOMPLETE):
            self._first, self._decoded = self._decoded, len(self._ids)
            self._add(new)

    def finish(self) -> None:
        """End the text: add the text that was held back, including incomplete characters."""
        if not self.stopped:
            self._add(self._new())
        self._decoded = len(self._ids)
        self._held_back = 0

    def take(self) -> str:
        """Return the text that has become final since the last call."""
        end = len(self.text) if self.stopped else max(self._taken, len(self.text) - self._held_back)
        start, self._taken = self._taken, end
        return self.text[start:end]

    def _new(self) -> str:
        before = self._decode(self._ids[self._first : self._decoded])
        return self._decode(self._ids[self._first :])[len(before) :]

    def _add(self, new: str) -> None:
        look_from = max(0, len(self.text) - self._held_back)
        self.text += new
        found = [at for stop in self._stops if (at := self.text.find(stop, look_from)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True


MakeText = Callable[[Sequence[int]], GrowingText]  # creates the text for a prompt's tokens


@dataclass(kw_only=True, eq=False)
class Continuation:
    """A prompt and its new tokens."""

    index: int
    prompt: tuple[int, ...]
    draws: Draws
    text: GrowingText | None
    new: list[int] = field(default_factory=list)  # new tokens, without the end of document
    finish: str | None = None  # why it has ended: `eod`, `stop` (string) or `length`; None: it has not

    @property
    def last(self) -> int:
        return self.new[-1] if self.new else self.prompt[-1]

    def take(self, token: int, *, stop_token_ids: frozenset[int], max_new_tokens: int) -> None:
        """Add a chosen token. Raises ConfigError, on every rank: the token is NOT_A_NUMBER."""
        if token == NOT_A_NUMBER:
            raise ConfigError(f"prompt {self.index + 1}: logits are not numbers; try --dtype fp32")
        if token in stop_token_ids:
            self.finish = "eod"
        else:
            self.new.append(token)
            if self.text is not None:
                self.text.push(token)
            if self.text is not None and self.text.stopped:
                self.finish = "stop"
            elif len(self.new) == max_new_tokens:
                self.finish = "length"
        if self.finish is not None and self.text is not None:
            self.text.finish()


def continuations_of(
    prompts: Sequence[Sequence[int]], sampling: Sampling, make_text: MakeText | None
) -> list[Continuation]:
    copies: Counter[tuple[int, ...]] = Counter()
    found = []
    for index, prompt in enumerate(map(tuple, prompts)):
        text = None if make_text is None else make_text(prompt)
        draws = Draws(sampling.seed, prompt, copies[prompt])
        found.append(Continuation(index=index, prompt=prompt, draws=draws, text=text))
        copies[prompt] += 1
    return found


def check_prompts(model: ModelConfig, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raise ConfigError if a prompt is empty, has unknown tokens, or leaves too few positions for the new tokens."""
    limit, vocab_size = model.max_position_embeddings, model.vocab_size
    assert vocab_size is not None
    if not prompts:
        raise ConfigError("there is no prompt; give one with --prompt, or a file of them with --prompts")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ConfigError(f"prompt {number} has no tokens; give at least one character of text")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ConfigError(f"prompt {number} has token {bad}, not below vocab_size {vocab_size}; use its tokenizer")
        if model.position_embedding_type != "learned_absolute" or limit is None:
            continue
        room = limit - len(prompt)
        if sampling.max_new_tokens > room:
            raise ConfigError(
                f"prompt {number} has {len(prompt)} tokens and max_new_tokens is {sampling.max_new_tokens}, but the model "
                f"has {limit} positions; " + (f"--max-new-tokens {room} works" if room > 0 else "give a shorter prompt")
            )


class Batch:
    """A batch of continuations that are processed together. Each step produces one token per row.

    The first step processes the prompts, padded at the end to the longest; layers with linear attention skip the padding.
    Later steps process one token per row, each at its own position. Rows that have ended are removed.

    `rows`: at least one. `max_new_tokens`: per row."""

    def __init__(self, rows: Sequence[Continuation], max_new_tokens: int) -> None:
        self.rows = list(rows)
        self.lengths = [0 for _ in rows]  # tokens of each row in the cache
        self.cache = KeyValueCache(max(len(row.prompt) for row in rows) + max_new_tokens)
        self.chosen: torch.Tensor | None = None  # on the last stage: int64 [b], tokens of the last step
        self.seen: torch.Tensor | None = None  # on the last stage, for a repetition penalty: boolean [b, vocab_size]

    @property
    def is_new(self) -> bool:
        return self.lengths[0] == 0

    @property
    def width(self) -> int:
        """Number of tokens per row in the next step."""
        return max(len(row.prompt) for row in self.rows) if self.is_new else 1

    def tokens(self, device: torch.device) -> torch.Tensor:
        """Return the input of the next step, int64 [b, width]."""
        rows = [row.prompt if self.is_new else (row.last,) for row in self.rows]
        padded = [[*row, *[0] * (self.width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=device)

    def advance(self) -> None:
        new = self.is_new
        self.lengths = [len(row.prompt) if new else length + 1 for row, length in zip(self.rows, self.lengths)]

    def take(
        self, tokens: Sequence[int], *, stop_token_ids: frozenset[int], max_new_tokens: int
    ) -> Iterator[Continuation]:
        """Add the tokens of a step to the rows, yield each row, then remove the rows that have ended. Raises
        ConfigError: see `Continuation.take`."""
        for row, token in zip(self.rows, tokens, strict=True):
            row.take(token, stop_token_ids=stop_token_ids, max_new_tokens=max_new_tokens)
            yield row
        remaining = [place for place, row in enumerate(self.rows) if row.finish is None]
        if len(remaining) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in remaining]
        self.lengths = [self.lengths[place] for place in remaining]
        if remaining:
            self.cache.keep(remaining)
            self.seen = None if self.seen is None else self.seen[remaining]


def batches_of(
    continuations: Sequence[Continuation], *, batch_size: int, in_flight: int, max_new_tokens: int
) -> list[Batch]:
    """Split continuations, sorted by prompt length, into about equal batches of at most `batch_size`. There are at
    least `in_flight` batches, if there are as many prompts, to keep all pipeline stages busy."""
    by_length = sorted(continuations, key=lambda one: len(one.prompt))
    total = len(by_length)
    count = max(-(-total // batch_size), min(in_flight, total))
    cuts = [total * number // count for number in range(count + 1)]
    return [Batch(by_length[first:stop], max_new_tokens) for first, stop in pairwise(cuts)]
