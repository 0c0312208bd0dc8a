"""Generated text does not depend on the cache, the batch, tp or pp."""

from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.generation.continuation import GrowingText, Sampling, batches_of, continuations_of
from megalite.generation.generate import whole_vocabulary
from megalite.models import gpt
from megalite.models.gpt import GPTStage
from tests.generation.models import FAMILIES, PROMPT, PROMPTS, VOCAB, chain_of, new_tokens, stage_of, texts
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA

GREEDY = Sampling(max_new_tokens=9, temperature=0.0)
DRAWN = Sampling(max_new_tokens=9, temperature=0.9, top_k=20, top_p=0.95, seed=4)


def argmax_decoding(model: GPTStage, prompt: list[int], count: int) -> list[int]:
    """Each token from a forward over all previous tokens, without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens]), model.generation_context(len(tokens)))
        tokens.append(int(logits[-1, 0, :VOCAB].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_equals_argmax_decoding(family: str) -> None:
    """For each prompt of a batch of unequal ones, and for single prompts."""
    chain, cudnn = chain_of(FAMILIES[family]), []
    chain.stage.register_forward_pre_hook(lambda *_: cudnn.append(torch.backends.cuda.cudnn_sdp_enabled()))
    ours = texts(chain, PROMPTS, GREEDY)
    assert len(cudnn) >= 9 and not any(cudnn) and torch.backends.cuda.cudnn_sdp_enabled()
    expected = [argmax_decoding(chain.stage, prompt, 9) for prompt in PROMPTS]
    assert ours == [(tokens, "length") for tokens in expected]
    assert new_tokens(chain.stage, PROMPT, GREEDY) == expected[0]
    assert len(set(expected[0])) > 1, "the texts must not repeat one token"


def test_llama_generates_beyond_its_training_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rebuilding RoPE's tables for each token."""
    made = []
    tables = gpt.rope_tables
    monkeypatch.setattr(gpt, "rope_tables", lambda *given: made.append(len(given[0])) or tables(*given))
    stage = stage_of(LLAMA)
    ours = new_tokens(stage, PROMPT, Sampling(max_new_tokens=40, temperature=0.0))
    assert made == [16, 32, 64]
    assert ours == argmax_decoding(stage, PROMPT, 40)


SHORT = Sampling(max_new_tokens=5, temperature=0.9, top_k=20, top_p=0.95, seed=4)


def every_family(context: RankContext, families: list[str], **axes: int) -> dict[str, Any]:
    """Greedy and sampled texts; the latter in small batches, with end tokens, so that batches shrink."""
    topology = context.topology(**axes)
    found: dict[str, Any] = {}
    for family in families:
        chain = chain_of(FAMILIES[family], topology)
        greedy = texts(chain, PROMPTS, Sampling(max_new_tokens=5, temperature=0.0))
        ends = frozenset(range(0, VOCAB, 5))
        found[family] = [greedy, texts(chain, PROMPTS, SHORT, stop_token_ids=ends, batch_size=2)]
    return found


@pytest.mark.parametrize(
    ("tp", "pp", "families"),
    [
        (2, 2, ["gpt", "mistral", "gemma", "deepseek", "latent"]),
        (1, 4, ["qwen3", "mixtral"]),
        (4, 1, ["llama", "latent, no norm", "one group"]),
    ],
)
def test_tokens_do_not_depend_on_the_layout(tp: int, pp: int, families: list[str]) -> None:
    alone = every_family(RankContext(0, {}), families)
    for rank, found in enumerate(run_ranks(4, every_family, families, tp=tp, pp=pp)):
        assert found == alone, rank
    assert {finish for _, drawn in alone.values() for _, finish in drawn} == {"eod", "length"}


def test_tokens_do_not_depend_on_the_batch() -> None:
    """Not on other prompts, their order or the batch size; equal prompts get different texts."""
    chain = chain_of(LLAMA)
    together = texts(chain, PROMPTS, DRAWN)
    for size in (1, 2, 3):
        assert texts(chain, PROMPTS, DRAWN, batch_size=size) == together
    backwards = texts(chain, [PROMPTS[index] for index in (3, 2, 1, 0)], DRAWN)
    assert backwards[::-1] == together[:4]
    alone = [texts(chain, [prompt], DRAWN)[0] for prompt in PROMPTS]
    assert alone[:4] == together[:4]
    assert together[4] != together[0]
    other = Sampling(max_new_tokens=9, temperature=0.9, top_k=20, top_p=0.95, seed=5)
    assert texts(chain, PROMPTS, other) != together


