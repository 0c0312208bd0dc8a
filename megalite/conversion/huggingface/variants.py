"""Map DeepSeek-V2 and V3 (Moonlight, Kimi-K2), Gemma 2 and 3, and gpt-oss: their differences from Llama."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import LlamaLike, layer_kinds
from megalite.conversion.huggingface.quantized import PACKED, packed_shape
from megalite.conversion.weights import View, WeightPiece

_SIZES = (
    ("kv_lora_rank", "kv_lora_rank", 512),
    ("qk_head_dim", "qk_nope_head_dim", 128),
    ("qk_pos_emb_head_dim", "qk_rope_head_dim", 64),
    ("v_head_dim", "v_head_dim", 128),
)
"""Our setting, their key, their default."""


@dataclass(frozen=True, kw_only=True)
class DeepSeek(LlamaLike):
    """DeepSeek: multi-head latent attention."""

    scores: tuple[str, str]  # required values of scoring_func and topk_method, if the file has them

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        fixed: dict[str, Any] = dict(zip(("scoring_func", "topk_method"), self.scores, strict=True))
        fixed |= {"attention_bias": False, "mlp_bias": False, "rope_interleave": True, "moe_layer_freq": 1}
        for key, only in fixed.items():
            if file.values.get(key, only) != only:
                raise file.fault(f"{key} is {str(file.values[key])[:60]!r}; only {only!r} is supported")
        settings = super()._settings(file, positions)
        heads = settings["num_attention_heads"]
        if settings.pop("num_query_groups") != heads:
            raise file.fault(f"num_key_value_heads must equal num_attention_heads {heads}; every head has its own key")
        # head_dim, which some files have, is only the size of the part with RoPE.
        settings |= {"kv_channels": None, "multi_latent_attention": True, "qk_norm": True}
        settings["q_lora_rank"] = file.optional_integer("q_lora_rank", 1536)
        settings |= {ours: file.integer(theirs, default) for ours, theirs, default in _SIZES}
        if settings.get("rope_scaling") == "yarn" and "rope_mscale_all_dim" not in settings:
            scaling = file.values.get("rope_scaling") or file.values.get("rope_parameters") or {}
            if scaling.get("mscale_all_dim"):
                raise file.fault("mscale_all_dim is set without mscale; set both or neither")
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        del values["head_dim"]
        values |= {theirs: getattr(model, ours) for ours, theirs, _ in _SIZES}
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


GEMMA: Mapping[str, Any] = MappingProxyType(
    {"norm_zero_centered": True, "scale_embeddings": True, "post_norms": True}
)  # settings of all Gemma models


@dataclass(frozen=True, kw_only=True)
class Gemma(LlamaLike):
    """Gemma: a window in most layers, optional soft-capping of scores and logits, and a configurable scale of scores."""

    caps: tuple[float | None, float | None]  # default soft caps of attention scores and of logits
    full_every: int  # every n-th layer has full attention, the others have the window
    rotary_base_local: float | None = None  # RoPE base of layers with the window, if it differs

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        if file.values.get("use_bidirectional_attention"):
            raise file.fault("use_bidirectional_attention is true; only causal attention is supported")
        if self.rotary_base_local is None:
            settings, base = super()._settings(file, positions), None
        else:
            file, base = self._split_rope(file)
            settings = super()._settings(file, positions)
        if settings["sliding_window"] is not None:
            settings["rotary_base_local"] = base
        scalar = file.integer("query_pre_attn_scalar", 256)
        settings["softmax_scale"] = None if scalar == settings["kv_channels"] else scalar**-0.5
        for name, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), self.caps, strict=True):
            cap = file.values.get(name, default)
            settings[name] = None if cap is None else file.finite(name, cap)
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        values |= {
            "layer_types": layer_kinds(model),
            "query_pre_attn_scalar": model.head_size if model.softmax_scale is None else round(model.softmax_scale**-2),
            "attn_logit_softcapping": model.attn_logit_softcapping,
            "final_logit_softcapping": model.final_logit_softcapping,
        }
        if self.rotary_base_local is not None:
            values["rope_local_base_freq"] = model.rotary_base_local or model.rotary_base
        return values

    def _windows(self, file: ModelFile, layers: int) -> list[bool]:
        every = self.full_every
        if self.rotary_base_local is not None:
            every = file.integer("sliding_window_pattern", self.full_every)
        return [(index + 1) % every != 0 for index in range(layers)]

    def _split_rope(self, file: ModelFile) -> tuple[ModelFile, float]:
        """Return the file with only the RoPE of full-attention layers, and the RoPE base of layers with the window."""
        rope = file.values.get("rope_parameters")
        local: Mapping[str, Any] = {}
        if isinstance(rope, Mapping) and {"full_attention", "sliding_attention"} & rope.keys():
            full, local = (rope.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
            if len(rope.keys() - {"full_attention", "sliding_attention"}) or not isinstance(local, Mapping):
                raise file.fault("rope_parameters must have only full_attention and sliding_attention, both objects")
            if local.get("rope_type", "default") != "default":
                raise file.fault(
                    f"rope_type of sliding_attention is {str(local['rope_type'])[:60]!r}; it must be default"
                )
            file = ModelFile({**file.values, "rope_parameters": full}, file.where)
        base = local.get("rope_theta", file.values.get("rope_local_base_freq", self.rotary_base_local))
        return file, file.finite("the RoPE base of layers with a window", base)


_ALPHA = 1.702
_YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}


@dataclass(frozen=True, kw_only=True)
class GptOss(LlamaLike):
    """gpt-oss: layers 0, 2, 4, ... have the window, and RoPE uses YaRN by default."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        if file.number("swiglu_alpha", _ALPHA) != _ALPHA:
            raise file.fault(f"swiglu_alpha is {file.values['swiglu_alpha']}; only {_ALPHA} is supported")
        if file.values.get("rope_parameters") is None and file.values.get("rope_scaling") is None:
            file = ModelFile({**file.values, "rope_scaling": _YARN}, file.where)
        settings = super()._settings(file, positions)
        return settings | {"activation_func_clamp_value": file.number("swiglu_limit", 7.0)}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        if values["rope_scaling"] is None:
            values["rope_parameters"] = {"rope_type": "default", "rope_theta": values["rope_theta"]}
        return values | {
            "layer_types": layer_kinds(model),
            "attention_bias": model.add_bias_linear,
            "swiglu_alpha": _ALPHA,
            "swiglu_limit": model.activation_func_clamp_value or 7.0,
        }

    def _windows(self, file: ModelFile, layers: int) -> list[bool]:
        return [index % 2 == 0 for index in range(layers)]

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
