"""config.json: missing keys have transformers' defaults, and features that megalite lacks are refused."""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from megalite.config.describe import replace
from megalite.config.flags import parse_arguments
from megalite.config.model import TRAINING_FIELDS
from megalite.config.validate import validate
from megalite.conversion.huggingface.choose import choose_family, differences
from megalite.conversion.huggingface.config_json import ModelFile, resolved
from megalite.conversion.huggingface.families import FAMILIES
from megalite.conversion.weights import ConversionError
from megalite.models.shapes import parameter_count
from tests.models.stages import LLAMA, varied
from tests.support.tiny import words

NEEDED: dict[str, Any] = {"num_hidden_layers": 30, "hidden_size": 128, "num_attention_heads": 64}
NEEDED |= {"intermediate_size": 20, "vocab_size": 37}
NEEDED_BY_GPT2: dict[str, Any] = {"n_layer": 3, "n_embd": 16, "n_head": 4, "vocab_size": 37}
NOT_COMPARED = {*TRAINING_FIELDS, "make_vocab_size_divisible_by"}
"""Settings that a family need not express: those of training, and of padding, which changes no logit."""


def needed(name: str) -> dict[str, Any]:
    # Half of each GLM head is rotated; that size has no default.
    if name.startswith("deepseek"):  # of each head's key and value, and of a token's experts
        return NEEDED | {"num_attention_heads": 128, "num_experts_per_tok": 8}
    if name == "glm4_moe_lite":
        return NEEDED | {"num_attention_heads": 20, "hidden_size": 120}
    if name == "dots1":
        experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True}
        return NEEDED | experts | {"num_attention_heads": 32}
    if name == "bamba":
        return NEEDED | {"hidden_size": 512, "num_attention_heads": 8}
    if name == "nemotron_h":
        return NEEDED | {"hybrid_override_pattern": "ME*EM"}
    if name == "granitemoeshared":
        return NEEDED | {"shared_intermediate_size": 24}
    if name == "granitemoehybrid":
        attention = {"layer_types": ["full_attention"] * 30, "position_embedding_type": "rope", "mamba_n_heads": 1}
        return NEEDED | attention | {"num_local_experts": 0}
    if name == "solar_open":
        return {key: value for key, value in NEEDED.items() if key != "intermediate_size"}
    if name in ("exaone4", "exaone_moe", "mistral4"):
        return NEEDED | {"num_attention_heads": 32}
    return dict(NEEDED_BY_GPT2 if name == "gpt2" else NEEDED | {"head_dim": 8} if name == "glm4_moe" else NEEDED)


def read(name: str, values: dict[str, Any]) -> Any:
    return FAMILIES[name].read(ModelFile(values, "config.json"))


@pytest.mark.parametrize("name", FAMILIES)
def test_missing_keys_have_transformers_defaults(name: str) -> None:
    theirs = AutoConfig.for_model(name, **needed(name))
    saved = json.loads(theirs.to_json_string(use_diff=False))
    assert read(name, needed(name)) == read(name, saved)


