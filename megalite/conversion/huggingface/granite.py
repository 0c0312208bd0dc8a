"""Map Granite 3 and 4: Llama and Mixtral, some with Mamba-2, with factors on embeddings, scores, branches and logits."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megalite.config.model import MULTIPLIERS, ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, written
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.hybrid import WithMamba, mamba_settings, mamba_values, refuse_limit
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.weights import WeightPiece

_FACTORS = tuple((name, name, "number", 1.0) for name in MULTIPLIERS)
_KINDS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}
_SHARED_MLP = ("shared_mlp.input_linear", "shared_mlp.output_linear")
"""Names of a shared expert's two tensors in a layer; the first has gate and up projection."""


@dataclass(frozen=True, kw_only=True)
class Granite(LlamaLike):
    """Granite with only attention layers."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        settings = super()._settings(file, positions) | file.settings(_FACTORS)
        return settings | {"softmax_scale": file.number("attention_multiplier", 1.0)}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length) | written(model, _FACTORS)
        return values | {"attention_multiplier": model.softmax_scale or model.head_size**-0.5}


@dataclass(frozen=True, kw_only=True)
class GraniteHybrid(WithMamba, Granite):
    """Granite 4: some or all layers have Mamba-2. Without experts the MLP is stored as the shared expert."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        refuse_limit(file)
        values = {"num_local_experts": 8, "shared_intermediate_size": 1024, **file.values}  # their defaults
        layers = file.layers("num_hidden_layers")
        kinds = values.pop("layer_types", None) or ["mamba"] * layers
        place = values.pop("position_embedding_type", None)
        if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _KINDS for kind in kinds):
            raise file.fault(
                f"layer_types is {str(kinds)[:60]}; it must be mamba or attention for each of {layers} layers"
            )
        if place not in (None, "nope", "rope"):
            raise file.fault(f"position_embedding_type is {str(place)[:60]!r}; it must be nope or rope")
        family = self
        if not values["num_local_experts"]:
            family, values["intermediate_size"] = replace(self, experts=None), values["shared_intermediate_size"]
        settings = super(GraniteHybrid, family)._settings(ModelFile(values, file.where), positions)
        if place != "rope":
            settings["position_embedding_type"] = "none"
        linear = [_KINDS[kind] for kind in kinds]
        return settings | (mamba_settings(file, linear, settings["hidden_size"]) if any(linear) else {})

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        family = self if model.num_experts else replace(self, experts=None)
        values = super(GraniteHybrid, family).write(model, seq_length)
        if not model.num_experts:
            values |= {"num_local_experts": 0, "shared_intermediate_size": model.ffn_size}
        linear = list(map(model.is_linear_layer, range(model.num_layers)))
        # transformers checks the sizes of Mamba layers also if there are none.
        values |= mamba_values(model) if any(linear) else {"mamba_n_heads": 1}
        values["position_embedding_type"] = "rope" if model.position_embedding_type == "rope" else "nope"
        return values | {"layer_types": ["mamba" if one else "attention" for one in linear]}


@dataclass(frozen=True, kw_only=True)
class GraniteExperts(ExpertKeys):
    """Experts of Granite: one tensor for the same matrix of all experts."""

    layer: str = "block_sparse_moe"

    def pieces(
        self, model: ModelConfig, layer: str, here: str, present: Collection[str] | None
    ) -> Iterator[WeightPiece]:
        h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
        assert experts is not None
        there = f"{layer}.{self.layer}"
        yield WeightPiece(f"{there}.router.layer.weight", f"{here}.router.weight", (experts, h))
        yield WeightPiece(f"{there}.input_linear.weight", f"{here}.experts.up.weight", (experts, 2 * f, h))
        yield WeightPiece(f"{there}.output_linear.weight", f"{here}.experts.down.weight", (experts, h, f))
        width = model.moe_shared_expert_intermediate_size
        if width is not None:
            up, down = _SHARED_MLP
            yield WeightPiece(f"{layer}.{up}.weight", f"{here}.shared.up.weight", (2 * width, h))
            yield WeightPiece(f"{layer}.{down}.weight", f"{here}.shared.down.weight", (h, width))


GRANITE = (
    Granite("granite", "GraniteForCausalLM", max_positions=2048, linear_biases=True),
    Granite(
        *("granitemoe", "GraniteMoeForCausalLM"), max_positions=2048, attention_bias=True, experts=GraniteExperts()
    ),
    Granite(
        *("granitemoeshared", "GraniteMoeSharedForCausalLM"),
        max_positions=2048,
        attention_bias=True,
        experts=GraniteExperts(shared=("shared_intermediate_size", None)),
    ),
    GraniteHybrid(
        *("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
        max_positions=2048,
        attention_bias=True,
        fused_mlp=_SHARED_MLP,
        activations={"silu": "swiglu"},  # of Mamba-2 too, where megalite has no other
        experts=GraniteExperts(shared=("shared_intermediate_size", 1024)),
    ),
)
