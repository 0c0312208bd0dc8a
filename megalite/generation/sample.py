"""Sampling token by token with a key/value cache, on one rank or over a tp group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megalite.config.errors import ConfigError
from megalite.models.cache import KeyValueCache
from megalite.models.gpt import GPTStage


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    `temperature` 0 takes the likeliest; `top_k` and `top_p` keep the k likeliest tokens, or the fewest whose
    probabilities reach p, before drawing.
    """

    max_new_tokens: int = 100
    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.temperature < 0.0:
            raise ConfigError(f"temperature is {self.temperature}; it must be 0 (greedy) or above, e.g. 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}; it must be at least 1, e.g. 50")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p is {self.top_p}; it must be above 0 and at most 1, e.g. 0.95")


@torch.no_grad()
def generate(model: GPTStage, prompt: Sequence[int], sampling: Sampling, *, eod: int | None) -> Iterator[int]:
    """New tokens after `prompt`, one by one, until `eod` or `max_new_tokens`.

    Args:
        model: the whole network in one stage; over tp each rank calls this and gets the same tokens.

    Collectives: those of the forward, and one all-gather of the logits a token over tp.

    Raises:
        ConfigError: an empty prompt, or more positions than a learned position embedding has.
    """
    assert model.embedding is not None
    assert model.head is not None
    if not prompt:
        raise ConfigError("the prompt has no tokens; give at least one character of text")
    limit = model.config.max_position_embeddings
    learned = model.config.position_embedding_type == "learned_absolute"
    if learned and limit is not None and len(prompt) + sampling.max_new_tokens > limit:
        room = limit - len(prompt)
        raise ConfigError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {sampling.max_new_tokens}, but the model has "
            f"{limit} positions; "
            + (f"--max-new-tokens {room} works" if room > 0 else "give a shorter prompt")
        )
    model.eval()
    generator = torch.Generator(model.device).manual_seed(sampling.seed)
    cache, new = KeyValueCache(), list(prompt)
    for _ in range(sampling.max_new_tokens):
        tokens = torch.tensor([new], dtype=torch.int64, device=model.device)
        first = cache.length
        context = model.generation_context(first_position=first, length=len(new))
        logits = model(tokens, context, cache=cache)[-1, 0]
        token = _choose(_whole_vocabulary(model, logits), sampling, generator)
        if token == eod:
            return
        yield token
        new = [token]


def _whole_vocabulary(model: GPTStage, logits: torch.Tensor) -> torch.Tensor:
    """[V/tp] -> [vocab_size], without the padding."""
    assert model.config.vocab_size is not None
    whole = logits.new_empty(logits.numel() * model.tp.size)
    model.tp.all_gather(whole, logits.contiguous())
    return whole[: model.config.vocab_size].float()


def _choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    logits = logits / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits.numel():
        kth = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probabilities = logits.softmax(dim=0)
    if sampling.top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        # A token stays if those before it have not reached p yet: the likeliest always does.
        dropped = ordered.cumsum(0) - ordered >= sampling.top_p
        probabilities[order[dropped]] = 0.0
    return int(torch.multinomial(probabilities, 1, generator=generator))
