"""Written folders load in stock transformers as the same network; a folder that was read is written back unchanged."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.cli.convert import described
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.weights import ConversionError, LastRead, WithTokenizer, parameter_shapes
from tests.conversion.huggingface.models import (
    CASES,
    InMemory,
    edit_config,
    our_logits,
    our_stage,
    our_text,
    saved,
    tensors_of,
    their_logits,
)
from tests.conversion.samples import byte_tokenizer
from tests.models.stages import GPT, LLAMA, varied
from tests.models.test_families import VOCAB, all_float64, error
from tests.support.tiny import rows_of, words

GEMMA: dict[str, Any] = words(
    "norm_zero_centered scale_embeddings post_norms activation=geglu_tanh sliding_window=4 tie_embeddings"
)
GEMMA2 = varied(LLAMA, **GEMMA)
EXAONE = words("qk_norm pre_norms=false post_norms")
EXPERTS = words(
    "num_experts=6 moe_router_topk=3 moe_ffn_hidden_size=12 moe_router_score_function=sigmoid "
    "moe_router_enable_expert_bias"
)
MINIMAX = EXPERTS | {"qk_norm": True, "qk_norm_all_heads": True}
PROMPT = [5, 17, 30, 3]
PRESETS = rows_of(
    """
gpt2-gelu-untied: tie_embeddings=false
llama: LLAMA
llama-biases: add_bias_linear tie_embeddings
llama3.1: rope_scaling=llama3 rope_original_max_positions=10 kv_channels=16
llama-dynamic: rope_scaling=dynamic rope_scaling_factor=2.0 rope_original_max_positions=12
llama-yarn: YARN rope_beta_fast=1.5 rope_beta_slow=0.25 rope_mscale=2.0 rope_mscale_all_dim=0.5 kv_channels=16
qwen3-yarn: qk_norm rope_scaling=yarn rope_attention_factor=1.2 rope_truncate=false
mistral-odd: hidden_size=18 num_attention_heads=4
qwen2: add_qkv_bias
qwen3-window: qk_norm sliding_window=4
phi3: rotary_percent=0.5 kv_channels=8 sliding_window=4
glm: rotary_percent=0.5 rotary_interleaved add_qkv_bias kv_channels=12
qwen2-mixed: add_qkv_bias sliding_window=4 window_attn_skip_freq=[1,0,1]
gemma2-plain: GEMMA window_attn_skip_freq=[0,1,1]
gemma3_text: GEMMA window_attn_skip_freq=[3] qk_norm rotary_base_local=30.0 SCALE rope_scaling=linear
  rope_scaling_factor=2.0 tie_embeddings=false
gpt_oss: softmax_type=learnable add_bias_linear num_experts=5 moe_router_topk=3 moe_add_bias_linear
  activation=quick_geglu activation_func_clamp_value=0.5 glu_linear_offset=1.0 sliding_window=4
  window_attn_skip_freq=[0,1,1]
smollm3: no_rope_freq=[2]
arcee: activation=squared_relu rope_scaling=linear rope_scaling_factor=3.0
ministral: sliding_window=4 window_attn_skip_freq=[1,0,1]
exaone4: EXAONE sliding_window=4 window_attn_skip_freq=[2] no_rope_freq=[2]
exaone4-list: EXAONE sliding_window=4 window_attn_skip_freq=[1,0,0] no_rope_freq=[0,1,1]
olmo3: EXAONE YARN qk_norm_all_heads sliding_window=4 window_attn_skip_freq=[2] rotary_base_local=30.0
minimax_m2: MINIMAX rotary_percent=0.5 kv_channels=8
dots1: EXPERTS qk_norm moe_shared_expert_intermediate_size=24 moe_router_topk_scaling_factor=1.5
  moe_first_dense_layers=1 sliding_window=4 window_attn_skip_freq=[1,0,1]
mixtral: num_experts=5 moe_router_topk=3 moe_ffn_hidden_size=12 sliding_window=4
ernie4_5_moe: EXPERTS moe_router_score_function=softmax moe_shared_expert_intermediate_size=24 moe_first_dense_layers=1
  rotary_interleaved
