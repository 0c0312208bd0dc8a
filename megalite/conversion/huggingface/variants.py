"""Map GPT-2, and the differences of DeepSeek, Gemma, OLMo 3, SmolLM3, EXAONE 4, MiniMax-M2, gpt-oss and Qwen3-Next from
Llama."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalite.config.model import LINEAR_SIZES, ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, split_rope, written
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import Family, LlamaLike, layer_kinds, layers_without
from megalite.conversion.huggingface.quantized import PACKED, packed_shape
from megalite.conversion.weights import View, WeightPiece, first_rows, whole
from megalite.models.shapes import WORD

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
        file.require({"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False})
        file.require({"add_cross_attention": False})
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
        yield WeightPiece(f"{prefix}wte.weight", WORD, (v, h), first_rows(v))
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


_SIZES = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
"""Our setting -> their key."""


@dataclass(frozen=True, kw_only=True)
class DeepSeek(LlamaLike):
    """DeepSeek: multi-head latent attention."""

    scores: tuple[str, str]  # required values of scoring_func and topk_method, if the file has them
    q_rank: int = 1536  # default of q_lora_rank
    sizes: tuple[int, int, int, int] = (512, 128, 64, 128)  # defaults of the other sizes

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        file.require(dict(zip(("scoring_func", "topk_method"), self.scores, strict=True)))
        file.require({"attention_bias": False, "mlp_bias": False, "rope_interleave": True, "moe_layer_freq": 1})
        settings = super()._settings(file, positions)
        heads = settings["num_attention_heads"]
        if settings.pop("num_query_groups") != heads:
            raise file.fault(f"num_key_value_heads must equal num_attention_heads {heads}; every head has its own key")
        # head_dim, which some files have, is only the size of the part with RoPE.
        settings |= {"kv_channels": None, "multi_latent_attention": True, "qk_norm": True}
        settings["q_lora_rank"] = file.optional_integer("q_lora_rank", self.q_rank)
        for (ours, theirs), default in zip(_SIZES.items(), self.sizes, strict=True):
            settings[ours] = file.integer(theirs, default)
        if settings.get("rope_scaling") == "yarn" and "rope_mscale_all_dim" not in settings:
            scaling = file.values.get("rope_scaling") or file.values.get("rope_parameters") or {}
            if scaling.get("mscale_all_dim"):
                raise file.fault("mscale_all_dim is set without mscale; set both or neither")
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        del values["head_dim"]
        values |= {theirs: getattr(model, ours) for ours, theirs in _SIZES.items()}
        # transformers does not need scoring_func and topk_method, but other readers do.
        values |= dict(zip(("scoring_func", "topk_method"), self.scores, strict=True))
        return values | {"q_lora_rank": model.q_lora_rank, "attention_bias": False}

    def attention_pieces(self, model: ModelConfig, there: str, here: str) -> Iterator[WeightPiece]:
        """See `LlamaLike`. Both formats order rows by head, channels without RoPE before those with, keys before values."""
        h, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
        q, rows = model.q_lora_rank, heads * model.head_size
        if q is None:
            yield WeightPiece(f"{there}.q_proj.weight", f"{here}.q.weight", (rows, h))
        else:
            yield WeightPiece(f"{there}.q_a_proj.weight", f"{here}.q_down.weight", (q, h))
            yield WeightPiece(f"{there}.q_a_layernorm.weight", f"{here}.q_latent_norm.weight", (q,))
            yield WeightPiece(f"{there}.q_b_proj.weight", f"{here}.q_up.weight", (rows, q))
        shape = (latent + model.qk_pos_emb_head_dim, h)
        yield WeightPiece(f"{there}.kv_a_proj_with_mqa.weight", f"{here}.kv_down.weight", shape)
        yield WeightPiece(f"{there}.kv_a_layernorm.weight", f"{here}.kv_latent_norm.weight", (latent,))
        shape = (heads * (model.qk_head_dim + model.v_head_dim), latent)
        yield WeightPiece(f"{there}.kv_b_proj.weight", f"{here}.kv_up.weight", shape)
        yield WeightPiece(f"{there}.o_proj.weight", f"{here}.out.weight", (h, heads * model.v_head_dim))


_INDEXER = (
    ("dsa_indexer_n_heads", "index_n_heads", "integer"),
    ("dsa_indexer_head_dim", "index_head_dim", "integer", 128),
    ("dsa_indexer_topk", "index_topk", "integer", 2048),
)


@dataclass(frozen=True, kw_only=True)
class SparseDeepSeek(DeepSeek):
    """DeepSeek-V3.2 and GLM-5: an indexer in each layer, with a LayerNorm of fixed epsilon."""

    index_heads: int  # default of index_n_heads
    pairs: bool = False  # RoPE of the indexer rotates pairs of adjacent channels

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        values, layers = dict(file.values), file.layers("num_hidden_layers")
        file.require({"indexer_rope_interleave": self.pairs})
        if values.get("indexer_types") is None:
            file.require({"index_topk_freq": 1, "index_topk_pattern": None})
        for name, kind in (("layer_types", "indexed_attention"), ("indexer_types", "full")):
            found = values.pop(name, None)
            if found is not None and found != [kind] * layers:
                raise file.fault(f"{name} is {str(found)[:60]}; it must be {kind} for each of {layers} layers")
        file = ModelFile({"index_n_heads": self.index_heads, **values}, file.where)
        return super()._settings(file, positions) | {
            "experimental_attention_variant": "dsa",
            "dsa_indexer_rope_interleaved": self.pairs,
            "dsa_indexer_k_norm_epsilon": 1e-6,
            **file.settings(_INDEXER),
        }

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        return super().write(model, seq_length) | written(model, _INDEXER)

    def attention_pieces(self, model: ModelConfig, there: str, here: str) -> Iterator[WeightPiece]:
        yield from super().attention_pieces(model, there, here)
        h, heads, size = model.hidden_size, model.dsa_indexer_n_heads, model.dsa_indexer_head_dim
        there, here = f"{there}.indexer", f"{here}.indexer"
        yield WeightPiece(f"{there}.wq_b.weight", f"{here}.q_up.weight", (heads * size, model.q_lora_rank or h))
        yield WeightPiece(f"{there}.wk.weight", f"{here}.key.weight", (size, h))
        yield from _norm(f"{there}.k_norm", f"{here}.key_norm", size)
        yield WeightPiece(f"{there}.weights_proj.weight", f"{here}.head_weights.weight", (heads, h))


GEMMA: Mapping[str, Any] = MappingProxyType(
    {"norm_zero_centered": True, "scale_embeddings": True, "post_norms": True}
)  # settings of all Gemma models


@dataclass(frozen=True, kw_only=True)
class Gemma(LlamaLike):
    """Gemma: a window in most layers, optional soft-capping of scores and logits, and a configurable scale of scores."""

    caps: tuple[float | None, float | None]  # default soft caps of attention scores and of logits
    rotary_base_local: float | None = None  # RoPE base of layers with the window, if it differs

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        base = None
        if self.rotary_base_local is not None:
            file, base = split_rope(file)
            base = file.values.get("rope_local_base_freq", self.rotary_base_local) if base is None else base
        settings = super()._settings(file, positions)
        if base is not None and settings["sliding_window"] is not None:
            settings["rotary_base_local"] = file.finite("the RoPE base of layers with a window", base)
        scalar = file.integer("query_pre_attn_scalar", 256)
        settings["softmax_scale"] = None if scalar == settings["kv_channels"] else scalar**-0.5
        for name, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), self.caps, strict=True):
            cap = file.values.get(name, default)
            settings[name] = None if cap is None else file.finite(name, cap)
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        values |= {
            "query_pre_attn_scalar": model.head_size if model.softmax_scale is None else round(model.softmax_scale**-2),
            "attn_logit_softcapping": model.attn_logit_softcapping,
            "final_logit_softcapping": model.final_logit_softcapping,
        }
        if self.rotary_base_local is not None:
            values["rope_local_base_freq"] = model.rotary_base_local or model.rotary_base
        return values


@dataclass(frozen=True, kw_only=True)
class Olmo3(LlamaLike):
    """OLMo 3: RoPE is scaled only in layers with full attention."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        file, base = split_rope(file)
        settings = super()._settings(file, positions)
        if settings["sliding_window"] is not None:
            base = settings["rotary_base"] if base is None else base
            settings["rotary_base_local"] = file.finite("rope_theta of sliding_attention", base)
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        kinds = ("full_attention", model.rotary_base), ("sliding_attention", model.rotary_base_local)
        ropes = {kind: {"rope_type": "default", "rope_theta": base or model.rotary_base} for kind, base in kinds}
        ropes["full_attention"] |= values["rope_scaling"] or {}
        return values | {"rope_parameters": ropes}


