"""config.json: missing keys have transformers' defaults, and features that megalite lacks are refused."""

import importlib
import json
from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.flags import parse_arguments
from megalite.config.model import TRAINING_FIELDS
from megalite.config.validate import validate
from megalite.conversion.huggingface.config_json import ModelFile, resolved
from megalite.conversion.huggingface.families import FAMILIES, choose_family, differences
from megalite.conversion.weights import ConversionError
from tests.models.stages import LLAMA, varied

NEEDED: dict[str, Any] = {
    "num_hidden_layers": 30,
    "hidden_size": 128,
    "num_attention_heads": 64,
    "intermediate_size": 20,
    "vocab_size": 37,
}
NEEDED_BY_GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 16, "n_head": 4, "vocab_size": 37}
CLASSES = {
    "phi3": "Phi3",
    "glm": "Glm",
    "gpt2": "GPT2",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}
CLASSES |= {"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}
CLASSES |= {"gemma2": "Gemma2", "gemma3_text": "Gemma3Text", "olmo2": "Olmo2", "glm4": "Glm4", "glm4_moe": "Glm4Moe"}
CLASSES |= {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss"}

NOT_COMPARED = {*TRAINING_FIELDS, "make_vocab_size_divisible_by"}
"""Settings that a family need not express: those of training, and of padding, which changes no logit."""


def needed(name: str) -> dict[str, Any]:
    # Half of each GLM head is rotated; that size has no default.
    if name.startswith("deepseek"):  # of each head's key and value, and of a token's experts
        return NEEDED | {"num_attention_heads": 128, "num_experts_per_tok": 8}
    return dict(NEEDED_BY_GPT2 if name == "gpt2" else NEEDED | {"head_dim": 8} if name == "glm4_moe" else NEEDED)


def read(name: str, values: dict[str, Any]) -> Any:
    return FAMILIES[name].read(ModelFile(values, "config.json"))


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_have_transformers_defaults(name: str) -> None:
    room = name.removesuffix("_text")
    module = importlib.import_module(f"transformers.models.{room}.configuration_{room}")
    theirs = getattr(module, f"{CLASSES[name]}Config")(**needed(name))
    saved = json.loads(theirs.to_json_string(use_diff=False))
    assert read(name, needed(name)) == read(name, saved)


PRESETS = {
    "gpt2-124m": "gpt2",
    "gpt3-1.3b": "gpt2",
    "llama2-7b": "llama",
    "llama3-70b": "llama",
    "llama3.2-1b": "llama",
    "llama3.3-70b": "llama",
    "llama3-405b": "llama",
    "phi-3-mini": "mistral",
    "llama3.1-8b": "llama",
    "mistral-7b": "mistral",
    "qwen2-7b": "qwen2",
    "qwen3-8b": "qwen3",
    "mixtral-8x7b": "mixtral",
    "qwen3-30b-a3b": "qwen3_moe",
    "qwen3-235b-a22b": "qwen3_moe",
    "gemma2-9b": "gemma2",
    "gemma3-27b": "gemma3_text",
    "olmo2-7b": "olmo2",
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss",
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_round_trip_through_their_family(preset: str) -> None:
    asked = parse_arguments(["--preset", preset]).config
    config = validate(asked, 1)
    seq_length = config.training.seq_length
    family = choose_family(config.model, seq_length, None)
    assert family.name == PRESETS[preset]
    if preset == "phi-3-mini":  # which Mistral can also express
        assert differences(FAMILIES["phi3"], config.model, seq_length) == {}
    written = json.loads(json.dumps(family.write(config.model, seq_length)))
    model, positions = read(family.name, written)
    trained = {name: getattr(config.model, name) for name in NOT_COMPARED}
    assert replace(asked, **vars(model) | trained).model == config.model
    assert positions == seq_length


@pytest.mark.parametrize("preset", ["gemma-7b", "deepseek-moe-16b"])
def test_presets_without_a_family_are_refused(preset: str) -> None:
    config = validate(parse_arguments(["--preset", preset]).config, 1)
    with pytest.raises(ConversionError, match="no Hugging Face family is this model"):
        choose_family(config.model, config.training.seq_length, None)


def test_every_changed_setting_changes_or_prevents_the_family() -> None:
    """A change of any setting of a Llama with experts gives another Mixtral, or none."""
    base = resolved(varied(LLAMA, num_experts=4), 12)
    assert differences(FAMILIES["mixtral"], base, 12) == {}
    mixtral = FAMILIES["mixtral"]
    for field, other in {
        "num_layers": 2, "hidden_size": 24, "num_query_groups": 1, "kv_channels": 8, "vocab_size": 40,
        "max_position_embeddings": 20, "rotary_base": 60.0, "rope_scaling": "linear", "sliding_window": 3,
        "activation": "geglu", "norm_epsilon": 1e-4, "num_experts": 5, "moe_router_topk": 3,
        "tie_embeddings": True, "moe_ffn_hidden_size": 12,
    }.items():  # fmt: skip
        changed = resolved(varied(base, **{field: other}), 12)
        assert differences(mixtral, changed, 12) == {}, field
        assert mixtral.write(changed, 12) != mixtral.write(base, 12), field
    for field, other in {
        "normalization": "LayerNorm", "norm_zero_centered": True, "qk_norm": True, "add_qkv_bias": True,
        "add_bias_linear": True, "scale_embeddings": True, "position_embedding_type": "none",
        "activation": "gelu", "moe_shared_expert_intermediate_size": 8, "moe_layer_freq": 2,
        "moe_first_dense_layers": 1, "moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.0,
    }.items():  # fmt: skip
        changed = varied(base, **{field: other})
        assert field in differences(mixtral, changed, 12), field


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'; supported: gelu_new"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true; only false"),
    ("gpt2", {"resid_pdrop": 0.2}, r"embd_pdrop is 0\.1 and resid_pdrop 0\.2; set both"),
    ("gpt2", {"n_head": 3}, "hidden_size 16 is not divisible by num_attention_heads 3"),
    ("llama", {"attention_bias": True}, "attention_bias is true and mlp_bias false; all linear layers or none"),
    ("qwen3", {"attention_bias": True}, "attention_bias is true; all linear layers or none"),
    ("llama", {"hidden_act": "relu2"}, "hidden_act is 'relu2'; supported: silu"),
    ("llama", {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'; .* default, linear"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": 1}},
        "truncate is '1'; it must be true",
    ),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "rope_type linear needs factor, which is missing"),
    ("llama", {"rope_scaling": 2.0}, r"rope_scaling must be an object, not '2\.0'"),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'; it must be a number"),
    ("llama", {"rope_parameters": {"rope_theta": 1e4}, "rope_theta": 5e5}, r"10000\.0 in one place and 500000\.0 in"),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "a separate RoPE for 'full_attention'"),
    ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0\.5; RoPE can only rotate whole heads"),
    ("llama", {"rope_scaling": {"factor": 4.0}}, r"has factor 4\.0 without rope_type"),
    (
        "llama",
        {
            "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192.9}
        },
        r"original_max_position_embeddings is 8192\.9; it must be a whole number",
    ),
    ("gpt2", {"layer_norm_epsilon": 2}, "layer_norm_epsilon is 2; it must be at most 1"),
    ("llama", {"rope_theta": None, "rope_scaling": None, "head_dim": 5}, "a head size of 5 is odd"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers is '-1'"),
    ("mistral", {"layer_types": ["full_attention"] * 30}, "layer_types is not sliding_attention for each of 30 layers"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, r"swiglu_alpha is 1\.5; only 1\.702 is supported"),
    ("gemma2", {"use_bidirectional_attention": True}, "only causal attention is supported"),
    (
        "gemma3_text",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_type of sliding_attention is 'linear'; it must be default",
    ),
    ("mixtral", {"num_local_experts": 1}, "num_experts"),
    ("mixtral", {"num_experts_per_tok": 9}, "moe_router_topk 9"),
]


@pytest.mark.parametrize("name, changes, message", REFUSED)
def test_unsupported_features_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    even = {"head_dim": 2} if name != "gpt2" else {}
    with pytest.raises(ConversionError, match=message) as caught:
        read(name, needed(name) | even | changes)
    assert str(caught.value).startswith("config.json: ")


@pytest.mark.parametrize(
    "changes, window",
    [
        ({}, None),
        ({"use_sliding_window": True, "max_window_layers": 30}, None),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 7}, 7),
        ({"use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, None),
        ({"use_sliding_window": False, "max_window_layers": 0, "sliding_window": 7}, None),
        ({"use_sliding_window": True}, 4096),
    ],
)
def test_qwen_window_starts_at_a_layer(changes: dict[str, Any], window: int | None) -> None:
    for name in ("qwen2", "qwen3"):
        model, _ = read(name, needed(name) | {"head_dim": 2} | changes)
        assert model.sliding_window == window
        first = 30 if window is None else changes.get("max_window_layers", 28)
        assert [model.has_window(index) for index in range(30)] == [index >= first for index in range(30)]


def test_gemma_3_configs_of_both_transformers_versions() -> None:
    values = needed("gemma3_text") | {"head_dim": 2, "rope_theta": 50.0, "rope_local_base_freq": 20.0}
    old, _ = read("gemma3_text", values | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    kinds = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(30)]
    both = {"sliding_attention": {"rope_theta": 20.0, "rope_type": "default"}}
    both["full_attention"] = {"rope_theta": 50.0, "rope_type": "linear", "factor": 8.0}
    new, _ = read("gemma3_text", needed("gemma3_text") | {"head_dim": 2, "layer_types": kinds, "rope_parameters": both})
    assert old == new
    assert (old.window_attn_skip_freq, old.rotary_base, old.rotary_base_local) == ([6], 50.0, 20.0)


def test_llama3_scaling_and_default_of_original_positions() -> None:
    scaling = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.5, "high_freq_factor": 3.0}
    model, _ = read("llama", needed("llama") | {"rope_scaling": scaling})
    assert (model.rope_low_freq_factor, model.rope_high_freq_factor) == (1.5, 3.0)
    assert model.rope_scaling_factor == 2.0
    assert model.rope_original_max_positions == model.max_position_embeddings == 2048


def test_yarn_settings_of_published_models() -> None:
    """Qwen's has only the factor; DeepSeek's also mscale; the default of the factor is the extension of positions."""
    base = {"type": "yarn", "original_max_position_embeddings": 16}
    qwen, _ = read("llama", needed("llama") | {"rope_scaling": base | {"factor": 4.0}})
    assert (qwen.rope_scaling, qwen.rope_scaling_factor, qwen.rope_original_max_positions) == ("yarn", 4.0, 16)
    assert (qwen.rope_mscale, qwen.rope_attention_factor, qwen.rope_truncate) == (None, None, True)
    scaling = base | {"factor": 40, "beta_fast": 20, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.9}
    deepseek, _ = read("llama", needed("llama") | {"rope_scaling": scaling})
    assert (deepseek.rope_beta_fast, deepseek.rope_beta_slow) == (20.0, 2.0)
    assert (deepseek.rope_mscale, deepseek.rope_mscale_all_dim) == (0.7, 0.9)
    alone, _ = read(
        "llama", needed("llama") | {"rope_scaling": base | {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0}}
    )
    assert alone.rope_mscale is None
    reach, _ = read("llama", needed("llama") | {"rope_scaling": base, "max_position_embeddings": 40})
    assert reach.rope_scaling_factor == 2.5
