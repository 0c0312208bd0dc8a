"""Generate and evaluate on any ranks, from checkpoints of any layout and Hugging Face folders, compared with transformers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.weights import HuggingFaceWeights
from megalite.conversion.native import write_native
from megalite.conversion.open import load_model, stop_token_ids
from megalite.generation.continuation import Sampling
from megalite.generation.generate import Chain
from megalite.generation.likelihood import TokenStream, Windows, measure
from megalite.parity.trajectory import assemble
from megalite.tensor_parallel.parameter import ShardedParameter
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Topology
from tests.conversion.huggingface.models import edit_config, saved
from tests.conversion.samples import GPT, MadeUp, byte_tokenizer, train
from tests.generation.models import texts
from tests.models.test_families import VOCAB, all_float64
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import LLAMA as TINY_LLAMA

FAMILIES = ("gpt2", "llama-biases", "qwen2-window", "qwen3", "mixtral")
PROMPTS = [[5, 17, 30, 3], [8], [1, 36, 1, 2, 20], [9, 9]]
GREEDY = Sampling(max_new_tokens=7, temperature=0.0)
TOKENS = np.random.default_rng(3).integers(0, VOCAB, 30)


def silent(line: str) -> None:
    """Discard log lines."""


def open_plain(folder: Path, topology: Topology | None = None, **how: Any) -> Any:
    return load_model(folder, topology or Topology.solo(), **{"needs_tokenizer": False, "log": silent, **how})


def ours(context: RankContext, folder: str, **axes: int) -> dict[str, tuple[Any, float]]:
    """Greedy texts of a batch of unequal prompts, and the loss of some tokens, for each family's folder."""
    topology = context.topology(**axes)
    found = {}
    for name in FAMILIES:
        chain = Chain(open_plain(Path(folder) / name, topology).stage, topology)
        windows = Windows(tokens=len(TOKENS), length=11, stride=4)
        loss = measure(chain, TokenStream([TOKENS]), windows, topology, batch_size=2).loss
        found[name] = ([tokens for tokens, _ in texts(chain, PROMPTS, GREEDY)], loss)
    return found


def theirs(model: Any) -> tuple[list[list[int]], float]:
    """The same by transformers, one prompt and one window at a time."""
    made, total = [], 0.0
    with all_float64(), torch.no_grad():
        for prompt in PROMPTS:
            text = model.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False, eos_token_id=None)
            made.append(text[0, len(prompt) :].tolist())
        end = 0
        for start in range(0, len(TOKENS), 4):
            inputs = torch.tensor(TOKENS[start : min(start + 11, len(TOKENS) - 1)])
            logits = model(inputs[None], use_cache=False).logits[0]
            labels = torch.tensor(TOKENS[start + 1 : start + 1 + len(inputs)])
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            total += float(losses[end - start :].sum())
            end = start + len(inputs)
            if end == len(TOKENS) - 1:
                break
    return made, total / (len(TOKENS) - 1)


def test_texts_and_losses_equal_transformers(tmp_path: Path) -> None:
    """In one stage, and over tp 2 x pp 2."""
    expected = {name: theirs(saved(name, tmp_path / name)) for name in FAMILIES}
    found = [ours(RankContext(0, {}), str(tmp_path)), *run_ranks(4, ours, str(tmp_path), tp=2, pp=2)]
    for rank in found:
        for name, (made, loss) in expected.items():
            assert rank[name][0] == made, name
            assert rank[name][1] == pytest.approx(loss, rel=1e-10), name
    assert sum(len(set(made[0])) > 1 for made, _ in expected.values()) > 2, "the texts must not repeat one token"


def weights_of(context: RankContext, folder: str, dtype: torch.dtype | None, **axes: int) -> Any:
    """This rank's slices by name, and their dtype."""
    stage = open_plain(Path(folder), context.topology(**axes), dtype=dtype).stage
    parts = {}
    for parameter in stage.parameters():
        assert isinstance(parameter, ShardedParameter)
        spec = parameter.info.spec
        parts[spec.name] = (spec.global_shape, spec.slice, parameter.data.float().numpy())
    return parts, stage.factory.dtype


