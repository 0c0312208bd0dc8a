"""Sampling: the cache changes nothing, tp changes nothing, and the filters keep what they say."""

from typing import Any

import pytest
import torch

import megalite.generation.sample as sample
from megalite.config.errors import ConfigError
from megalite.config.model import ModelConfig
from megalite.generation.sample import Sampling, generate
from megalite.models.gpt import GPTStage
from megalite.tensor_parallel.parameter import ParameterFactory
from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA, tiny_config

PROMPT = [5, 17, 60, 3]


def model_of(settings: dict[str, Any], tp: Group | None = None) -> GPTStage:
    model: ModelConfig = tiny_config(1, init_method_std=0.3, **settings).model
    make = ParameterFactory(
        tp=tp or Group.solo("tp"), seed=3, dtype=torch.float64, device=torch.device("cpu")
    )
    return GPTStage(
        model,
        first_layer=0,
        last_layer=model.num_layers,
        has_embedding=True,
        has_head=True,
        make=make,
        seq_length=16,
    )


def argmax_decoding(model: GPTStage, count: int) -> list[int]:
    """Each token from a forward over everything before it, without a cache."""
    model.eval()
    tokens = list(PROMPT)
    for _ in range(count):
        with torch.no_grad():
            logits = model(
                torch.tensor([tokens]), model.generation_context(len(tokens))
            )
        tokens.append(int(logits[-1, 0, :93].argmax()))
    return tokens[len(PROMPT) :]


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": LLAMA,
    "gpt-dropout": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    "mistral": {**LLAMA, "sliding_window": 6},
    "qwen3": {**LLAMA, "qk_norm": True},
    "gemma": {**LLAMA, "activation": "geglu_tanh", "scale_embeddings": True, "norm_zero_centered": True},
    "mixtral": {**LLAMA, "num_experts": 4, "moe_expert_capacity_factor": 1.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_is_argmax_decoding(family: str) -> None:
    model = model_of(FAMILIES[family])
    ours = list(generate(model, PROMPT, Sampling(max_new_tokens=12, temperature=0.0), eod=None))
    assert ours == argmax_decoding(model, 12)
    assert len(set(ours)) > 1, "the same token again and again would prove little"


def test_llama_generates_beyond_the_length_it_was_trained_with() -> None:
    model = model_of(LLAMA)
    ours = list(generate(model, PROMPT, Sampling(max_new_tokens=20, temperature=0.0), eod=None))
    assert ours == argmax_decoding(model, 20)


def generated(context: RankContext, tp: int, family: str) -> list[list[int]]:
    model = model_of(FAMILIES[family], context.topology(tp=tp).tp)
    greedy = Sampling(max_new_tokens=10, temperature=0.0)
    drawn = Sampling(max_new_tokens=10, temperature=0.9, top_k=20, top_p=0.95, seed=4)
    return [list(generate(model, PROMPT, sampling, eod=None)) for sampling in (greedy, drawn)]


@pytest.mark.parametrize("family", ["gpt", "llama", "mistral", "qwen3"])
def test_two_ranks_generate_what_one_does(family: str) -> None:
    alone = generated(RankContext(0, {}), 1, family)
    assert run_ranks(2, generated, 2, family) == [alone, alone]


def test_it_stops_at_the_end_of_the_document() -> None:
    model = model_of({})
    sampling = Sampling(max_new_tokens=12, temperature=0.0)
    free = list(generate(model, PROMPT, sampling, eod=None))
    stop = free[5]
    assert list(generate(model, PROMPT, sampling, eod=stop)) == free[: free.index(stop)]


def test_seeds() -> None:
    model = model_of({})
    first, again, other = (
        list(generate(model, PROMPT, Sampling(max_new_tokens=12, temperature=1.0, seed=seed), eod=None))
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


LOGITS = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()


def drawn(count: int = 4000, logits: torch.Tensor = LOGITS, **how: Any) -> list[float]:
    """How often each token is chosen."""
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(**how)
    chosen = [sample._choose(logits.clone(), sampling, generator) for _ in range(count)]
    return [chosen.count(token) / count for token in range(logits.numel())]


@pytest.mark.parametrize(
    "how, expected",
    [
        ({"temperature": 1.0}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        # p^(1/T), made to sum to one: 0.25, 0.04, 0.0225, 0.01, 0.0025 of 0.325.
        ({"temperature": 0.5}, [0.7692, 0.1231, 0.0692, 0.0308, 0.0077]),
        ({"temperature": 1.0, "top_k": 2}, [5 / 7, 2 / 7, 0, 0, 0]),
        ({"temperature": 1.0, "top_k": 99}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        # The fewest whose probabilities reach p: 0.5 + 0.2 + 0.15 >= 0.8.
        ({"temperature": 1.0, "top_p": 0.8}, [0.5 / 0.85, 0.2 / 0.85, 0.15 / 0.85, 0, 0]),
        ({"temperature": 1.0, "top_p": 0.4}, [1, 0, 0, 0, 0]),
        ({"temperature": 1.0, "top_p": 1.0}, [0.5, 0.2, 0.15, 0.1, 0.05]),
        # top_p acts on what top_k has left: 0.5/0.7 of two already reaches 0.7.
        ({"temperature": 1.0, "top_k": 2, "top_p": 0.7}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0}, [1, 0, 0, 0, 0]),
        ({"temperature": 0.0, "top_k": 3}, [1, 0, 0, 0, 0]),
    ],
)
def test_filters(how: dict[str, Any], expected: list[float]) -> None:
    found = drawn(**how)
    for ours, wanted in zip(found, expected, strict=True):
        if wanted in (0, 1):
            assert ours == wanted
        else:
            assert ours == pytest.approx(wanted, abs=4 * (0.25 / 4000) ** 0.5)


def test_padding_is_never_chosen() -> None:
    """The vocabulary of 93 is padded to 96; the rows of the padding are drawn like any other."""
    model = model_of({})
    assert model.config.padded_vocab_size == 96
    whole = sample._whole_vocabulary(model, torch.arange(96.0))
    assert whole.tolist() == list(range(93))


@pytest.mark.parametrize(
    "how, message",
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_bad_settings(how: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**how)


def test_an_empty_prompt() -> None:
    with pytest.raises(ConfigError, match="no tokens"):
        list(generate(model_of({}), [], Sampling(), eod=None))


def test_more_positions_than_the_model_has() -> None:
    with pytest.raises(ConfigError, match=r"16 positions; --max-new-tokens 12 works"):
        list(generate(model_of({}), PROMPT, Sampling(max_new_tokens=13), eod=None))
    with pytest.raises(ConfigError, match="give a shorter prompt"):
        list(generate(model_of({}), PROMPT * 4, Sampling(max_new_tokens=1), eod=None))