@dataclass(frozen=True, kw_only=True)
class SmolLM3(LlamaLike):
    """SmolLM3: some layers have no RoPE."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        settings = super()._settings(file, positions)
        layers, every = settings["num_layers"], file.integer("no_rope_layer_interval", 4)
        ropes = file.values.get("no_rope_layers")  # 1: the layer has RoPE
        if ropes is None:
            ropes = [int((index + 1) % every != 0) for index in range(layers)]
        if not isinstance(ropes, list) or len(ropes) != layers or any(one not in (0, 1) for one in ropes):
            raise file.fault(f"no_rope_layers is {str(ropes)[:60]}; it must be a 0 or 1 for each of {layers} layers")
        return settings | {"no_rope_freq": layers_without([bool(one) for one in ropes], listed=1)}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        ropes = [int(model.has_rope(index)) for index in range(model.num_layers)]
        return super().write(model, seq_length) | {"no_rope_layers": ropes}


@dataclass(frozen=True, kw_only=True)
class Exaone4(LlamaLike):
    """EXAONE 4: layers with full attention have no RoPE if others have a window."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        settings = super()._settings(file, positions)
        if file.optional_integer("sliding_window", 4096) is not None:
            full = settings.get("window_attn_skip_freq", [1])
            settings["no_rope_freq"] = full if full is None or len(full) == 1 else [1 - one for one in full]
        return settings