granite: GRANITE kv_channels=6
granitemoe: GRANITE num_experts=5 moe_router_topk=3 moe_ffn_hidden_size=12
ministral3: YARN attn_temperature_beta=0.4 rope_mscale=1.0 rope_mscale_all_dim=1.0 kv_channels=6
granitemoeshared: GRANITE num_experts=5 moe_router_topk=3 moe_shared_expert_intermediate_size=8
""",
    {
        "LLAMA": {},
        "GEMMA": GEMMA,
        "EXAONE": EXAONE,
        "EXPERTS": EXPERTS,
        "MINIMAX": MINIMAX,
        "GRANITE": words("embedding_multiplier=7.0 residual_multiplier=0.6 logits_scaling=3.0"),
        "SCALE": {"softmax_scale": 10**-0.5},
    }
    | {"YARN": words("rope_scaling=yarn rope_scaling_factor=3.0 rope_original_max_positions=10")},
)
"""Models, by the family that they are written as."""


def random_weights(name: str, folder: Path) -> InMemory:
    """A model with every weight random, including padding rows."""
    gpt = name.startswith("gpt2")
    model = varied(GPT if gpt else LLAMA, **PRESETS[name])
    generator = torch.Generator().manual_seed(7)
    tensors = {
        key: torch.randn(shape.shape, dtype=torch.float64, generator=generator) * (0.3 if len(shape.shape) > 1 else 0.2)
        + (shape.init == "ones")
        for key, shape in parameter_shapes(model).items()
    }
    folder.mkdir()
    return InMemory(folder, model, 12, tensors)


write = write_huggingface


def stock(folder: Path, **how: Any) -> Any:
    """Load in transformers as a user would, but with the plain kernels, the only ones for float64."""
    from transformers import AutoModelForCausalLM

    has_experts = json.loads((folder / "config.json").read_text())["model_type"] in (
        *("mixtral", "gpt_oss", "minimax_m2", "dots1", "granitemoe", "granitemoeshared", "ernie4_5_moe"),
    )
    kernels = {"experts_implementation": "eager"} if has_experts else {}
    with all_float64():
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True, local_files_only=True, **kernels, **how
        )
    assert not any(report.values()), report
    return model


@pytest.mark.parametrize("name", PRESETS)
def test_stock_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    weights = random_weights(name, tmp_path / "ours")
    folder = write(weights, tmp_path / "theirs")
    them, us = stock(folder), our_stage(weights)
    assert them.config.model_type == name.split("-")[0].replace("3.1", "")
    assert error(our_logits(us), their_logits(them)) < 1e-9
    with all_float64(), torch.no_grad():
        text = them.generate(torch.tensor([PROMPT]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    ours = our_text(us, PROMPT, 8)
    assert text[0].tolist() == PROMPT + ours
    assert len(set(ours)) > 1, "the texts must not repeat one token"


def test_mtp_layers_are_written(tmp_path: Path) -> None:
    """By DeepSeek-V3's names, with embedding and head repeated; Llama has no place for them, which is reported."""
    saved("deepseek-v3", tmp_path / "stock")
    plain = HuggingFaceWeights(tmp_path / "stock")
    model = replace(plain.model, mtp_num_layers=2)
    generator = torch.Generator().manual_seed(4)
    tensors = {
        name: plain.read(name)
        if name in parameter_shapes(plain.model)
        else torch.randn(shape.shape, dtype=torch.float64, generator=generator)
        for name, shape in parameter_shapes(model).items()
    }
    (tmp_path / "ours").mkdir()
    weights = InMemory(tmp_path / "ours", model, 12, tensors)
    folder = write(weights, tmp_path / "theirs", family="deepseek_v3")
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoModelForCausalLM": "code.Model"})  # as published
    found, held = HuggingFaceWeights(folder), tensors_of(folder)
    assert found.model == model and "MTP layers: 2" in described(found)
    assert all(torch.equal(found.read(name), tensors[name]) for name in tensors)
    for index in (3, 4):
        for copy, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            assert torch.equal(held[f"model.layers.{index}.{copy}.weight"], held[f"{of}.weight"])
    plain_llama = random_weights("llama", tmp_path / "llama")
    llama = varied(plain_llama.model, mtp_num_layers=1)
    said: list[str] = []
    tensors = plain_llama.tensors | {name: torch.ones(1) for name in parameter_shapes(llama)}
    source = InMemory(tmp_path / "llama", llama, 12, plain_llama.tensors | tensors | plain_llama.tensors)
    write(source, tmp_path / "without", log=said.append)
    assert any("llama has no layers for multi-token prediction: 1 left out" in line for line in said)
    assert tensors_of(tmp_path / "without").keys() == tensors_of(write(plain_llama, tmp_path / "plain")).keys()


