"""The text model of a multimodal folder is read; the rest is left out with a line."""

import importlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.cli.convert import described
from megalite.conversion.huggingface.families import read_config
from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.weights import ConversionError
from tests.conversion.huggingface.models import (
    CASES,
    edit_config,
    our_logits,
    our_stage,
    rename,
    saved,
    tensors_of,
    their_logits,
)
from tests.conversion.samples import run
from tests.conversion.test_training import said, started
from tests.models.test_families import THEIR_SMALL, all_float64, error, with_weights
from tests.support.ranks import run_ranks
from tests.support.tiny import assemble

_VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
_VISION |= {"image_size": 8, "patch_size": 4}
_QWEN = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 16}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "exaone4_5": ("Exaone4_5_", "exaone4", _QWEN | {"num_key_value_heads": 1, "fullatt_block_indexes": [0]}),
    "gemma3": ("Gemma3", "gemma3", _VISION),
    "internvl": ("InternVL", "qwen2", _VISION),
    "mistral3": ("Mistral3", "mistral", _VISION),
    "mistral3-ministral3": ("Mistral3", "ministral3", _VISION),
    "mistral3-mistral4": ("Mistral3", "mistral4", _VISION),
    "qwen3_5": ("Qwen3_5", "qwen3.5", _QWEN | {"num_position_embeddings": 4}),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3.5-moe", _QWEN | {"num_position_embeddings": 4}),
    "qwen3_vl": ("Qwen3VL", "qwen3", _QWEN | {"num_position_embeddings": 4, "deepstack_visual_indexes": [0]}),
}
"""model_type -> transformers' classes, the case of the text model, and a small vision model."""
_NAMES = {"exaone4_5": "exaone4_5_text", "mistral3-ministral3": "ministral3", "mistral3-mistral4": "mistral4"}
KEYS = {kind: {"model_type": name} for kind, name in _NAMES.items()}  # which it needs in text_config


def config_of(kind: str, **settings: Any) -> Any:
    return getattr(module_of(kind, "configuration"), f"{KINDS[kind][0]}Config")(**settings)


def module_of(kind: str, part: str) -> Any:
    kind = kind.split("-")[0]
    return importlib.import_module(f"transformers.models.{kind}.{part}_{kind}")


def multimodal(kind: str, folder: Path, **settings: Any) -> Any:
    """Save transformers' whole model of a kind. Returns it."""
    classes, text, vision = KINDS[kind]
    config = config_of(
        kind, text_config=THEIR_SMALL | CASES[text].theirs | KEYS.get(kind, {}), vision_config=vision, **settings
    )
    config._attn_implementation = config._experts_implementation = "eager"
    with all_float64(), torch.random.fork_rng():
        torch.manual_seed(0)  # of initial values to which `with_weights` adds
        model = getattr(module_of(kind, "modeling"), f"{classes}ForConditionalGeneration")(config).eval()
    with_weights(model).save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_text_model_is_read_bit_for_bit(kind: str, tmp_path: Path) -> None:
    model = multimodal(kind, tmp_path / "whole", tie_word_embeddings=False)
    weights = HuggingFaceWeights(tmp_path / "whole")
    assert error(our_logits(our_stage(weights)), their_logits(model)) < 1e-9
    write_huggingface(weights, tmp_path / "text")
    theirs = {name.replace("language_model.", ""): tensor for name, tensor in model.state_dict().items()}
    ours = tensors_of(tmp_path / "text")
    for name, tensor in ours.items():
        if ".experts." not in name:  # merged in the state
            assert torch.equal(tensor, theirs[name]), name
    vision = [tensor for name, tensor in tensors_of(tmp_path / "whole").items() if "vis" in name or "projector" in name]
    size = sum(tensor.nbytes for tensor in vision)
    assert (
        described(weights).endswith(f" ({size:,} bytes)")
        and f"; left out: {len(vision)} tensors of " in weights.remarks
    )
    text = HuggingFaceWeights(tmp_path / "text")
    assert text.remarks == "" and error(our_logits(our_stage(text)), their_logits(model)) < 1e-9


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen3_5_moe"])
def test_conversion_is_verified_with_the_whole_model(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    multimodal(kind, tmp_path / "whole", tie_word_embeddings=True)
    assert run(tmp_path / "whole", tmp_path / "native", "--to", "native") == 0
    said = capsys.readouterr().out
    assert "; left out: " in said and "by transformers" in said and "verify   passed" in said


def test_training_starts_from_the_text_model(tmp_path: Path) -> None:
    multimodal("gemma3", tmp_path)
    weights = HuggingFaceWeights(tmp_path, divisible_by=8)
    settings = {**asdict(weights.model), "seq_length": 12, "load": f"hf:{tmp_path}", "precision": "fp64"}
    ranks = run_ranks(2, started, 2, {**settings, "tp": 2})
    for name, values in assemble([rank[0] for rank in ranks]).items():
        assert np.array_equal(np.asarray(values), weights.read(name).numpy()), name
    (lines,) = run_ranks(1, said, settings)
    assert lines == [f"loaded the weights of {tmp_path}{weights.remarks}; training begins at step 0"]
    assert lines[0].count("left out: ") == 1


def other_prefix(name: str) -> str:
    """Rename a tensor as the other versions of transformers do."""
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.")
    return name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")


@pytest.mark.parametrize(("kind", "tied"), [("gemma3", False), ("qwen3_5", False), ("qwen3_5", True)])
def test_prefixes_of_all_versions_are_read(kind: str, tied: bool, tmp_path: Path) -> None:
    multimodal(kind, tmp_path, tie_word_embeddings=tied)
    before = HuggingFaceWeights(tmp_path)
    expected = {name: before.read(name) for name in before._pieces}
    word = next(name for name in tensors_of(tmp_path) if name.endswith("embed_tokens.weight"))
    if tied:  # a stored head that equals the embedding
        rename(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[word].clone()})
    frequencies = word.replace("embed_tokens.weight", "layers.0.self_attn.rotary_emb.inv_freq")  # of old versions
    rename(tmp_path, lambda tensors: tensors | {frequencies: torch.ones(2)})
    rename(tmp_path, lambda tensors: {other_prefix(name): tensor for name, tensor in tensors.items()})
    after = HuggingFaceWeights(tmp_path)
    assert all(torch.equal(after.read(name), value) for name, value in expected.items())
    assert after.remarks == before.remarks
    rename(tmp_path, lambda tensors: tensors | {word: tensors[other_prefix(word)].clone()})
    with pytest.raises(ConversionError, match=r"has no (model\.)?language_model\.(model\.)?embed_tokens\.weight$"):
        HuggingFaceWeights(tmp_path)