def test_checkpoint_of_any_layout_is_read(tmp_path: Path) -> None:
    """Written in bf16 by four ranks; read on one and four in bf16, and in fp32 from the main parameters."""
    settings = {**TINY_LLAMA, "num_experts": 4, "tp": 2, "pp": 2, "precision": "bf16"}
    held = train(tmp_path / "run", 4, settings)
    kinds = ((None, "weight", {}), (None, "weight", {"tp": 2, "pp": 2}), (torch.float32, "main_param", {"pp": 4}))
    for dtype, kind, axes in kinds:
        ranks = run_ranks(4 if axes else 1, weights_of, str(tmp_path / "run"), dtype, **axes)
        assert {rank[1] for rank in ranks} == {dtype or torch.bfloat16}
        found = assemble([parts for parts, _ in ranks])
        assert found.keys() == held[kind].keys()
        for name, expected in held[kind].items():
            assert np.array_equal(found[name], expected), name


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({"num_attention_heads": 6, "hidden_size": 48}, {"tp": 4}, "num_attention_heads 6 is not divisible by tp 4"),
        ({"ffn_hidden_size": 99}, {"tp": 2}, "ffn_hidden_size 99 is not divisible by tp 2; use tp 1"),
        ({}, {"pp": 3}, "num_layers 2 is less than"),
    ],
)
def test_invalid_layouts_are_refused(
    changes: dict[str, int], layout: dict[str, int], message: str, tmp_path: Path
) -> None:
    """The error is that of the training rules, before anything is read."""
    folder = made_up(tmp_path / "ours", **changes)
    topology = replace(Topology.solo(), layout=ParallelLayout(**layout))
    with pytest.raises(ConfigError, match=f"is no layout for .*ours.*: .*{message}"):
        open_plain(folder, topology)


def made_up(folder: Path, *, tokenizer: bool = True, **changes: Any) -> Path:
    files = byte_tokenizer(folder.parent / "vocabulary") if tokenizer else []
    weights = MadeUp(folder.parent, {**GPT, **changes}, tokenizer_files=files)
    return write_native(weights, folder)


def test_unreadable_paths_are_errors(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("1")
    (tmp_path / "file").write_text("")
    saved("gpt2", tmp_path / "theirs")
    native = made_up(tmp_path / "ours")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (tmp_path / "empty", {}, "is no model of a known format: .* it contains nothing"),
        (tmp_path / "our", {}, "no checkpoint: .*our does not exist; there is .*ours"),
        (tmp_path / "file", {}, "file"),
        (tmp_path / "megatron", {}, "is a Megatron-LM checkpoint; run megalite convert .* --to native"),
        (tmp_path / "theirs", {"step": 3}, "--ckpt-step 3 has no effect on .*theirs"),
        (tmp_path / "theirs", {"needs_tokenizer": True}, "theirs has no tokenizer; give one with --tokenizer-model"),
        (native, {"step": 3}, "has no checkpoint of step 3; it has steps 0"),
        (native / "step-0000000", {"step": 3}, "checkpoint of step 0, and --ckpt-step is 3; leave out --ckpt-step"),
    ]
    for folder, how, message in cases:
        with pytest.raises(ConfigError, match=message):
            open_plain(folder, **how)
    assert open_plain(native / "step-0000000").path == native / "step-0000000"


def test_tokenizer_must_fit_the_model(tmp_path: Path) -> None:
    small = made_up(tmp_path / "small", tokenizer=False, vocab_size=200)
    choice = DataConfig(tokenizer_model=str(tmp_path / "vocabulary"))
    byte_tokenizer(tmp_path / "vocabulary")
    with pytest.raises(ConfigError, match=r"has 257 ids, but the vocab_size of .*small.* is 200"):
        open_plain(small, needs_tokenizer=True, tokenizer=choice)
    with pytest.raises(ConfigError, match="trained without a tokenizer; give one with --tokenizer-model"):
        open_plain(small, needs_tokenizer=True)
    large = made_up(tmp_path / "large")
    model = open_plain(large, needs_tokenizer=True)
    assert (model.tokenizer.eod, model.stop_token_ids) == (256, {256})
    shutil.rmtree(large / "tokenizer")
    with pytest.raises(ConfigError, match=r"is missing \(recorded as"):
        open_plain(large, needs_tokenizer=True)
    assert open_plain(large, needs_tokenizer=True, tokenizer=choice).tokenizer.vocab_size == 257
    with pytest.raises(ConfigError, match="--tiktoken-pattern gpt2 has no effect without --tokenizer-model"):
        open_plain(large, tokenizer=DataConfig(tiktoken_pattern="gpt2"))


def test_end_tokens_equal_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    saved("llama3", folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert stop_token_ids(HuggingFaceWeights(folder), None) == frozenset()
    edit_config(folder, eos_token_id=[3, 4])
    assert stop_token_ids(HuggingFaceWeights(folder), None) == {3, 4}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert stop_token_ids(HuggingFaceWeights(folder), None) == {5}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "5"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id is '5'"):
        stop_token_ids(HuggingFaceWeights(folder), None)


def one_without(context: RankContext, folder: str, **axes: int) -> str:
    """Rank 1 does not see the folder."""
    try:
        open_plain(Path(folder if context.rank != 1 else f"{folder}-gone"), context.topology(**axes))
    except ConfigError as error:
        return str(error)
    return "nothing was raised"


def test_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    saved("llama3", tmp_path / "theirs")
    (tmp_path / "theirs-gone").mkdir()
    every = run_ranks(2, one_without, str(tmp_path / "theirs"), pp=2)
    assert every[0] == every[1] and "theirs-gone is no model of a known format" in every[0]