PRESETS = words(
    "gpt2-124m=gpt2 gpt3-1.3b=gpt2 llama2-7b=llama llama3-70b=llama llama3.2-1b=llama llama3.3-70b=llama "
    "llama3-405b=llama phi-3-mini=mistral llama3.1-8b=llama mistral-7b=mistral qwen2-7b=qwen2 qwen3-8b=qwen3 "
    "mixtral-8x7b=mixtral qwen3-30b-a3b=qwen3_moe qwen3-235b-a22b=qwen3_moe qwen3-next-80b-a3b=qwen3_next "
    "gemma2-9b=gemma2 gemma3-27b=gemma3_text olmo2-7b=olmo2 olmo3-7b=olmo3 smollm3-3b=smollm3 gpt-oss-20b=gpt_oss "
    "gpt-oss-120b=gpt_oss granite-3.1-8b=granite ministral-3-8b=ministral3 mistral-small-4-119b=mistral4 "
    "nemotron-3-nano-30b-a3b=nemotron_h"
)


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
        "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 8.0, "softmax_scale": 0.3,
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
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true; only false is supported"),
    (
        "qwen3_moe",
        {"layer_types": ["sliding_attention"] * 30},
        "layer_types is not full_attention for each of 30 layers",
    ),
    (
        "qwen3_next",
        {"layer_types": ["full_attention"] * 29},
        "it must be full_attention or linear_attention for each of 30",
    ),
    ("qwen3_next", {"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window is true; only false"),
    ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "is 'yarn'; it must be default"),
    ("smollm3", {"use_sliding_window": True}, "use_sliding_window is true; only false"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; it must be a 0 or 1 for each of 30 layers"),
    ("smollm3", {"no_rope_layers": [2] * 30}, "no_rope_layers is .* a 0 or 1 for each of 30 layers"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias is true; only false is supported"),
    ("seed_oss", {"mlp_bias": True}, "mlp_bias is true; only false is supported"),
    ("ernie4_5", {"use_bias": True}, "use_bias is true; only false is supported"),
    ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval is 2; only 1 is supported"),
    ("ernie4_5_moe", {"moe_layer_end_index": 20}, "moe_layer_end_index is '20'; it must be the last of 30 layers"),
    (
        "ernie4_5_moe",
        {"moe_layer_start_index": 30},
        "moe_layer_start_index is '30'; it must be a whole number below 30",
    ),
    ("arcee", {"hidden_act": "silu"}, "hidden_act is 'silu'; supported: relu2"),
    ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'; it must be a whole number"),
    ("minimax_m2", {"scoring_func": "softmax"}, 'scoring_func is "softmax"; only "sigmoid" is supported'),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias is false; only true is supported"),
    ("dots1", {"norm_topk_prob": False}, "norm_topk_prob is false; .* num_experts_per_tok 2 only true is supported"),
    ("dots1", {"num_experts_per_tok": 1}, "norm_topk_prob is true; .* num_experts_per_tok 1 only false is supported"),
    ("dots1", {"n_routed_experts": None}, "n_routed_experts is null; it must be a number"),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense"] * 15}, "it must be dense layers and then sparse ones"),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared"] * 15}, "it must be full for each of 30 layers"),
    ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is false; only true is supported"),
    ("deepseek_v32", {"index_topk_freq": 2}, "index_topk_freq is 2; only 1 is supported"),
    ("deepseek_v32", {"layer_types": ["full_attention"] * 30}, "it must be indexed_attention for each of 30 layers"),
    ("granite", {"residual_multiplier": 0}, "residual_multiplier is 0; it must be above 0"),
    ("granite", {"logits_scaling": None}, "logits_scaling is 'None'; it must be a number"),
    ("granitemoeshared", {"shared_intermediate_size": 0}, "shared_intermediate_size is '0'; it must be a whole number"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 29}, "it must be mamba or attention for each of 30 layers"),
    ("granitemoehybrid", {"position_embedding_type": "alibi"}, "is 'alibi'; it must be nope or rope"),
    (
        "granitemoehybrid",
        {"layer_types": None, "mamba_n_heads": 7},
        "it must be mamba_n_heads 7 times mamba_d_head auto",
    ),
    ("bamba", {"attn_layer_indices": [2, 30]}, "it must be a list of numbers below 30"),
    ("bamba", {"mamba_conv_bias": False}, "mamba_conv_bias is false; only true is supported"),
    ("bamba", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit is \[0.0, 0.1\]; only \[0, Infinity\], no limit"),
    ("nemotron_h", {"hybrid_override_pattern": "M-E"}, "hybrid_override_pattern 'M-E' must consist of"),
    ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, "'ME\\*-' has - after E"),
    ("nemotron_h", {"hybrid_override_pattern": "G-"}, r"hybrid_override_pattern '\?-' must consist of"),
    ("nemotron_h", {"moe_latent_size": 1024}, "moe_latent_size is 1024; only null is supported"),
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