@pytest.mark.parametrize(
    ("name", "part", "published"),
    [("qwen3-next", "mtp", {}), ("qwen3.5", "mtp", {})]
    + [("ernie4.5-moe", "model.mtp_block", {"auto_map": {"AutoModelForCausalLM": "code.Model"}})],
)
def test_mtp_tensors_are_left_out_with_a_line(name: str, part: str, published: dict[str, Any], tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    edit_config(tmp_path, **published)
    assert HuggingFaceWeights(tmp_path).remarks == ""
    more = {f"{part}.0.norm.weight": torch.ones(5), f"{part}.0.fc.weight": torch.ones(2, 3)}
    rename(tmp_path, lambda tensors: tensors | more)
    weights = HuggingFaceWeights(tmp_path)
    assert weights.remarks == f"; left out: 2 tensors of {part} (44 bytes)"
    assert error(our_logits(our_stage(weights)), their_logits(model)) < 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_missing_keys_have_the_defaults_of_the_whole_config(kind: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 20, "head_dim": 8}
    if kind != "gemma3":  # published files of others have them
        sizes |= {"num_attention_heads": 32, "vocab_size": 40}
    theirs = json.loads(config_of(kind, text_config=sizes | KEYS.get(kind, {})).to_json_string(use_diff=False))
    sparse = {"model_type": theirs["model_type"], "text_config": sizes | KEYS.get(kind, {})}
    found = []
    for values in (sparse, theirs | {"tie_word_embeddings": None}):
        (tmp_path / "config.json").write_text(json.dumps(values))
        found.append(read_config(tmp_path)[:3])
    assert found[0] == found[1]


def test_keys_of_the_whole_apply_to_the_text(tmp_path: Path) -> None:
    multimodal("gemma3", tmp_path, tie_word_embeddings=True)
    edit_config(tmp_path, eos_token_id=[1, 6], pad_token_id=None)
    weights = HuggingFaceWeights(tmp_path)
    assert weights.model.tie_embeddings and weights.token_ids["eos_token_id"] == [1, 6]
    edit_config(tmp_path, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConversionError, match="text_config: quantization_config: supported: mxfp4"):
        HuggingFaceWeights(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": 3}, "text_config is '3'; it must be an object"),
        ({"model_type": "llama4"}, "model_type is 'llama4'; supported: .*, and the text of exaone4_5, gemma3"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map names code in the folder, which is never run"),
        ({"text_config": {"model_type": "llama4_text"}}, "text_config: model_type is 'llama4_text'; supported: gpt2"),
        ({"text_config": {"auto_map": {"AutoModel": "code.Model"}}}, "text_config: auto_map names code"),
        ({"text_config": {"use_bidirectional_attention": True}}, "text_config: use_bidirectional_attention is true"),
    ],
)
def test_unsupported_folders_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    multimodal("gemma3", tmp_path)
    text = changes.get("text_config")
    if isinstance(text, dict):
        whole = json.loads((tmp_path / "config.json").read_text())["text_config"]
        changes = {"text_config": whole | text}
    edit_config(tmp_path, **changes)
    with pytest.raises(ConversionError, match=message):
        HuggingFaceWeights(tmp_path)
