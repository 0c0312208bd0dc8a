"""List the families that can be read and written, and read the config.json of a folder."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, read_json, refuse_code
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.granite import GRANITE
from megalite.conversion.huggingface.hybrid import HYBRID
from megalite.conversion.huggingface.llama import FUSED_MLP, Family, LlamaLike
from megalite.conversion.huggingface.mistral import MISTRAL
from megalite.conversion.huggingface.quantized import quantized_kinds
from megalite.conversion.huggingface.variants import (
    GEMMA,
    GPT2,
    QWEN_NEXT,
    DeepSeek,
    Exaone4,
    Gemma,
    GptOss,
    GptOssExperts,
    MiniMaxM2,
    Olmo3,
    Qwen3Next,
    SmolLM3,
    SparseDeepSeek,
)
from megalite.conversion.weights import ConversionError

_GEMMA: dict[str, Any] = {
    "key_value_heads": 4,
    "head_size": 256,
    "attention_bias": True,
    "window": 4096,
    "mixed": True,
    "tied": True,
    "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "fixed": GEMMA,
    "only": {"use_bidirectional_attention": False},
    "whole_heads": True,
}
_OLMO: dict[str, Any] = {
    "max_positions": 2048,
    "norm_epsilon": 1e-5,
    "attention_bias": True,
    "qk_norm": True,
    "fixed": {"qk_norm_all_heads": True, "pre_norms": False, "post_norms": True},
}
_EXAONE: dict[str, Any] = {
    "max_positions": 2048,
    "norm_epsilon": 1e-5,
    "key_value_heads": 32,
    "qk_norm": True,
    "window": 4096,
    "mixed": True,
    "full_every": 4,
    "pattern_key": "sliding_window_pattern",
}
_QWEN: dict[str, Any] = {
    "max_positions": 32768,
    "key_value_heads": 32,
    "window": "switched",
    "window_from": 28,
    "mixed": True,
}
_QWEN_NEXT: dict[str, Any] = {
    "max_positions": 32768,
    "key_value_heads": 2,
    "head_size": 256,
    "attention_bias": True,
    "qk_norm": True,
    "partial_rotary": 0.25,
    "fixed": QWEN_NEXT,
    "activations": {"silu": "swiglu"},  # of linear attention too, where megalite has no other
}
_GLM: dict[str, Any] = {
    "max_positions": 131072,
    "norm_epsilon": 1.5625e-7,
    "key_value_heads": 2,
    "head_size": 128,
    "interleaved": True,
    "qkv_bias": ("attention_bias", True),
    "partial_rotary": 0.5,
    "fused_mlp": FUSED_MLP,
}


_QWEN_EXPERTS: dict[str, Any] = {"width": 512, "shared": ("shared_expert_intermediate_size", 512), "shared_gate": True}


def _routed(*, count: int | None, shared: int | None, **more: Any) -> ExpertKeys:
    """Return the keys of DeepSeek's experts, with the defaults of a family."""
    keys: dict[str, Any] = {"normalises": True, "sigmoid": True, "dense": "first_k_dense_replace", **more}
    return ExpertKeys(count=("n_routed_experts", count), shared=("n_shared_experts", shared), **keys)


