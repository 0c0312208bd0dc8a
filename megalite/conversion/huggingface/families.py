"""List the families that can be read and written, and choose the family that expresses a model."""

import re
from collections.abc import Collection, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.errors import ConfigError
from megalite.config.model import TRAINING_FIELDS, ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, read_json, refuse_code, resolved, written
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import Family, LlamaLike
from megalite.conversion.huggingface.quantized import quantized_kinds
from megalite.conversion.huggingface.variants import GEMMA, DeepSeek, Gemma, GptOss, GptOssExperts
from megalite.conversion.weights import ConversionError, View, WeightPiece, first_rows, whole

_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_WRITTEN = {"gelu_tanh": "gelu_new", "gelu": "gelu"}
_PREFIX = "transformer."
_GPT2 = (
    ("num_layers", "n_layer", "layers"),
    ("hidden_size", "n_embd", "integer"),
    ("num_attention_heads", "n_head", "integer"),
    ("vocab_size", "vocab_size", "integer"),
    ("norm_epsilon", "layer_norm_epsilon", "epsilon", 1e-5),
    ("tie_embeddings", "tie_word_embeddings", "flag", True),
    ("attention_dropout", "attn_pdrop", "number", 0.1),
    ("init_method_std", "initializer_range", "number", 0.02),
)


class GPT2(Family):
    """GPT-2: LayerNorm, learned positions, and linear weights stored transposed."""

    buffers = re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)")

    def read(self, file: ModelFile) -> tuple[ModelConfig, int]:
        for name, needed in (
            ("scale_attn_weights", True),
            ("scale_attn_by_inverse_layer_idx", False),
            ("add_cross_attention", False),
        ):
            if file.flag(name, needed) != needed:
                raise file.fault(f"{name} is {str(not needed).lower()}; only {str(needed).lower()} is supported")
        positions = file.integer("n_positions", 1024)
        dropouts = [file.number(name, 0.1) for name in ("embd_pdrop", "resid_pdrop")]
        if dropouts[0] != dropouts[1]:
            raise file.fault(f"embd_pdrop is {dropouts[0]:g} and resid_pdrop {dropouts[1]:g}; set both to one value")
        settings = file.settings(_GPT2)
        model = file.model(
            **settings,
            seq_length=positions,
            ffn_hidden_size=file.optional_integer("n_inner") or 4 * settings["hidden_size"],
            max_position_embeddings=positions,
            activation=file.activation("activation_function", "gelu_new", _ACTIVATIONS),
            hidden_dropout=dropouts[0],
        )
        return model, positions

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        return {
            **written(model, _GPT2),
            "n_inner": model.ffn_size,
            "n_positions": model.max_position_embeddings or seq_length,
            "activation_function": _WRITTEN.get(model.activation, "gelu_new"),
            "embd_pdrop": model.hidden_dropout,
            "resid_pdrop": model.hidden_dropout,
        }

    def pieces(self, model: ModelConfig, present: Collection[str] | None) -> Iterator[WeightPiece]:
        # Names have no prefix if the inner model was saved.
        prefix = _PREFIX if present is None or f"{_PREFIX}wte.weight" in present else ""
        assert model.vocab_size is not None and model.max_position_embeddings is not None
        h, f, v, positions = model.hidden_size, model.ffn_size, model.vocab_size, model.max_position_embeddings
        yield WeightPiece(f"{prefix}wte.weight", "embedding.word.weight", (v, h), first_rows(v))
        yield WeightPiece(f"{prefix}wpe.weight", "embedding.position.weight", (positions, h))
        for i in range(model.num_layers):
            there, here = f"{prefix}h.{i}", f"layers.{i}"
            yield from _norm(f"{there}.ln_1", f"{here}.attention_norm", h)
            yield from _linear(f"{there}.attn.c_attn", f"{here}.attention.qkv", 3 * h, h, _query_key_value(model))
            yield from _linear(f"{there}.attn.c_proj", f"{here}.attention.out", h, h)
            yield from _norm(f"{there}.ln_2", f"{here}.mlp_norm", h)
            yield from _linear(f"{there}.mlp.c_fc", f"{here}.mlp.up", f, h)
            yield from _linear(f"{there}.mlp.c_proj", f"{here}.mlp.down", h, f)
        yield from _norm(f"{prefix}ln_f", "final_norm", h)
        if not model.tie_embeddings:
            yield WeightPiece("lm_head.weight", "head.weight", (v, h), first_rows(v))


def _norm(theirs: str, ours: str, size: int) -> Iterator[WeightPiece]:
    for kind in ("weight", "bias"):
        yield WeightPiece(f"{theirs}.{kind}", f"{ours}.{kind}", (size,))


