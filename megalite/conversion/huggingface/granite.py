"""Map Granite 3 and 4: Llama and Mixtral with constant factors on embeddings, scores, branches and logits."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megalite.config.model import MULTIPLIERS, ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, written
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import LlamaLike
from megalite.conversion.weights import WeightPiece

_FACTORS = tuple((name, name, "number", 1.0) for name in MULTIPLIERS)
SHARED_MLP = ("shared_mlp.input_linear", "shared_mlp.output_linear")
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
class GraniteHybrid(Granite):
    """Granite 4 without Mamba layers and experts: its MLP is stored as the shared expert."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        values = {"num_local_experts": 8, "position_embedding_type": None, **file.values}  # their defaults
        kinds, layers = values.pop("layer_types", None), file.layers("num_hidden_layers")
        if kinds not in (["attention"] * layers, ["full_attention"] * layers):
            raise file.fault(
                f"layer_types is {str(kinds)[:60]}; it must be attention for each of {layers} layers: Mamba layers are "
                "not supported"
            )
        values["intermediate_size"] = file.integer("shared_intermediate_size", 1024)
        return super()._settings(ModelFile(values, file.where), positions)

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        values = super().write(model, seq_length) | {"shared_intermediate_size": model.ffn_size, **self.only}
        # transformers checks the sizes of Mamba layers also if there are none.
        return values | {"layer_types": ["attention"] * model.num_layers, "mamba_n_heads": 1}


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
            up, down = SHARED_MLP
            yield WeightPiece(f"{layer}.{up}.weight", f"{here}.shared.up.weight", (2 * width, h))
            yield WeightPiece(f"{layer}.{down}.weight", f"{here}.shared.down.weight", (h, width))
