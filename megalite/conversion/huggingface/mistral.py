"""Map Ministral 3 and Mistral 4: RoPE by YaRN, queries scaled by their position, in Mistral 4 with latent attention."""

from dataclasses import dataclass
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.huggingface.variants import DeepSeek

_BETA = "llama_4_scaling_beta"
_YARN = {"rope_type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1}


@dataclass(frozen=True, kw_only=True)
class Ministral3(LlamaLike):
    """Llama with the factor on queries among RoPE's settings."""

    yarn: tuple[float, int, float] = (16.0, 16384, 1e6)  # defaults: factor, original positions, theta

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        rope = file.values.get("rope_parameters") or file.values.get("rope_scaling")
        if rope is None:
            names = ("factor", "original_max_position_embeddings", "rope_theta")
            rope = _YARN | dict(zip(names, self.yarn, strict=True))
        if not isinstance(rope, dict):
            raise file.fault(f"rope_parameters must be an object, not {str(rope)[:60]!r}")
        values = {name: value for name, value in file.values.items() if name not in ("rope_parameters", "rope_scaling")}
        file = ModelFile(values | {"rope_parameters": self._whole(file, rope)}, file.where)
        beta = file.finite(_BETA, rope.get(_BETA, 0.0))
        return super()._settings(file, positions) | {"attn_temperature_beta": beta}

    def _whole(self, file: ModelFile, rope: dict[str, Any]) -> dict[str, Any]:
        """Return RoPE's settings for a RoPE that rotates all channels that it is applied to."""
        return rope

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length)
        scaling = values.pop("rope_scaling") or {
            "rope_type": "default",
            "original_max_position_embeddings": values["max_position_embeddings"],
        }
        own = {"rope_theta": values.pop("rope_theta"), _BETA: model.attn_temperature_beta}
        return values | {"rope_parameters": scaling | own}


@dataclass(frozen=True, kw_only=True)
class Mistral4(Ministral3, DeepSeek):
    """DeepSeek-V2 with weights of experts that sum to 1."""

    def _whole(self, file: ModelFile, rope: dict[str, Any]) -> dict[str, Any]:
        rotated, others = (file.integer(f"qk_{kind}_head_dim", 64) for kind in ("rope", "nope"))
        share = rope.get("partial_rotary_factor", rotated / (rotated + others))
        if share != rotated / (rotated + others):
            raise file.fault(f"partial_rotary_factor is {share}; it must be {rotated} / ({rotated} + {others})")
        return {name: value for name, value in rope.items() if name != "partial_rotary_factor"}


MISTRAL = (
    Ministral3(
        *("ministral3", "Ministral3ForCausalLM"),
        max_positions=262144,
        norm_epsilon=1e-5,
        key_value_heads=8,
        head_size=128,
        window=None,
    ),
    Mistral4(
        *("mistral4", "Mistral4ForCausalLM"),
        max_positions=1048576,
        yarn=(128.0, 8192, 1e4),
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
