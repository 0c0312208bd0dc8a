"""DeepSeek-V2 and V3, and what shares their architecture (Moonlight, Kimi-K2): multi-latent attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.weights import Piece

_SIZES = (
    ("kv_lora_rank", "kv_lora_rank", 512),
    ("qk_head_dim", "qk_nope_head_dim", 128),
    ("qk_pos_emb_head_dim", "qk_rope_head_dim", 64),
    ("v_head_dim", "v_head_dim", 128),
)
"""Our setting, their key, what stands for a missing one."""


@dataclass(frozen=True, kw_only=True)
class DeepSeek(LlamaLike):
    scores: tuple[str, str]  # what scoring_func and topk_method are, where published files say it

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        fixed: dict[str, Any] = dict(zip(("scoring_func", "topk_method"), self.scores, strict=True))
        fixed |= {"attention_bias": False, "mlp_bias": False, "rope_interleave": True, "moe_layer_freq": 1}
        for key, only in fixed.items():
            if file.values.get(key, only) != only:
                raise file.fault(f"{key} is {str(file.values[key])[:60]!r}; what can be expressed is {only!r}")
        settings = super()._settings(file, positions)
        heads = settings["num_attention_heads"]
        if settings.pop("num_query_groups") != heads:
            raise file.fault(f"num_key_value_heads is not num_attention_heads {heads}; every head has its own key")
        # head_dim, which some files have, is that of the part with rope.
        settings |= {"kv_channels": None, "multi_latent_attention": True, "qk_norm": True}
        settings["q_lora_rank"] = file.optional_integer("q_lora_rank", 1536)
        settings |= {ours: file.integer(theirs, default) for ours, theirs, default in _SIZES}
        if settings.get("rope_scaling") == "yarn" and "rope_mscale_all_dim" not in settings:
            scaling = file.values.get("rope_scaling") or file.values.get("rope_parameters") or {}
            if scaling.get("mscale_all_dim"):
                raise file.fault("mscale_all_dim stands without mscale; what can be expressed is both or neither")
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        del values["head_dim"]
        values |= {theirs: getattr(model, ours) for ours, theirs, _ in _SIZES}
        # The last two are for other readers than transformers.
        values |= dict(zip(("scoring_func", "topk_method"), self.scores, strict=True))
        return values | {"q_lora_rank": model.q_lora_rank, "attention_bias": False}


def latent_attention_pieces(model: ModelConfig, there: str, here: str) -> Iterator[Piece]:
    """Rows are in the same order there and here: by head, without rope before with, keys before values."""
    h, heads, latent = model.hidden_size, model.num_attention_heads, model.kv_lora_rank
    q, rows = model.q_lora_rank, heads * model.head_size
    if q is None:
        yield Piece(f"{there}.q_proj.weight", f"{here}.q.weight", (rows, h))
    else:
        yield Piece(f"{there}.q_a_proj.weight", f"{here}.q_down.weight", (q, h))
        yield Piece(f"{there}.q_a_layernorm.weight", f"{here}.q_latent_norm.weight", (q,))
        yield Piece(f"{there}.q_b_proj.weight", f"{here}.q_up.weight", (rows, q))
    shape = (latent + model.qk_pos_emb_head_dim, h)
    yield Piece(f"{there}.kv_a_proj_with_mqa.weight", f"{here}.kv_down.weight", shape)
    yield Piece(f"{there}.kv_a_layernorm.weight", f"{here}.kv_latent_norm.weight", (latent,))
    shape = (heads * (model.qk_head_dim + model.v_head_dim), latent)
    yield Piece(f"{there}.kv_b_proj.weight", f"{here}.kv_up.weight", shape)
    yield Piece(f"{there}.o_proj.weight", f"{here}.out.weight", (h, heads * model.v_head_dim))
