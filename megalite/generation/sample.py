"""How the next token is chosen from the logits; the draws are pure functions of seed, prompt and position."""

import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megalite.config.errors import ConfigError
from megalite.data.random_draws import raw_draws
from megalite.preprocess.documents import BadDocument, parse_line, plain_text
from megalite.preprocess.inputs import STDIN, open_regular, unreadable

NOT_A_NUMBER = -1
"""In the place of a token where the logits hold a NaN: every rank must hear of it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, in the order of the fields.

    `repetition_penalty` r (arXiv 1909.05858) divides the logits of tokens that the text has already, prompt included,
    by r, or multiplies them by it where they are negative. `temperature` 0 takes the likeliest; else logits are divided
    by it. `top_k` and then `top_p` keep the k likeliest tokens, and the fewest that together reach p, before one
    is drawn.
    """

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
    """Numbers in (0, 1) for the tokens of one text.

    A pure function of the arguments: neither the other prompts nor the layout changes them.

    Args:
        prompt: its tokens.
        copy: how many prompts of the same tokens come before this one, so that equal prompts get different texts.
    """

    def __init__(self, seed: int, prompt: Sequence[int], copy: int) -> None:
        words = f"{seed}\0{copy}\0{' '.join(map(str, prompt))}".encode()
        digest = hashlib.blake2b(words, digest_size=16).digest()
        self._seed, self._index = (int.from_bytes(half, "little") for half in (digest[:8], digest[8:]))

    def __call__(self, number: int) -> float:
        """The number for the new token of that number, from 0."""
        word = int(raw_draws(1, seed=self._seed, index=self._index, stream=number)[0])
        return ((word >> 12) + 0.5) / (1 << 52)


def choose(
    logits: torch.Tensor, sampling: Sampling, draws: Sequence[float], *, seen: torch.Tensor | None = None
) -> torch.Tensor:
    """The next token of each row, int64 [b]; NOT_A_NUMBER where a logit is a NaN.

    Args:
        logits: [b, vocab_size], the same bits on every rank that calls this.
        draws: [b] in (0, 1); not read if the temperature is 0.
        seen: boolean [b, vocab_size], the tokens that a text has already, for a repetition penalty.
    """
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


def read_prompts(path: str, key: str | None) -> list[str]:
    """The prompts of a file: of a .jsonl the texts under `key`, of any other, and of standard input, its lines.

    Blank lines are left out.

    Args:
        path: `-` is standard input.
        key: None: `prompt`.

    Raises:
        ConfigError: the file cannot be read, has a line that is no prompt or none at all, or `key` has no effect.
    """
    is_json = Path(path).suffix.lower() in _JSON_SUFFIXES
    if key is not None and not is_json:
        raise ConfigError(
            f"--prompt-key {key} has no effect on {path}, of which the lines are the prompts; leave it out, or give a .jsonl file"
        )
    prompts = []
    for number, line in enumerate(_content(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            prompts += parse_line(line, [key or "prompt"]) if is_json else [plain_text(line.rstrip(b"\r"))]
        except BadDocument as error:
            raise ConfigError(f"{path}:{number}: {error}; fix the line or leave it out") from None
    if not prompts:
        raise ConfigError(f"{path} has no prompts; write one on each line")
    return prompts


def _content(path: str) -> bytes:
    if path == STDIN:
        if sys.stdin is None or sys.stdin.isatty():
            raise ConfigError(f"--prompts {STDIN}: standard input is a terminal; pipe prompts into the command")
        return sys.stdin.buffer.read()
    with open_regular(path) as file:
        try:
            content = file.read(_MAX_BYTES + 1) or b""
        except OSError as error:
            raise unreadable(path, error) from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_BYTES:,} bytes; give prompts, not a corpus")
    return content.removeprefix(b"\xef\xbb\xbf")