def _linear(theirs: str, ours: str, rows: int, columns: int, order: View = whole) -> Iterator[WeightPiece]:
    """Yield a matrix, ours [rows, columns], theirs [columns, rows], and its bias. `order` permutes our rows to theirs."""
    yield WeightPiece(
        f"{theirs}.weight", f"{ours}.weight", (columns, rows), lambda tensor: order(tensor).movedim(-1, 0)
    )
    yield WeightPiece(f"{theirs}.bias", f"{ours}.bias", (rows,), order)


def _query_key_value(model: ModelConfig) -> View:
    """Our rows are ordered by head, each with query, key and value; theirs are all queries, all keys, all values."""
    return lambda tensor: tensor.unflatten(0, (model.num_attention_heads, 3, model.head_size)).movedim(1, 0)


_KINDS = {"", "num_experts", "position_embedding_type", "normalization"}

_GEMMA: dict[str, Any] = {
    "key_value_heads": 4,
    "head_size": 256,
    "attention_bias": True,
    "window": 4096,
    "mixed": True,
    "tied": True,
    "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "fixed": GEMMA,
    "whole_heads": True,
}
_GLM: dict[str, Any] = {
    "max_positions": 131072,
    "norm_epsilon": 1.5625e-7,
    "key_value_heads": 2,
    "head_size": 128,
    "interleaved": True,
    "qkv_bias": ("attention_bias", True),
    "partial_rotary": 0.5,
    "fused_mlp": True,
}
_ALL = (
    GPT2("gpt2", "GPT2LMHeadModel"),
    LlamaLike("llama", "LlamaForCausalLM", max_positions=2048, linear_biases=True, whole_heads=True),
    LlamaLike("mistral", "MistralForCausalLM", max_positions=131072, key_value_heads=8, window=4096),
    LlamaLike(
        *("qwen2", "Qwen2ForCausalLM"),
        max_positions=32768,
        key_value_heads=32,
        qkv_bias=True,
        window="switched",
        mixed=True,
    ),
    LlamaLike(
        *("qwen3", "Qwen3ForCausalLM"),
        max_positions=32768,
        key_value_heads=32,
        head_size=128,
        attention_bias=True,
        qk_norm=True,
        window="switched",
        mixed=True,
    ),
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
        window="refused",
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
        window="refused",
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
        fused_mlp=True,
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
        experts=ExpertKeys(
            count=("n_routed_experts", 128),
            topk=8,
            width=1408,
            normalises=True,
            shared=("n_shared_experts", 1),
            scaling=1.0,
            sigmoid=True,
            dense="first_k_dense_replace",
        ),
        mtp=True,
    ),
    DeepSeek(
        *("deepseek_v2", "DeepseekV2ForCausalLM"),
        max_positions=2048,
        scores=("softmax", "greedy"),
        experts=ExpertKeys(
            count=("n_routed_experts", 64),
            topk=None,
            width=1407,
            normalises=False,
            shared=("n_shared_experts", 2),
            scaling=1.0,
            first_dense=0,
            dense="first_k_dense_replace",
        ),
        whole_heads=True,
    ),
    DeepSeek(
        *("deepseek_v3", "DeepseekV3ForCausalLM"),
        max_positions=4096,
        scores=("sigmoid", "noaux_tc"),
        experts=ExpertKeys(
            count=("n_routed_experts", 256),
            topk=8,
            width=2048,
            normalises=True,
            shared=("n_shared_experts", 1),
            scaling=2.5,
            sigmoid=True,
            groups=(8, 4),
            first_dense=3,
            dense="first_k_dense_replace",
        ),
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
        **_GEMMA,
    ),
    GptOss(
        *("gpt_oss", "GptOssForCausalLM"),
        max_positions=131072,
        norm_epsilon=1e-5,
        rotary_base=150000.0,
        key_value_heads=8,
        head_size=64,
        window=128,
        mixed=True,
        fixed={
            "activation": "quick_geglu",
            "glu_linear_offset": 1.0,
            "softmax_type": "learnable",
            "moe_add_bias_linear": True,
        },
        experts=GptOssExperts(count=("num_local_experts", 128), topk=4),
    ),
    LlamaLike(
        *("olmo2", "Olmo2ForCausalLM"),
        max_positions=2048,
        norm_epsilon=1e-5,
        attention_bias=True,
        qk_norm=True,
        fixed={"qk_norm_all_heads": True, "pre_norms": False, "post_norms": True},
    ),
)
SAME = {"kimi_k2": "deepseek_v3"}
"""model_type of published folders -> the family that has this architecture."""
FAMILIES = {family.name: family for family in _ALL}  # by model_type; the first that expresses a model is chosen


class FolderConfig(NamedTuple):
    """The content of a folder's config.json."""

    family: Family
    model: ModelConfig
    seq_length: int  # maximum sequence length
    values: dict[str, Any]


