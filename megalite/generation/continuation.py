"""Prompts on their way to texts, and the batches that they travel in."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.generation.sample import NOT_A_NUMBER, Draws, Sampling
from megalite.models.context import KeyValueCache

_HALF_A_CHARACTER = "\ufffd"
_BEFORE = 6
"""Tokens of the prompt that are decoded along with the first new one: some tokenizers drop a space at the beginning."""


class GrowingText:
    """The text of new tokens. What `take` has returned is never changed by tokens that come later.

    A token may end in the middle of a character: its part of the text waits for the rest. And what may be the beginning of
    a stop string waits until that is certain.

    Args:
        decode: text of token ids.
        prompt: the tokens before.
        stops: the text ends before the first of these strings.

    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str] = ()
    ) -> None:
        self.text = ""
        self.stopped = False
        """A stop string has come."""
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


MakeText = Callable[[Sequence[int]], GrowingText]
"""From a prompt's tokens to its text."""


@dataclass(kw_only=True, eq=False)
class Continuation:
    """One prompt and what has come after it so far; the same on every rank."""

    index: int
    prompt: tuple[int, ...]
    draws: Draws
    text: GrowingText | None
    new: list[int] = field(default_factory=list)
    """Tokens after the prompt, without the end of document."""
    finish: str | None = None
    """Why it has ended: `eod`, a `stop` string, or its `length`; None: it has not."""

    @property
    def last(self) -> int:
        """The last token."""
        return self.new[-1] if self.new else self.prompt[-1]

    def take(self, token: int, *, end_ids: frozenset[int], max_new_tokens: int) -> None:
        """One more token has been chosen.

        Raises:
            ConfigError: there was nothing to choose from; the same on every rank.
        """
        if token == NOT_A_NUMBER:
            raise ConfigError(
                f"prompt {self.index + 1}: the logits of new token {len(self.new) + 1} are not numbers (NaN): the weights are "
                "damaged, or too large for the type they are computed in; try --dtype fp32"
            )
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
    """One for each prompt, in their order."""
    met: Counter[tuple[int, ...]] = Counter()
    found = []
    for index, prompt in enumerate(map(tuple, prompts)):
        text = None if make_text is None else make_text(prompt)
        draws = Draws(sampling.seed, prompt, met[prompt])
        found.append(Continuation(index=index, prompt=prompt, draws=draws, text=text))
        met[prompt] += 1
    return found


def check_prompts(model: ModelConfig, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Every prompt has tokens, which the model knows, and leaves room for the new ones.

    Raises:
        ConfigError: one does not.
    """
    limit, vocab_size = model.max_position_embeddings, model.vocab_size
    assert vocab_size is not None
    if not prompts:
        raise ConfigError("there is no prompt; give one with --prompt, or a file of them with --prompts")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise ConfigError(f"prompt {number} has no tokens; give at least one character of text")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            bad = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ConfigError(
                f"prompt {number} has token {bad}, but the model's vocab_size is {vocab_size}; use the tokenizer that it "
                "was trained with"
            )
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

    Args:
        rows: at least one.
        max_new_tokens: of each.
    """

    def __init__(self, rows: Sequence[Continuation], max_new_tokens: int) -> None:
        self.rows = list(rows)
        self.lengths = [0 for _ in rows]
        """Tokens of each row that are in the cache."""
        self.cache = KeyValueCache(max(len(row.prompt) for row in rows) + max_new_tokens)
        self.chosen: torch.Tensor | None = None
        """On the last stage: int64 [b], the tokens of the last step."""
        self.seen: torch.Tensor | None = None
        """On the last stage, for a repetition penalty: boolean [b, vocab_size]."""

    @property
    def is_new(self) -> bool:
        """The next step takes the prompts."""
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
        """The step has been made."""
        new = self.is_new
        self.lengths = [len(row.prompt) if new else length + 1 for row, length in zip(self.rows, self.lengths)]

    def take(self, tokens: Sequence[int], *, end_ids: frozenset[int], max_new_tokens: int) -> Iterator[Continuation]:
        """Hand out the tokens of a step; gives each row as it is with its own, and then lets those that ended go.

        Raises:
            ConfigError: as `Continuation.take`.
        """
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
    """Batches of at most `batch_size`, about equal, prompts of like length together; at least `in_flight` of them
    where there are that many prompts, so that no pipeline stage is without one.
    """
    by_length = sorted(continuations, key=lambda one: len(one.prompt))
    total = len(by_length)
    count = max(-(-total // batch_size), min(in_flight, total))
    cuts = [total * number // count for number in range(count + 1)]
    return [Lane(by_length[first:stop], max_new_tokens) for first, stop in pairwise(cuts)]