MIXED = ["sliding_attention"] * 3 + ["full_attention"]
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "exaone4": (
        32.0e9,
        {"vocab_size": 102400, "hidden_size": 5120, "intermediate_size": 27392, "num_hidden_layers": 64}
        | {"num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1000000}
        | {"sliding_window": 4096, "sliding_window_pattern": "LLLG", "layer_types": MIXED * 16},
    ),
    "seed_oss": (
        36.15e9,
        {"vocab_size": 155136, "hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64}
        | {"num_attention_heads": 80, "num_key_value_heads": 8, "rope_scaling": {"rope_type": "default"}},
    ),
    "minimax_m2": (
        228.7e9,
        {"vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62}
        | {"num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 256, "num_experts_per_tok": 8}
        | {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True, "use_mtp": True, "use_qk_norm": True},
    ),
    "dots1": (
        142.8e9,
        {"vocab_size": 152064, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 62}
        | {"num_attention_heads": 32, "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 2}
        | {"num_experts_per_tok": 6, "norm_topk_prob": True, "n_group": None, "topk_group": None}
        | {"routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "sliding_window": None},
    ),
    "glm4_moe_lite": (
        29.9e9,
        {"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "num_hidden_layers": 47}
        | {
            "num_attention_heads": 20,
            "num_key_value_heads": 20,
            "partial_rotary_factor": 1.0,
            "topk_method": "noaux_tc",
        }
        | {"first_k_dense_replace": 1, "rope_theta": 1000000, "num_nextn_predict_layers": 1},
    ),
    "glm_moe_dsa": (
        744e9,
        {"vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78}
        | {"num_attention_heads": 64, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}
        | {"index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True},
    ),
    "ernie4_5_moe": (
        21.83e9,
        {"vocab_size": 103424, "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 28}
        | {"num_attention_heads": 20, "num_key_value_heads": 4, "moe_num_experts": 64, "moe_num_shared_experts": 2}
        | {"moe_layer_start_index": 1, "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_end_index": None},
    ),
    "bamba": (
        9.78e9,
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | {
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attn_layer_indices": [9, 18, 27],
            "mamba_d_state": 128,
        },
    ),
    "nemotron_h": (
        8.1e9,
        {"vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8}
        | {"ssm_state_size": 128, "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"},
    ),
    "granitemoe": (
        3.3e9,
        {"vocab_size": 49152, "hidden_size": 1536, "intermediate_size": 512, "num_hidden_layers": 32}
        | {"num_attention_heads": 24, "num_key_value_heads": 8, "num_local_experts": 40, "num_experts_per_tok": 8}
        | {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
        | {"logits_scaling": 6.0, "tie_word_embeddings": True, "rope_theta": 10000, "rope_scaling": None},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_sizes(name: str) -> None:
    size, values = PUBLISHED[name]
    model, positions = read(name, values)
    assert parameter_count(model) == pytest.approx(size, rel=2e-3)
    assert differences(FAMILIES[name], model, positions) == {}


def test_gemma_3_configs_of_both_transformers_versions() -> None:
    values = needed("gemma3_text") | {"head_dim": 2, "rope_theta": 50.0, "rope_local_base_freq": 20.0}
    old, _ = read("gemma3_text", values | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    kinds = ["sliding_attention" if (index + 1) % 6 else "full_attention" for index in range(30)]
    both = {"sliding_attention": {"rope_theta": 20.0, "rope_type": "default"}}
    both["full_attention"] = {"rope_theta": 50.0, "rope_type": "linear", "factor": 8.0}
    new, _ = read("gemma3_text", needed("gemma3_text") | {"head_dim": 2, "layer_types": kinds, "rope_parameters": both})
    assert old == new
    assert (old.window_attn_skip_freq, old.rotary_base, old.rotary_base_local) == ([6], 50.0, 20.0)


def test_olmo_3_configs_of_both_transformers_versions() -> None:
    """Before version 5 rope_scaling is only of layers with full attention, and rope_theta of all."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
    old, _ = read("olmo3", needed("olmo3") | {"head_dim": 2, "rope_theta": 50.0, "rope_scaling": yarn})
    both = {"sliding_attention": {"rope_theta": 50.0}, "full_attention": yarn | {"rope_theta": 50.0}}
    new, _ = read("olmo3", needed("olmo3") | {"head_dim": 2, "rope_parameters": both})
    assert old == new
    assert (old.window_attn_skip_freq, old.rotary_base, old.rotary_base_local) == ([4], 50.0, 50.0)
    assert old.rope_scaling == "yarn"


def test_minimax_m2_of_both_transformers_versions() -> None:
    old, _ = read("minimax_m2", needed("minimax_m2") | {"rotary_dim": 64})
    new, _ = read("minimax_m2", needed("minimax_m2") | {"rope_parameters": {"partial_rotary_factor": 0.5}})
    assert old == new and old.rotary_size == 64


def test_mlp_of_granite_4_is_its_shared_expert() -> None:
    model, _ = read("granitemoehybrid", needed("granitemoehybrid") | {"shared_intermediate_size": 24})
    assert (model.ffn_hidden_size, model.num_experts) == (24, None)


def test_layers_of_exaone_4_have_a_window_or_no_rope() -> None:
    hybrid, _ = read("exaone4", needed("exaone4"))
    assert [hybrid.has_rope(index) for index in range(30)] == [hybrid.has_window(index) for index in range(30)]
    full = ["full_attention"] * 30
    plain, _ = read("exaone4", needed("exaone4") | {"sliding_window": None, "layer_types": full})
    assert plain.sliding_window is None and plain.no_rope_freq is None
    without, _ = read("exaone4", needed("exaone4") | {"layer_types": full})
    assert not any(without.has_rope(index) for index in range(30))


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