def read_config(folder: Path) -> FolderConfig:
    if not folder.is_dir():
        raise ConversionError(f"{folder} is not a folder; give the folder with config.json")
    values, where = read_json(folder, "config.json"), folder / "config.json"
    if values is None:
        raise ConversionError(f"{folder} has no config.json; give the folder that transformers saved")
    name = values.get("model_type")
    name = SAME.get(name, name) if isinstance(name, str) else name
    # Published folders of these families name code from before transformers supported them; it is not needed.
    outdated = ("auto_map",) if name in ("deepseek_v2", "deepseek_v3") else ()
    refuse_code({key: value for key, value in values.items() if key not in outdated}, where)
    quantized_kinds(ModelFile(values, where))  # raises for unsupported quantization
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConversionError(f"{where}: model_type is {str(name)[:60]!r}; supported: {', '.join(FAMILIES)}")
    return FolderConfig(FAMILIES[name], *FAMILIES[name].read(ModelFile(values, where)), values)


def family_named(name: str) -> Family:
    if name not in FAMILIES:
        raise ConversionError(f"{name[:60] or repr(name)} is not a supported family; use {', '.join(FAMILIES)}")
    return FAMILIES[name]


def choose_family(model: ModelConfig, seq_length: int, name: str | None) -> Family:
    """Return the family `name` or, without a name, the first that expresses the model."""
    candidates = list(FAMILIES.values()) if name is None else [family_named(name)]
    found = [(differences(family, model, seq_length), family) for family in candidates]
    # A different kind of network is a larger difference than any number of settings.
    differing, family = min(found, key=lambda item: (len(_KINDS & item[0].keys()), len(item[0])))
    if not differing:
        return family
    others = FAMILIES.values() if name is not None else ()
    fitting = [other.name for other in others if not differences(other, model, seq_length)]
    who = f"no Hugging Face family is this model; the nearest, {family.name}," if name is None else family.name
    remedy = f"--family {fitting[0]} is the same model" if fitting else "megalite's own format keeps it"
    raise ConversionError(f"{who} differs: {'; '.join(differing.values())}; {remedy}")


def _normal_form(values: dict[str, Any]) -> dict[str, Any]:
    """Return settings with several equivalent forms in a normal form."""
    model = ModelConfig(**values)
    windows, ropes = ([int(has(i)) for i in range(model.num_layers)] for has in (model.has_window, model.has_rope))
    found: dict[str, Any] = {"softmax_scale": model.softmax_scale or model.head_size**-0.5}
    found["window_attn_skip_freq"] = windows if len(set(windows)) > 1 else None
    found["no_rope_freq"] = None if all(ropes) else [1 - one for one in ropes]
    if not any(windows):
        found |= {"sliding_window": None, "rotary_base_local": None}
    if model.rope_scaling == "none" and model.rotary_base_local == model.rotary_base:
        found["rotary_base_local"] = None
    return found


def differences(family: Family, model: ModelConfig, seq_length: int) -> dict[str, str]:
    """Return the settings that would change if the model were written as this family and read again. Maps each field to
    a text with both values; empty if the family expresses the model."""
    written = family.write(model, seq_length)
    try:
        theirs = asdict(family.read(ModelFile(written, f"a {family.name} config.json"))[0])
        ours = asdict(resolved(model, seq_length))
        for values in (theirs, ours):
            values |= _normal_form(values)
    except ConfigError as error:
        return {"": str(error)}
    # The padding of the vocabulary does not change the tokens' logits.
    ignored = {*TRAINING_FIELDS, "make_vocab_size_divisible_by"}
    # If one side lacks a component, its settings need not be compared.
    if theirs["num_experts"] is None or ours["num_experts"] is None:
        ignored |= {field for field in ours if field.startswith("moe_")}
    if theirs["position_embedding_type"] != ours["position_embedding_type"]:
        ignored |= {"max_position_embeddings"} | {name for name in ours if name.startswith(("rope_", "rotary_"))}
    if ours["rope_scaling"] == "dynamic":
        ignored.add("max_position_embeddings")
    if theirs["num_experts"] is not None and ours["num_experts"] is not None:
        # An unset expert width means the dense MLP's width, which has no other effect if no layer is dense.
        theirs["moe_ffn_hidden_size"] = theirs["moe_ffn_hidden_size"] or theirs["ffn_hidden_size"]
        ours["moe_ffn_hidden_size"] = model.expert_ffn_size
        if all(model.is_moe_layer(index) for index in range(model.num_layers)):
            ignored.add("ffn_hidden_size")
    found = {
        field: f"{field} is {ours[field]}, {family.name} has {theirs[field]}"
        for field in ours
        if field not in ignored and ours[field] != theirs[field]
    }
    if family.whole_heads and model.hidden_size % model.num_attention_heads:
        found["hidden_size"] = (
            f"hidden_size is {model.hidden_size}, {family.name} needs a multiple of num_attention_heads "
            f"{model.num_attention_heads}"
        )
    return found
