"""Prompts on their way to texts: how tokens are chosen, the texts that grow, and the batches that they travel in."""

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

NOT_A_NUMBER = -1  # in the place of a token where the logits hold a NaN: every rank must hear of it


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, in the order of the fields.

    `repetition_penalty` r (arXiv 1909.05858) divides the logits of tokens that the text has already, prompt included,
    by r, or multiplies them by it where they are negative. `temperature` 0 takes the likeliest; else logits are divided
    by it. `top_k` and then `top_p` keep the k likeliest tokens, and the fewest that together reach p, before one
    is drawn."""

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
    """Numbers in (0, 1) for the tokens of one text. A pure function of the arguments: neither the other prompts nor the
    layout changes them. `prompt`: its tokens. `copy`: how many prompts of the same tokens come before this one, so that
    equal prompts get different texts."""

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
    """The next token of each row, int64 [b]; NOT_A_NUMBER where a logit is a NaN. `logits`: [b, vocab_size], the same
    bits on every rank that calls this. `draws`: [b] in (0, 1); not read if the temperature is 0. `seen`: boolean [b,
    vocab_size], the tokens that a text has already, for a repetition penalty."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    broken = logits.isnan().any(dim=-1)
    if seen is not None:
        penalty = sampling.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    chosen = logits.argmax(dim=-1) if sampling.temperature == 0.0 else _drawn(logits, sampling, draws)
    return chosen.masked_fill(broken, NOT_A_NUMBER)


