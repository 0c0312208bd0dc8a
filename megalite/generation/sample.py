"""How the next token is chosen from the logits; the draws are pure functions of seed, prompt and position."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megalite.config.errors import ConfigError
from megalite.data.random_draws import raw_draws

NOT_A_NUMBER = -1
"""In the place of a token where the logits hold a NaN: every rank must hear of it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen, in the order of the fields.

    `repetition_penalty` r (arXiv 1909.05858) divides the logits of tokens that the text has already, prompt included,
    by r, or multiplies them by it where they are negative. `temperature` 0 takes the likeliest; else logits are divided
    by it. `top_k` and then `top_p` keep the k likeliest tokens, and the fewest whose probabilities reach p, before one
    is drawn.
    """

    max_new_tokens: int = 100
    repetition_penalty: float = 1.0
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0, e.g. 1.2 (1 changes nothing)"
            )
        if not 0.0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or above, e.g. 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 1, e.g. 50")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1, e.g. 0.95")


class Draws:
    """Numbers in (0, 1) for the tokens of one text.

    A pure function of the arguments: neither the other prompts nor the layout changes them.

    Args:
        prompt: its tokens.
        copy: how many prompts of the same tokens come before this one, so that equal prompts get texts of their own.
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
    logits: torch.Tensor,
    sampling: Sampling,
    draws: Sequence[float],
    *,
    seen: torch.Tensor | None = None,
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
    """The token in whose part of the distribution function a row's draw falls."""
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
