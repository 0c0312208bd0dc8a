"""Map Ministral 3 and Mistral 4: RoPE by YaRN, queries scaled by their position, in Mistral 4 with latent attention."""

from dataclasses import dataclass
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.huggingface.variants import DeepSeek

_BETA = "llama_4_scaling_beta"


def _yarn(factor: float, original: int, theta: float) -> dict[str, Any]:
    """Return the default of rope_parameters."""
    sizes = {"factor": factor, "original_max_position_embeddings": original, "rope_theta": theta}
    return sizes | {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1}


@dataclass(frozen=True, kw_only=True)
class Ministral3(LlamaLike):
    """Llama with the factor on queries among RoPE's settings."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        settings = super()._settings(file, positions)
        rope = file.values.get("rope_parameters") or file.values.get("rope_scaling") or self.rope or {}
        return settings | {"attn_temperature_beta": file.finite(_BETA, rope.get(_BETA, 0.0))}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        plain = {"rope_type": "default", "original_max_position_embeddings": values["max_position_embeddings"]}
        rope = values.pop("rope_scaling") or plain
        rope |= {"rope_theta": values.pop("rope_theta"), _BETA: model.attn_temperature_beta}
        return values | {"rope_parameters": rope}


@dataclass(frozen=True, kw_only=True)
class Mistral4(Ministral3, DeepSeek):
    """DeepSeek-V2 with weights of experts that sum to 1."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        rope = file.values.get("rope_parameters")
        if isinstance(rope, dict) and "partial_rotary_factor" in rope:
            rope = dict(rope)
            rotated, others = (file.integer(f"qk_{kind}_head_dim", 64) for kind in ("rope", "nope"))
            if (share := rope.pop("partial_rotary_factor")) != rotated / (rotated + others):
                raise file.fault(f"partial_rotary_factor is {share}; it must be {rotated} / ({rotated} + {others})")
            file = ModelFile({**file.values, "rope_parameters": rope}, file.where)
        return super()._settings(file, positions)


MISTRAL = (
    Ministral3(
        *("ministral3", "Ministral3ForCausalLM"),
        max_positions=262144,
        norm_epsilon=1e-5,
        key_value_heads=8,
        head_size=128,
        window=None,
        rope=_yarn(16.0, 16384, 1e6),
    ),
    Mistral4(
        *("mistral4", "Mistral4ForCausalLM"),
        max_positions=1048576,
        rope=_yarn(128.0, 8192, 1e4),
        scores=("softmax", "greedy"),
        q_rank=1024,
        sizes=(256, 64, 64, 128),
        only={"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        experts=ExpertKeys(
            count=("n_routed_experts", 128),
            topk=4,
            width=2048,
            normalises=True,
            shared=("n_shared_experts", 1),
            dense="first_k_dense_replace",
            first_dense=0,
            merged=True,
        ),
    ),
)
