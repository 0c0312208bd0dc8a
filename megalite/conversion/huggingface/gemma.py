"""Gemma 2 and Gemma 3 (text): what their config.json says beside what Llama's does."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.huggingface.llama import LlamaLike

GEMMA: Mapping[str, Any] = MappingProxyType(
    {"norm_zero_centered": True, "scale_embeddings": True, "post_norms": True}
)  # settings of all of them


@dataclass(frozen=True, kw_only=True)
class Gemma(LlamaLike):
    """Windows in most layers, scores and logits that may be capped, and another scale of the scores."""

    caps: tuple[float | None, float | None]  # of attention scores and of logits
    full_every: int  # layers with the window end with a full one
    rotary_base_local: float | None = None  # layers with the window have another base than the others

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        if file.values.get("use_bidirectional_attention"):
            raise file.fault("use_bidirectional_attention is true; only causal attention can be expressed")
        if self.rotary_base_local is None:
            settings, base = super()._settings(file, positions), None
        else:
            file, base = self._of_full_layers(file)
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
        windows = [model.has_window(index) for index in range(model.num_layers)]
        values |= {
            "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
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

    def _of_full_layers(self, file: ModelFile) -> tuple[ModelFile, float]:
        """The file with the RoPE of layers without the window alone, and the base of those with it."""
        rope = file.values.get("rope_parameters")
        local: Mapping[str, Any] = {}
        if isinstance(rope, Mapping) and {"full_attention", "sliding_attention"} & rope.keys():
            full, local = (rope.get(kind) or {} for kind in ("full_attention", "sliding_attention"))
            if len(rope.keys() - {"full_attention", "sliding_attention"}) or not isinstance(local, Mapping):
                raise file.fault(
                    "rope_parameters has more than full_attention and sliding_attention, or no object there"
                )
            if local.get("rope_type", "default") != "default":
                raise file.fault(
                    f"rope_type of sliding_attention is {str(local['rope_type'])[:60]!r}; it must be default"
                )
            file = ModelFile({**file.values, "rope_parameters": full}, file.where)
        base = local.get("rope_theta", file.values.get("rope_local_base_freq", self.rotary_base_local))
        return file, file.finite("RoPE's base of layers with a window", base)