def _drawn(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> torch.Tensor:
    """The token by the part of the distribution function in which a row's draw falls."""
    size = logits.shape[-1]
    scaled, order = logits.double() / sampling.temperature, None
    # A stable sort: of equal logits the lower id comes first on every device.
    if sampling.top_k is not None or sampling.top_p is not None:
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        size = min(sampling.top_k or size, size)
    probabilities = scaled[:, :size].softmax(dim=-1)
    if sampling.top_p is not None:
        # A token stays if those before it have not reached p yet: the likeliest always does.
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    reached = probabilities.cumsum(dim=-1)
    at = torch.tensor(draws, dtype=reached.dtype, device=reached.device).unsqueeze(-1) * reached[:, -1:]
    place = torch.searchsorted(reached, at, right=True).clamp(max=size - 1)
    return (place if order is None else order.gather(-1, place)).squeeze(-1)


_JSON_SUFFIXES = (".jsonl", ".ndjson")
_MAX_BYTES = 1 << 30


def read_prompts(path: str, key: str | None, *, chat: bool = False) -> list[Any]:
    """The prompts of a file: of a .jsonl the texts under `key`, of any other, and of standard input, its lines. Blank
    lines are left out. `path`: `-` is standard input. `key`: None: `prompt`, or of a chat `messages`. `chat`: a list of
    messages is a prompt too.
    Raises ConfigError: the file cannot be read, has a line that is no prompt or none at all, or `key` has no effect."""
    is_json = Path(path).suffix.lower() in _JSON_SUFFIXES
    if key is not None and not is_json:
        raise ConfigError(f"--prompt-key {key} has no effect on {path}; leave it out, or give a .jsonl file")
    limits = Limits(max_document_bytes=_MAX_BYTES, text_documents="line")
    source = _source(path, "jsonl" if is_json else "text")
    key = key or ("messages" if chat else "prompt")
    found = good_texts([source], key, limits, _parse_chat if chat else None)
    prompts = [prompt for texts in found for prompt in texts]
    if not prompts:
        raise ConfigError(f"{path} has no prompts; write one on each line")
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


_HALF_A_CHARACTER = "\ufffd"
_BEFORE = 6  # tokens of the prompt decoded with the first new one: some tokenizers drop a first space


class GrowingText:
    """The text of new tokens. What `take` has returned is never changed by tokens that come later.

    A token may end in the middle of a character: its part of the text waits for the rest. And what may be the beginning of
    a stop string waits until that is certain.

    `decode`: text of token ids. `prompt`: the tokens before. `stops`: the text ends before the first of these strings.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.stopped = False  # a stop string has come
        self._decode, self._stops = decode, stops
        self._held_back = max(map(len, stops), default=1) - 1
        self._ids = list(prompt[-_BEFORE:])
        self._first, self._decoded = 0, len(self._ids)
        self._given = 0

    def push(self, token: int) -> None:
        """One more token. Only the last few are decoded, so that a long text costs no more a token than a short one."""
        self._ids.append(token)
        new = self._new()
        if new and not new.endswith(_HALF_A_CHARACTER):
            self._first, self._decoded = self._decoded, len(self._ids)
            self._add(new)

    def finish(self) -> None:
        """No token will come: what is not a whole character will not become one."""
        if not self.stopped:
            self._add(self._new())
        self._decoded = len(self._ids)
        self._held_back = 0

    def take(self) -> str:
        """What has become certain since the last call."""
        end = len(self.text) if self.stopped else max(self._given, len(self.text) - self._held_back)
        start, self._given = self._given, end
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


MakeText = Callable[[Sequence[int]], GrowingText]  # from a prompt's tokens to its text


@dataclass(kw_only=True, eq=False)
class Continuation:
    index: int
    prompt: tuple[int, ...]
    draws: Draws
    text: GrowingText | None
    new: list[int] = field(default_factory=list)  # tokens after the prompt, without the end of document
    finish: str | None = None  # why it has ended: `eod`, a `stop` string, or its `length`; None: it has not

    @property
    def last(self) -> int:
        return self.new[-1] if self.new else self.prompt[-1]

    def take(self, token: int, *, end_ids: frozenset[int], max_new_tokens: int) -> None:
        """One more token has been chosen. Raises ConfigError: there was nothing to choose from; the same on every rank."""
        if token == NOT_A_NUMBER:
            raise ConfigError(f"prompt {self.index + 1}: logits are not numbers; try --dtype fp32")
        if token in end_ids:
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
    met: Counter[tuple[int, ...]] = Counter()
    found = []
    for index, prompt in enumerate(map(tuple, prompts)):
        text = None if make_text is None else make_text(prompt)
        draws = Draws(sampling.seed, prompt, met[prompt])
        found.append(Continuation(index=index, prompt=prompt, draws=draws, text=text))
        met[prompt] += 1
    return found


def check_prompts(model: ModelConfig, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Every prompt has tokens, which the model knows, and leaves room for the new ones. Raises ConfigError: one does
    not."""
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


class Lane:
    """Continuations that go through the model together: one step gives each of them one token.

    The first step takes their prompts, padded at the end to the longest: no token sees what comes behind it, so nothing
    needs a mask. Later ones take one token a row, each at its own position. Those that have ended leave the batch.

    `rows`: at least one. `max_new_tokens`: of each."""

    def __init__(self, rows: Sequence[Continuation], max_new_tokens: int) -> None:
        self.rows = list(rows)
        self.lengths = [0 for _ in rows]  # tokens of each row that are in the cache
        self.cache = KeyValueCache(max(len(row.prompt) for row in rows) + max_new_tokens)
        self.chosen: torch.Tensor | None = None  # on the last stage: int64 [b], the tokens of the last step
        self.seen: torch.Tensor | None = None  # on the last stage, for a repetition penalty: boolean [b, vocab_size]

    @property
    def is_new(self) -> bool:
        return self.lengths[0] == 0

    @property
    def width(self) -> int:
        """Tokens of a row in the next step."""
        return max(len(row.prompt) for row in self.rows) if self.is_new else 1

    def tokens(self, device: torch.device) -> torch.Tensor:
        """What the next step takes in, int64 [b, width]."""
        rows = [row.prompt if self.is_new else (row.last,) for row in self.rows]
        padded = [[*row, *[0] * (self.width - len(row))] for row in rows]
        return torch.tensor(padded, dtype=torch.int64, device=device)

    def advance(self) -> None:
        new = self.is_new
        self.lengths = [len(row.prompt) if new else length + 1 for row, length in zip(self.rows, self.lengths)]

    def take(self, tokens: Sequence[int], *, end_ids: frozenset[int], max_new_tokens: int) -> Iterator[Continuation]:
        """Hand out the tokens of a step; gives each row as it is with its own, and then lets those that ended go.
        Raises ConfigError: as `Continuation.take`."""
        for row, token in zip(self.rows, tokens, strict=True):
            row.take(token, end_ids=end_ids, max_new_tokens=max_new_tokens)
            yield row
        remaining = [place for place, row in enumerate(self.rows) if row.finish is None]
        if len(remaining) == len(self.rows):
            return
        self.rows = [self.rows[place] for place in remaining]
        self.lengths = [self.lengths[place] for place in remaining]
        if remaining:
            self.cache.keep(remaining)
            self.seen = None if self.seen is None else self.seen[remaining]


def lanes_of(
    continuations: Sequence[Continuation], *, batch_size: int, in_flight: int, max_new_tokens: int
) -> list[Lane]:
    """Batches of at most `batch_size`, about equal, prompts of like length together; at least `in_flight` of them where
    there are that many prompts, so that no pipeline stage is without one."""
    by_length = sorted(continuations, key=lambda one: len(one.prompt))
    total = len(by_length)
    count = max(-(-total // batch_size), min(in_flight, total))
    cuts = [total * number // count for number in range(count + 1)]
    return [Lane(by_length[first:stop], max_new_tokens) for first, stop in pairwise(cuts)]
