"""Sampling: filters keep the right tokens, and draws depend only on seed, prompt and position."""

from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.generation.continuation import NOT_A_NUMBER, Draws, Sampling, choose

LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


def drawn(count: int = 4000, **how: Any) -> list[float]:
    """Frequency of each token."""
    source = Draws(0, [1, 2], 0)
    draws = [source(number) for number in range(count)]
    chosen = choose(LOGITS.expand(count, -1), Sampling(**how), draws).tolist()
    return [chosen.count(token) / count for token in range(LOGITS.numel())]


@pytest.mark.parametrize(
    "how, expected",
    [
        ({"temperature": 1.0}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        # p^(1/T), normalised: 0.25, 0.04, 0.0225, 0.01, 0.0025 of 0.325.
        ({"temperature": 0.5}, [0.7692, 0.1231, 0.0692, 0.0308, 0.0077]),
        ({"temperature": 1.0, "top_k": 2}, [5 / 7, 2 / 7, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 99}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        # The fewest tokens with a total of at least p: 0.5 + 0.2 + 0.15 >= 0.8.
        ({"temperature": 1.0, "top_p": 0.8}, [0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.4}, [1, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        # top_p applies to the tokens left by top_k: 0.5/0.7 of two already reaches 0.7.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 3}, [1, 0, 0, 0, 0]),
    ],
)
def test_filters_keep_the_right_tokens(how: dict[str, Any], expected: list[float]) -> None:
    found = drawn(**how)
    for ours, wanted in zip(found, expected, strict=True):
        if wanted in (0, 1):
            assert ours == wanted
        else:
            assert ours == pytest.approx(wanted, abs=4 * (0.25 / 4000) ** 0.5)


def test_rows_are_independent() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    draws = [0.03, 0.2, 0.4, 0.6, 0.8, 0.97]
    for how in ({"top_k": 7}, {"top_p": 0.7}, {}):
        sampling = Sampling(temperature=1.3, **how)
        together = choose(logits, sampling, draws)
        alone = [choose(row[None], sampling, [draw]) for row, draw in zip(logits, draws, strict=True)]
        assert torch.equal(together, torch.cat(alone))


def test_extreme_draws_stay_within_the_filter() -> None:
    """The largest possible draw selects a token that the filters kept."""
    for how in ({}, {"top_k": 3}, {"top_p": 0.75}):
        sampling = Sampling(temperature=1.0, **how)
        last = choose(LOGITS[None], sampling, [1.0 - 2**-53])
        assert int(last) == {"top_k": 2, "top_p": 2}.get(next(iter(how), ""), 4)
        assert int(choose(LOGITS[None], sampling, [2**-53])) == 0


def test_draws_depend_only_on_seed_prompt_and_position() -> None:
    def several(seed: int, prompt: list[int], copy: int) -> list[float]:
        source = Draws(seed, prompt, copy)
        return [source(number) for number in (3, 0, 1, 2)]

    base = several(1, [7, 8], 0)
    assert base == several(1, [7, 8], 0)
    others = [several(2, [7, 8], 0), several(1, [7, 9], 0), several(1, [7, 8], 1), several(1, [78], 0)]
    assert len({*base, *(number for other in others for number in other)}) == 20
    source = Draws(5, [1], 0)
    many = [source(number) for number in range(2000)]
    assert 0.0 < min(many) < 0.01 and 0.99 < max(many) < 1.0
    assert sum(many) / 2000 == pytest.approx(0.5, abs=0.03)


def test_repetition_penalty() -> None:
    """As transformers' processor does."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    ids = torch.tensor([[1, 1, 8], [0, 2, 3]])
    seen = torch.zeros(2, 9, dtype=torch.bool).scatter_(1, ids, True)
    theirs = RepetitionPenaltyLogitsProcessor(4.0)(ids, logits.clone())
    sampling = Sampling(repetition_penalty=4.0, temperature=1.0)
    for draw in (0.1, 0.35, 0.6, 0.9):
        ours = choose(logits, sampling, [draw, draw], seen=seen)
        assert torch.equal(ours, choose(theirs, Sampling(temperature=1.0), [draw, draw]))


def test_nan_logits_are_an_error() -> None:
    logits = torch.stack((LOGITS, LOGITS))
    logits[1, 3] = float("nan")
    for temperature in (0.0, 1.0):
        found = choose(logits, Sampling(temperature=temperature), [0.1, 0.1])
        assert found.tolist() == [0, NOT_A_NUMBER]


@pytest.mark.parametrize(
    "how, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty is 0\.0; it must be above 0, e\.g\. 1\.2"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty is nan"),
        ({"temperature": -0.1}, r"temperature is -0\.1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, r"top_p is 0\.0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
    ],
)
def test_bad_settings_are_errors(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**how)