@pytest.mark.parametrize("name", CASES)
def test_round_trip_is_exact(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path / "before")
    before = HuggingFaceWeights(tmp_path / "before")
    folder = write(before, tmp_path / "after", family=before.family.name)
    after = HuggingFaceWeights(folder)
    old, new = tensors_of(tmp_path / "before"), tensors_of(folder)
    assert old.keys() == new.keys()
    for key in old:
        assert old[key].dtype == new[key].dtype and torch.equal(old[key], new[key]), key
    assert after.model == before.model and after.seq_length == before.seq_length
    assert significant_config(tmp_path / "before") == significant_config(folder)


def significant_config(folder: Path) -> dict[str, Any]:
    """A folder's config as transformers reads it, without optional, derived and unknown keys."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(folder, local_files_only=True)
    config = {key: value for key, value in found.to_dict().items() if key in type(found)().to_dict()}
    heads = config.get("num_attention_heads")
    config["head_dim"] = config.get("head_dim") or (heads and config["hidden_size"] // heads)
    config["n_inner"] = config.get("n_inner") or (config.get("n_embd") and 4 * config["n_embd"])
    # A Phi-3 keeps partial_rotary_factor next to rope_parameters if it was there.
    for free in (
        "partial_rotary_factor",
        "max_window_layers",
        "_name_or_path",
        "transformers_version",
        "use_cache",
        "no_rope_layer_interval",  # has no effect next to no_rope_layers
        *("chunk_size", "mamba_chunk_size", "time_step_min"),  # of an algorithm and of initial values
    ):
        config.pop(free, None)
    if not config.get("use_sliding_window", True):
        config.pop("sliding_window")
    return config


def test_weights_in_several_files(tmp_path: Path) -> None:
    saved("mixtral", tmp_path / "before")
    weights = InMemory.copy(HuggingFaceWeights(tmp_path / "before"))
    counted: list[int] = []
    folder = write(weights, tmp_path / "after", max_file_bytes=20_000, advance=counted.append)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    count = len(files)
    assert count > 3
    assert files == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert all((folder / file).stat().st_size <= 20_000 for file in files)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    old, new = tensors_of(tmp_path / "before"), tensors_of(folder)
    assert old.keys() == new.keys() == index["weight_map"].keys()
    assert all(torch.equal(old[key], new[key]) for key in old)
    total = sum(tensor.numel() * 8 for tensor in old.values())
    assert index["metadata"]["total_size"] == sum(counted) == total
    stock(folder)  # only the needed files
    again = HuggingFaceWeights(folder)
    for name in parameter_shapes(again.model):
        assert torch.equal(again.read(name), weights.read(name))


def test_write_in_another_dtype(tmp_path: Path) -> None:
    weights = random_weights("qwen2", tmp_path / "ours")
    folder = write(weights, tmp_path / "theirs", dtype=torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    tensors = tensors_of(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    rows = weights.read("head.weight")[:VOCAB]
    assert torch.equal(tensors["lm_head.weight"], rows.bfloat16())
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].double()
    double = our_stage(HuggingFaceWeights(folder))
    with torch.no_grad():
        ours = double(torch.tensor([PROMPT]), double.generation_context(4))[:, 0]
    assert float((ours[:, :VOCAB] - logits).abs().max() / logits.abs().max()) < 0.03


@pytest.mark.parametrize("tokenizer", ["its own", "none", "another"])
def test_wrapped_weights_keep_the_source_folder(tmp_path: Path, tokenizer: str) -> None:
    """Its family is kept, and its token ids and generation_config.json unless the tokenizer changes."""
    saved("mistral-no-window", tmp_path / "before")
    edit_config(tmp_path / "before", bos_token_id=1, eos_token_id=[2, 7], pad_token_id=...)
    generation = {"eos_token_id": [2, 7, 9], "temperature": 0.6}
    (tmp_path / "before" / "generation_config.json").write_text(json.dumps(generation))
    weights = HuggingFaceWeights(tmp_path / "before")
    others = byte_tokenizer(tmp_path / "other") if tokenizer == "another" else []
    wrapped = LastRead(weights if tokenizer == "its own" else WithTokenizer(weights, others))
    folder = write(wrapped, tmp_path / "after")
    config = json.loads((folder / "config.json").read_text())
    written = json.loads((folder / "generation_config.json").read_text())
    assert config["model_type"] == "mistral", "llama is the same network and comes first"
    ids = {name: value for name, value in config.items() if name.endswith("token_id")}
    if tokenizer == "another":
        assert ids == {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": None}
        assert written == {"bos_token_id": 256, "eos_token_id": 256}
    else:
        assert ids == {"bos_token_id": 1, "eos_token_id": [2, 7]}
        assert written == generation


def test_default_token_ids_of_the_source_are_not_written(tmp_path: Path) -> None:
    saved("llama3", tmp_path / "before")
    edit_config(tmp_path / "before", bos_token_id=..., eos_token_id=..., pad_token_id=None)
    (tmp_path / "before" / "generation_config.json").unlink()
    folder = write(HuggingFaceWeights(tmp_path / "before"), tmp_path / "after")
    config = json.loads((folder / "config.json").read_text())
    assert "bos_token_id" not in config and "eos_token_id" not in config
    assert config["pad_token_id"] is None, "the source has this one"
    assert not (folder / "generation_config.json").exists(), "the source has none either"
    loaded = [stock(path).config for path in (tmp_path / "before", folder)]
    assert [(it.bos_token_id, it.eos_token_id) for it in loaded] == [(1, 2), (1, 2)]


REFUSED: list[tuple[str | None, ModelConfig, str]] = [  # family, model, part of the message
    (
        None,
        varied(LLAMA, scale_embeddings=True, norm_zero_centered=True, activation="geglu_tanh"),
        r"no Hugging Face family is this model; the nearest, gemma2, differs: post_norms is False, gemma2 has True",
    ),
    (
        None,
        varied(LLAMA, no_rope_freq=[2], qk_norm=True),
        r"qwen3, differs: no_rope_freq is \[0, 1, 0\], qwen3 has None",
    ),
    ("llama", varied(LLAMA, no_rope_freq=[2]), "llama has None; --family smollm3 is the same model"),
    (
        "minimax_m2",
        varied(LLAMA, **MINIMAX | {"moe_router_topk": 2, "moe_router_num_groups": 3, "moe_router_group_topk": 2}),
        "moe_router_num_groups is 3, minimax_m2 has None",
    ),
    ("olmo3", varied(LLAMA, activation="squared_relu"), "--family arcee is the same model"),
    ("gemma2", varied(GEMMA2, rotary_base_local=3e4), "rotary_base_local is 30000.0, gemma2 has None"),
    (None, varied(GPT, position_embedding_type="none"), "gpt2, differs: position_embedding_type is none"),
    (None, varied(LLAMA, qk_norm=True, add_qkv_bias=True), "nearest, qwen2, differs: qk_norm is True"),
    (None, varied(LLAMA, num_experts=4, moe_layer_freq=2), "moe_layer_freq is 2, mixtral has 1"),
    (None, varied(GPT, activation="swiglu", ffn_hidden_size=20), "gpt2, differs: activation is swiglu"),
    ("llama", varied(LLAMA, hidden_size=18, num_attention_heads=4), "--family mistral is the same model"),
    ("qwen3", LLAMA, "qwen3 differs: qk_norm is False, qwen3 has True; --family llama is the same model"),
    ("gemma", LLAMA, "gemma is not a supported family; use gpt2, llama, mistral"),
]


@pytest.mark.parametrize("family, model, message", REFUSED)
def test_model_without_a_family_is_refused(
    family: str | None, model: ModelConfig, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConversionError, match=message):
        write(InMemory(tmp_path, model, 12, {}), tmp_path / "theirs", family=family)
    assert list(tmp_path.iterdir()) == []