def test_prefix_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One forward over the prompts, then one token per row; finished rows leave the batch."""
    chain = chain_of(LLAMA)
    stop = texts(chain, PROMPTS, GREEDY)[1][0][3]
    sizes = []
    forward = GPTStage.forward

    def counted(self: GPTStage, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        sizes.append(tuple(x.shape))
        return forward(self, x, *args, **named)

    monkeypatch.setattr(GPTStage, "forward", counted)
    found = texts(chain, PROMPTS, GREEDY, stop_token_ids=frozenset([stop]))
    assert sizes[0] == (5, 7)
    lengths = [len(tokens) + (finish == "eod") for tokens, finish in found]
    assert sizes[1:] == [(sum(length > step for length in lengths), 1) for step in range(1, max(lengths))]
    assert sizes[-1] < (5, 1)


def test_generation_stops_at_the_end_of_the_document() -> None:
    stage = stage_of({})
    free = new_tokens(stage, PROMPT, GREEDY)
    stop = free[5]
    assert new_tokens(stage, PROMPT, GREEDY, eod=stop) == free[: free.index(stop)]


def decode(ids: Any) -> str:
    return "".join(chr(ord("0") + token) for token in ids)


def test_generation_stops_before_a_stop_string() -> None:
    chain = chain_of({})
    free = new_tokens(chain.stage, PROMPT, GREEDY)
    stop = decode(free[3:5])
    cut = decode(free).index(stop)

    def text_of(prompt: Any) -> GrowingText:
        return GrowingText(decode, prompt, [stop])

    ((tokens, finish),) = texts(chain, [PROMPT], GREEDY, make_text=text_of)
    assert (tokens, finish) == (free[: cut + 2], "stop")


def test_repetition_penalty_covers_prompt_and_new_tokens() -> None:
    chain = chain_of(LLAMA)
    strong = Sampling(max_new_tokens=20, temperature=0.0, repetition_penalty=1e9)
    found = texts(chain, PROMPTS, strong, stop_token_ids=frozenset([7]))
    for prompt, (tokens, _) in zip(PROMPTS, found, strict=True):
        assert len(set(tokens) | set(prompt)) == len(tokens) + len(set(prompt))
    assert found != texts(chain, PROMPTS, Sampling(max_new_tokens=20, temperature=0.0), stop_token_ids=frozenset([7]))


def test_padding_ids_are_never_generated() -> None:
    """The vocabulary of 93 is padded to 96; padding rows have random weights too."""
    stage = stage_of({})
    assert stage.config.padded_vocab_size == 96
    logits = torch.arange(2 * 96.0).view(2, 96)
    assert torch.equal(whole_vocabulary(stage, logits), logits[:, :93])


@pytest.mark.parametrize(
    ("prompts", "batch", "flying", "sizes"),
    [(5, 16, 1, [5]), (5, 2, 1, [1, 2, 2]), (5, 16, 2, [2, 3]), (2, 16, 4, [1, 1]), (9, 4, 2, [3, 3, 3])],
)
def test_sizes_of_batches(prompts: int, batch: int, flying: int, sizes: list[int]) -> None:
    """At most the requested size, about equal, enough for every stage, of similar lengths."""
    given = [[1] * (1 + 5 * index % 7) for index in range(prompts)]
    made = continuations_of(given, GREEDY, None)
    batches = batches_of(made, batch_size=batch, in_flight=flying, max_new_tokens=9)
    assert [len(batch.rows) for batch in batches] == sizes
    lengths = [len(row.prompt) for batch in batches for row in batch.rows]
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "there is no prompt; give one with --prompt"),
        ([[1], []], "prompt 2 has no tokens"),
        ([[1, 93]], "prompt 1 has token 93, not below vocab_size 93"),
        ([[-1]], "prompt 1 has token -1"),
        ([[1], [1] * 8], r"prompt 2 has 8 tokens and max_new_tokens is 9, .* 16 positions; --max-new-tokens 8 works"),
        ([[1] * 16], "give a shorter prompt"),
    ],
)
def test_bad_prompts_are_errors(prompts: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        texts(chain_of({}), prompts, GREEDY)


def broken(context: RankContext, **axes: int) -> str:
    """A model with a NaN in its last stage only."""
    chain = chain_of(LLAMA, context.topology(**axes))
    if chain.is_last:
        with torch.no_grad():
            next(chain.stage.layers.parameters()).fill_(float("nan"))
    try:
        texts(chain, PROMPTS, GREEDY)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_nan_logits_are_an_error_on_all_ranks() -> None:
    for said in run_ranks(4, broken, tp=2, pp=2):
        assert said.startswith("prompt 2: logits are not numbers; try --dtype fp32"), said
