"""Perplexity: every token is predicted once, with the context of its window, in any layout."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.generation.generate import Chain
from megalite.generation.likelihood import Perplexity, TokenStream, Windows, measure
from megalite.models.gpt import GPTStage
from tests.generation.models import FAMILIES, VOCAB, chain_of, stage_of
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA

TOKENS = np.random.default_rng(0).integers(0, VOCAB, 61)
STREAM = TokenStream([TOKENS[:20].astype(np.uint16), TOKENS[20:23].astype(np.int32), TOKENS[23:]], 100)


@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 10, 61])
@pytest.mark.parametrize(("length", "stride"), [(8, 8), (8, 3), (8, 1), (1, 1), (100, 50)])
def test_windows_cover_each_token_once(tokens: int, length: int, stride: int) -> None:
    """Each token except the first counts once, and tokens after the first window have `length - stride` of context."""
    windows = Windows(tokens=tokens, length=length, stride=stride)
    counted = []
    for window in range(len(windows)):
        start, first, stop = windows.span(window)
        assert 0 <= start <= first < stop <= min(start + length, tokens - 1)
        assert window == 0 or first - start == length - stride
        counted += range(first, stop)
    assert counted == list(range(tokens - 1))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 8, 8), "there are 1 tokens; two are needed"),
        ((9, 0, 1), "seq_length is 0"),
        ((9, 8, 9), "stride is 9; it must be from 1 to seq_length, 8"),
        ((9, 8, 0), "stride is 0"),
    ],
)
def test_bad_windows_are_errors(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Windows(tokens=sizes[0], length=sizes[1], stride=sizes[2])


def test_streams_of_tokens() -> None:
    assert len(STREAM) == 61
    for start, stop in ((0, 61), (0, 5), (18, 25), (20, 23), (22, 24), (40, 61)):
        found = STREAM.read(start, stop)
        assert found.dtype == np.int64 and found.tolist() == TOKENS[start:stop].tolist()


def one_by_one(stage: GPTStage, length: int, stride: int) -> float:
    """Each token's loss from a forward over its window only, up to this token."""
    total = 0.0
    for place in range(1, len(TOKENS)):
        window = max(0, -(-(place - length) // stride))
        context = torch.tensor(TOKENS[window * stride : place])[None]
        with torch.no_grad():
            logits = stage(context, stage.generation_context(context.shape[1]))[-1, 0, :VOCAB]
        total -= float(logits.log_softmax(dim=0)[TOKENS[place]])
    return total / (len(TOKENS) - 1)


@pytest.mark.parametrize("family", ["gpt", "mistral", "mixtral"])
@pytest.mark.parametrize(("length", "stride"), [(16, 16), (12, 5)])
def test_loss_equals_that_of_single_tokens(family: str, length: int, stride: int) -> None:
    chain, topology = chain_of(FAMILIES[family]), RankContext(0, {}).topology()
    windows = Windows(tokens=61, length=length, stride=stride)
    found = measure(chain, STREAM, windows, topology, batch_size=3)
    assert found.loss == pytest.approx(one_by_one(chain.stage, length, stride), rel=1e-12)
    assert found.tokens == 60 and found.windows == len(windows)
    assert found.perplexity == math.exp(found.loss)
    assert found.bits_per_byte == pytest.approx(found.loss * 60 / math.log(2) / 100)


SOME = ("gpt", "mistral", "deepseek")


def some_families(context: RankContext, **axes: int) -> dict[str, Perplexity]:
    topology = context.topology(**axes)
    windows = Windows(tokens=61, length=10, stride=7)
    return {
        family: measure(chain_of(FAMILIES[family], topology), STREAM, windows, topology, batch_size=2)
        for family in SOME
    }


def test_perplexity_does_not_depend_on_the_layout() -> None:
    """Layouts without tp give bit-equal results."""
    alone = some_families(RankContext(0, {}))
    for axes in ({"tp": 2, "pp": 2}, {"pp": 2, "dp": 2}, {"dp": 4}):
        every = run_ranks(4, some_families, **axes)
        assert all(found == every[0] for found in every), axes
        for family, found in every[0].items():
            if "tp" not in axes:
                assert found == alone[family], (axes, family)
            assert found.loss == pytest.approx(alone[family].loss, rel=1e-12), (axes, family)


def test_perplexity_does_not_depend_on_the_batch() -> None:
    chain, topology = chain_of(LLAMA), RankContext(0, {}).topology()
    windows = Windows(tokens=61, length=9, stride=9)
    one, several = (measure(chain, STREAM, windows, topology, batch_size=size) for size in (1, 5))
    assert one.loss == pytest.approx(several.loss, rel=1e-13)


def test_short_text_is_not_padded_to_a_window() -> None:
    stage, sizes = stage_of(LLAMA), []
    stage.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
    topology = RankContext(0, {}).topology()
    chain = Chain(stage)
    measure(chain, TokenStream([TOKENS[:7]]), Windows(tokens=7, length=1000, stride=1000), topology, batch_size=1)
    assert sizes == [(1, 6)]


def refused(context: RankContext, settings: dict[str, Any], length: int, *, spoil: bool, **axes: int) -> str:
    topology = context.topology(**axes)
    chain = chain_of(settings, topology)
    if spoil and chain.is_first:
        with torch.no_grad():
            next(chain.stage.layers.parameters()).fill_(float("nan"))
    windows = Windows(tokens=61, length=length, stride=length)
    try:
        measure(chain, STREAM, windows, topology, batch_size=1)
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_errors_on_all_ranks() -> None:
    for said in run_ranks(4, refused, {}, 17, spoil=False, tp=2, pp=2):
        assert said == "seq_length 17 is above 16 positions; --seq-length 16 works"
    for said in run_ranks(4, refused, LLAMA, 17, spoil=True, pp=2, dp=2):
        assert said.startswith("the loss is nan: damaged weights")