@dataclass(frozen=True, kw_only=True)
class MiniMaxM2(LlamaLike):
    """MiniMax-M2: published files have the number of channels with RoPE, not their fraction."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        rotated = file.optional_integer("rotary_dim")
        if rotated is not None:
            share = rotated / file.integer("head_dim", self.head_size)
            file = ModelFile({"partial_rotary_factor": share, **file.values}, file.where)
        return super()._settings(file, positions)

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        return super().write(model, seq_length) | {"rotary_dim": model.rotary_size}


_ALPHA = 1.702


@dataclass(frozen=True, kw_only=True)
class GptOss(LlamaLike):
    """gpt-oss: all linear layers have biases."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        file.require({"swiglu_alpha": _ALPHA})
        settings = super()._settings(file, positions)
        return settings | {"activation_func_clamp_value": file.number("swiglu_limit", 7.0)}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        if values["rope_scaling"] is None:
            values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        return values | {
            "attention_bias": model.add_bias_linear,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": model.activation_func_clamp_value or 7.0,
        }

    def _read_biases(self, file: ModelFile) -> bool:
        return file.flag("attention_bias", True)


@dataclass(frozen=True, kw_only=True)
class GptOssExperts(ExpertKeys):
    """Experts of gpt-oss: transposed matrices, with the gate and up projections of a channel adjacent."""

    def pieces(
        self, model: ModelConfig, layer: str, here: str, present: Collection[str] | None
    ) -> Iterator[WeightPiece]:
        h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
        assert experts is not None
        yield WeightPiece(f"{layer}.mlp.router.weight", f"{here}.router.weight", (experts, h))
        yield WeightPiece(f"{layer}.mlp.router.bias", f"{here}.router.linear_bias", (experts,))
        there = f"{layer}.mlp.experts"
        # Packed matrices are not transposed: [2·f, h] with gates in even rows, and [h, f].
        ups: dict[bool, View] = {True: lambda up: up.transpose(1, 2), False: lambda up: up.permute(0, 3, 2, 1)}
        downs: dict[bool, View] = {True: lambda down: down, False: lambda down: down.transpose(1, 2)}
        sizes = (("gate_up_proj", "up", ups, h, 2 * f), ("down_proj", "down", downs, f, h))
        for theirs, ours, views, width, rows in sizes:
            packed = present is not None and f"{there}.{theirs}{PACKED}" in present
            name = f"{there}.{theirs}{PACKED if packed else ''}"
            shape = packed_shape(experts, rows, width) if packed else (experts, width, rows)
            yield WeightPiece(name, f"{here}.experts.{ours}.weight", shape, views[packed])
        yield WeightPiece(
            f"{there}.gate_up_proj_bias", f"{here}.experts.up.bias", (experts, 2 * f), lambda bias: bias.transpose(1, 2)
        )
        yield WeightPiece(f"{there}.down_proj_bias", f"{here}.experts.down.bias", (experts, h))