_V3_EXPERTS = _routed(count=256, topk=8, width=2048, shared=1, scaling=2.5, groups=(8, 4), first_dense=3)
_QWEN3 = LlamaLike("qwen3", "Qwen3ForCausalLM", head_size=128, attention_bias=True, qk_norm=True, **_QWEN)
_ALL = (
    GPT2("gpt2", "GPT2LMHeadModel"),
    LlamaLike("llama", "LlamaForCausalLM", max_positions=2048, linear_biases=True, whole_heads=True),
    LlamaLike("mistral", "MistralForCausalLM", max_positions=131072, key_value_heads=8, window=4096),
    LlamaLike("qwen2", "Qwen2ForCausalLM", qkv_bias=True, **_QWEN),
    _QWEN3,
    LlamaLike(
        *("mixtral", "MixtralForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        rotary_base=1e6,
        key_value_heads=8,
        window=None,
        experts=ExpertKeys(layer="block_sparse_moe", matrices=("w1", "w3", "w2")),
    ),
    LlamaLike(
        *("qwen2_moe", "Qwen2MoeForCausalLM"),
        max_positions=32768,
        key_value_heads=16,
        qkv_bias=True,
        only={"use_sliding_window": False},
        experts=ExpertKeys(
            count=("num_experts", 60),
            topk=4,
            width=1408,
            normalises=False,
            shared=("shared_expert_intermediate_size", 5632),
            shared_gate=True,
            dense="decoder_sparse_step",
        ),
    ),
    LlamaLike(
        *("qwen3_moe", "Qwen3MoeForCausalLM"),
        max_positions=32768,
        key_value_heads=4,
        attention_bias=True,
        qk_norm=True,
        only={"use_sliding_window": False},
        experts=ExpertKeys(
            count=("num_experts", 128), topk=8, width=768, normalises=False, dense="decoder_sparse_step"
        ),
    ),
    LlamaLike(
        *("phi3", "Phi3ForCausalLM"),
        max_positions=4096,
        norm_epsilon=1e-5,
        partial_rotary=1.0,
        scalings=("default",),  # transformers treats every other rope_type of a Phi-3 as longrope
        window=None,
        whole_heads=True,
        fused_qkv=True,
        fused_mlp=FUSED_MLP,
    ),
    LlamaLike("glm", "GlmForCausalLM", **_GLM),
    LlamaLike(
        *("glm4", "Glm4ForCausalLM"),
        **_GLM,
        fixed={"post_norms": True},
        sandwich=("post_self_attn", "post_attention", "post_mlp"),
    ),
    LlamaLike(
        *("glm4_moe", "Glm4MoeForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        key_value_heads=8,
        qkv_bias=("attention_bias", False),
        qk_norm="use_qk_norm",
        partial_rotary=0.5,
        experts=_routed(count=128, topk=8, width=1408, shared=1, scaling=1.0),
        mtp=True,
    ),
    LlamaLike(
        *("solar_open", "SolarOpenForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        rotary_base=1e6,
        key_value_heads=8,
        head_size=128,
        qkv_bias=("attention_bias", False),
        experts=_routed(count=128, topk=8, width=1280, shared=1, scaling=1.0, dense=None),
    ),
    DeepSeek(
        *("deepseek_v2", "DeepseekV2ForCausalLM"),
        max_positions=2048,
        scores=("softmax", "greedy"),
        experts=_routed(
            count=64, topk=None, width=1407, shared=2, scaling=1.0, normalises=False, sigmoid=False, first_dense=0
        ),
        whole_heads=True,
    ),
    DeepSeek(
        *("deepseek_v3", "DeepseekV3ForCausalLM"),
        max_positions=4096,
        scores=("sigmoid", "noaux_tc"),
        experts=_V3_EXPERTS,
        mtp=True,
    ),
    SparseDeepSeek(
        *("deepseek_v32", "DeepseekV32ForCausalLM"),
        max_positions=163840,
        scores=("sigmoid", "noaux_tc"),
        index_heads=64,
        experts=replace(_V3_EXPERTS, dense="mlp_layer_types"),
        mtp=True,
    ),
    SparseDeepSeek(
        *("glm_moe_dsa", "GlmMoeDsaForCausalLM"),
        max_positions=202752,
        norm_epsilon=1e-5,
        scores=("sigmoid", "noaux_tc"),
        q_rank=2048,
        sizes=(512, 192, 64, 256),
        index_heads=32,
        pairs=True,
        experts=replace(_V3_EXPERTS, groups=(1, 1), dense="mlp_layer_types"),
        mtp=True,
    ),
    Gemma("gemma2", "Gemma2ForCausalLM", max_positions=8192, caps=(50.0, 30.0), full_every=2, **_GEMMA),
    Gemma(
        *("gemma3_text", "Gemma3ForCausalLM"),
        max_positions=131072,
        rotary_base=1e6,
        rotary_base_local=1e4,
        qk_norm=True,
        caps=(None, None),
        full_every=6,
        pattern_key="sliding_window_pattern",
        **_GEMMA,
    ),
    GptOss(
        *("gpt_oss", "GptOssForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        rotary_base=150000.0,
        rope={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        key_value_heads=8,
        head_size=64,
        window=128,
        mixed=True,
        full_every=2,
        fixed={
            "activation": "quick_geglu",
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "moe_add_bias_linear": True,
        },
        experts=GptOssExperts(count=("num_local_experts", 128), topk=4),
    ),
    LlamaLike("olmo2", "Olmo2ForCausalLM", **_OLMO),
    LlamaLike(
        *("olmoe", "OlmoeForCausalLM"),
        **_OLMO | {"max_positions": 4096, "fixed": {"qk_norm_all_heads": True}},
        only={"clip_qkv": None},
        whole_heads=True,
        experts=ExpertKeys(count=("num_experts", 64), topk=8, normalises=False),
    ),
    Olmo3("olmo3", "Olmo3ForCausalLM", rotary_base=5e5, window=4096, mixed=True, full_every=4, **_OLMO),
    SmolLM3(
        *("smollm3", "SmolLM3ForCausalLM"),
        max_positions=32768,
        rotary_base=2e6,
        key_value_heads=4,
        linear_biases=True,
        tied=True,
        only={"use_sliding_window": False},
    ),
    LlamaLike(
        *("seed_oss", "SeedOssForCausalLM"),
        max_positions=524288,
        key_value_heads=8,
        head_size=128,
        qkv_bias=("attention_bias", True),
        attention_dropout=0.1,
        only={"attention_out_bias": False, "mlp_bias": False},
    ),
    LlamaLike(
        *("ernie4_5", "Ernie4_5ForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        rotary_base=5e5,
        key_value_heads=2,
        head_size=128,
        interleaved=True,
        tied=True,
        only={"use_bias": False},
    ),
    LlamaLike(
        *("ernie4_5_moe", "Ernie4_5_MoeForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        rotary_base=5e5,
        key_value_heads=4,
        interleaved=True,
        tied=True,
        only={"use_bias": False, "moe_layer_interval": 1},
        experts=ExpertKeys(
            count=("moe_num_experts", 64),
            topk=6,
            topk_key="moe_k",
            width=1536,
            shared=("moe_num_shared_experts", 2),
            biased=True,
            bias="moe_statics.e_score_correction_bias",
            dense="moe_layer_start_index",
        ),
    ),
    LlamaLike(
        *("arcee", "ArceeForCausalLM"),
        max_positions=4096,
        norm_epsilon=1e-5,
        linear_biases=True,
        activation=("hidden_act", "relu2"),
        activations={"relu2": "squared_relu"},
        whole_heads=True,
    ),
    LlamaLike(*("ministral", "MinistralForCausalLM"), max_positions=131072, key_value_heads=8, window=4096, mixed=True),
    Exaone4("exaone4", "Exaone4ForCausalLM", fixed={"pre_norms": False, "post_norms": True}, **_EXAONE),
    Exaone4(
        *("exaone_moe", "ExaoneMoeForCausalLM"),
        **_EXAONE,
        experts=ExpertKeys(
            count=("num_experts", 64),
            topk=8,
            width=1024,
            normalises=True,
            sigmoid=True,
            shared=("num_shared_experts", 1),
            scaling=2.5,
            dense="mlp_layer_types",
            bias="e_score_correction_bias",
        ),
    ),
    MiniMaxM2(
        *("minimax_m2", "MiniMaxM2ForCausalLM"),
        max_positions=196608,
        rotary_base=5e6,
        key_value_heads=8,
        head_size=128,
        qk_norm=True,
        partial_rotary=1.0,
        fixed={"qk_norm_all_heads": True},
        only={"scoring_func": "sigmoid", "use_routing_bias": True, "use_qk_norm": True, "qk_norm_type": "per_layer"},
        experts=ExpertKeys(
            count=("num_local_experts", 256),
            topk=8,
            sigmoid=True,
            groups=None,
            layer="block_sparse_moe",
            bias="e_score_correction_bias",
            matrices=("w1", "w3", "w2"),
        ),
    ),
    LlamaLike(
        *("dots1", "Dots1ForCausalLM"),
        max_positions=2048,
        key_value_heads=32,
        attention_bias=True,
        qk_norm=True,
        window=4096,
        mixed=True,
        window_from=62,
        experts=_routed(count=None, topk=None, width=1408, shared=None, scaling=1.0, normalises=False, first_dense=0),
    ),
    DeepSeek(
        *("glm4_moe_lite", "Glm4MoeLiteForCausalLM"),
        max_positions=202752,
        norm_epsilon=1e-5,
        scores=("sigmoid", "noaux_tc"),
        q_rank=768,
        sizes=(512, 192, 64, 256),
        experts=_routed(count=64, topk=4, width=1536, shared=1, scaling=1.8, dense="mlp_layer_types"),
        mtp=True,
    ),
    Qwen3Next(
        *("qwen3_next", "Qwen3NextForCausalLM"),
        **_QWEN_NEXT,
        fused_linear=True,
        experts=ExpertKeys(
            count=("num_experts", 512), topk=10, normalises=True, dense="decoder_sparse_step", **_QWEN_EXPERTS
        ),
    ),
    Qwen3Next("qwen3_5_text", "Qwen3_5ForCausalLM", **_QWEN_NEXT | {"key_value_heads": 4}),
    Qwen3Next(
        *("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
        **_QWEN_NEXT,
        experts=ExpertKeys(count=("num_experts", 256), topk=8, **_QWEN_EXPERTS),
    ),
    *HYBRID,
    *GRANITE,
    *MISTRAL,
)
FAMILIES = {family.name: family for family in _ALL}  # by model_type; the first that expresses a model is chosen
SAME = {
    "kimi_k2": FAMILIES["deepseek_v3"],
    "exaone4_5_text": FAMILIES["exaone4"],
    # Text positions are those of plain RoPE.
    "qwen3_vl_text": replace(_QWEN3, max_positions=128000, rotary_base=5e5, window="none"),
}
"""model_type of published folders -> the family that has this architecture, with the defaults of that model_type."""
MULTIMODAL: dict[str, dict[str, Any]] = {
    "exaone4_5": {"model_type": "exaone4"},
    "gemma3": {"model_type": "gemma3_text", "num_attention_heads": 8, "vocab_size": 262208},
    "internvl": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
    "qwen3_vl": {"model_type": "qwen3_vl_text"},
}
"""model_type of folders with more than text -> values that their text_config may lack."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class FolderConfig(NamedTuple):
    """The content of a folder's config.json."""

    family: Family
    model: ModelConfig
    seq_length: int  # maximum sequence length
    values: dict[str, Any]


def read_config(folder: Path) -> FolderConfig:
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder; give the folder with config.json")
    values, where = read_json(folder, "config.json"), str(folder / "config.json")
    if values is None:
        raise ConversionError(f"{folder} has no config.json; give the folder that transformers saved")
    name = values.get("model_type")
    if isinstance(name, str) and name in MULTIMODAL:
        refuse_code(values, where)
        values, where = _text_config(values, MULTIMODAL[name], where), f"{where}: text_config"
        name = values["model_type"]
    # Published folders of these families name code from before transformers supported them; it is not needed.
    with_code = ("deepseek_v2", "deepseek_v3", "ernie4_5_moe", "kimi_k2", "minimax_m2", "nemotron_h")
    outdated = ("auto_map",) if name in with_code else ()
    refuse_code({key: value for key, value in values.items() if key not in outdated}, where)
    quantized_kinds(ModelFile(values, where))  # raises for unsupported quantization
    family = (FAMILIES | SAME).get(name) if isinstance(name, str) else None
    if family is None:
        known = f"{', '.join(FAMILIES)}, and the text of {', '.join(MULTIMODAL)}"
        raise ConversionError(f"{where}: model_type is {str(name)[:60]!r}; supported: {known}")
    return FolderConfig(family, *family.read(ModelFile(values, where)), values)


def _text_config(values: dict[str, Any], defaults: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the settings of the text model in the config.json of a multimodal folder, as if it were alone."""
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise ConversionError(f"{where}: text_config is {str(text)[:60]!r}; it must be an object")
    shared = ("tie_word_embeddings", "quantization_config", *TOKEN_IDS)  # of the whole, which take precedence
    return {**defaults, **text, **{name: values[name] for name in shared if values.get(name) is not None}}