QWEN_NEXT: Mapping[str, Any] = MappingProxyType({"norm_zero_centered": True, "attention_output_gate": True})
"""Settings of Qwen3-Next and Qwen3.5."""
_KINDS = ("full_attention", "linear_attention")
_LINEAR_SIZES = dict(zip(LINEAR_SIZES, (4, 128, 128, 16, 32), strict=True))  # their defaults


@dataclass(frozen=True, kw_only=True)
class Qwen3Next(LlamaLike):
    """Qwen3-Next and Qwen3.5's text model: most layers have linear attention, the others an output gate."""

    fused_linear: bool = False  # linear attention's projections are two tensors, ordered by key head

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        layers, kinds = file.layers("num_hidden_layers"), file.values.get("layer_types")
        if kinds is None:
            every = file.integer("full_attention_interval", 4)
            kinds = [_KINDS[(index + 1) % every != 0] for index in range(layers)]
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
            raise file.fault(
                f"layer_types is {str(kinds)[:60]}; it must be {' or '.join(_KINDS)} for each of {layers} layers"
            )
        values = {name: value for name, value in file.values.items() if name != "layer_types"}
        if self.experts is not None:  # files without dense layers have no width for them
            values.setdefault("intermediate_size", values.get("moe_intermediate_size", self.experts.width))
        settings = super()._settings(ModelFile(values, file.where), positions)
        linear = [kind == _KINDS[True] for kind in kinds]
        if any(linear):
            settings |= {name: file.integer(name, default) for name, default in _LINEAR_SIZES.items()}
            settings["experimental_attention_variant"] = "gated_delta_net"
            settings["linear_attention_freq"] = layers_without(linear, listed=0) or [layers + 1]
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length) | {name: getattr(model, name) for name in _LINEAR_SIZES}
        return values | {"layer_types": layer_kinds(model)}

    def mixer_pieces(self, model: ModelConfig, index: int, layer: str, here: str) -> Iterator[WeightPiece]:
        if not model.is_linear_layer(index):
            yield from super().mixer_pieces(model, index, layer, here)
            return
        h, heads, values = model.hidden_size, model.linear_num_key_heads, model.linear_num_value_heads
        there, (convolved, _) = f"{layer}.linear_attn", model.linear_channels
        key, value = model.linear_key_head_dim, values // heads * model.linear_value_head_dim
        # Ends of a key head's channels: query, key, values, output gates, strengths and decays.
        ends = list(itertools.accumulate((key, key, value, value, values // heads, values // heads), initial=0))

        def rows(first: int, last: int) -> View:
            return lambda ours: ours.unflatten(0, (heads, -1))[:, ends[first] : ends[last]]

        shape = (convolved, 1, model.linear_conv_kernel_dim)
        # Theirs has the channels of all queries, all keys and all values.
        split = rows(0, 1), (rows(1, 2), rows(2, 3))
        yield WeightPiece(f"{there}.conv1d.weight", f"{here}.conv.weight", shape, *split)
        yield WeightPiece(f"{there}.A_log", f"{here}.a_log", (values,))
        yield WeightPiece(f"{there}.dt_bias", f"{here}.dt_bias", (values,))
        if self.fused_linear:
            parts: dict[str, tuple[int, Any]] = {
                "qkvz": (convolved + heads * value, (rows(0, 4),)),
                "ba": (2 * values, (rows(4, 6),)),
            }
        else:
            parts = {"qkv": (convolved, split), "z": (heads * value, (rows(3, 4),))}
            parts |= {"b": (values, (rows(4, 5),)), "a": (values, (rows(5, 6),))}
        for name, (size, views) in parts.items():
            yield WeightPiece(f"{there}.in_proj_{name}.weight", f"{here}.in_proj.weight", (size, h), *views)
        yield WeightPiece(f"{there}.norm.weight", f"{here}.norm.weight", (model.linear_value_head_dim,))
        yield WeightPiece(f"{there}.out_proj.weight", f"{here}.out.weight", (h, heads * value))
