"""Map the experts of the Hugging Face families: their settings in config.json, tensor names and shapes."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile
from megalite.conversion.weights import WeightPiece, part_at

_FIRST = ("first_k_dense_replace", "moe_layer_start_index", "mlp_layer_types")
"""Keys of the dense layers if they are the first ones."""


def mlp_kinds(first: int, layers: int) -> list[str]:
    """Return `mlp_layer_types` of config.json for a number of leading dense layers."""
    return ["dense"] * first + ["sparse"] * (layers - first)


@dataclass(frozen=True, kw_only=True)
class ExpertKeys:
    """A family's config.json keys, defaults and tensor names of its experts. The defaults here are Mixtral's: experts
    in every layer, of width intermediate_size, with weights that sum to 1."""

    # Key of the number of experts in published files, and its default; None: the key is required.
    count: tuple[str, int | None] = ("num_local_experts", 8)
    topk: int | None = 2  # default of `topk_key`; None: the key is required
    topk_key: str = "num_experts_per_tok"
    width: int | None = None  # default of moe_intermediate_size; None: the width is intermediate_size
    normalises: bool | None = None  # default of norm_topk_prob (the weights sum to 1); None: always true
    # Key and default of the shared expert: its width (Qwen2) or its width in experts (DeepSeek).
    shared: tuple[str, int | None] | None = None
    shared_gate: bool = False
    scaling: float | None = None  # default of routed_scaling_factor on the weights; None: the family has no such key
    sigmoid: bool = False  # sigmoid scores, with a bias per expert and groups
    biased: bool = False  # softmax scores, with a bias per expert
    groups: tuple[int, int] | None = (1, 1)  # defaults of n_group and topk_group; None: the family has no groups
    first_dense: int = 1  # default of first_k_dense_replace
    # Key of the dense layers: decoder_sparse_step (with mlp_only_layers), or one of `_FIRST`, of which mlp_layer_types may
    # be missing if first_k_dense_replace is there; None: there are none.
    dense: str | None = None
    merged: bool = False  # written with one tensor for the same matrix of all experts
    layer: str = "mlp"  # name of the experts' module in a layer
    bias: str = "gate.e_score_correction_bias"  # name of the experts' bias in that module
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @property
    def _counts(self) -> bool:
        """Whether the shared expert's width is given as a number of experts."""
        return self.shared is not None and self.shared[0].endswith("_shared_experts")

    @property
    def _first_key(self) -> str:
        """Key of the number of leading dense layers."""
        return _FIRST[self.dense == _FIRST[1]]

    def read(self, file: ModelFile) -> dict[str, Any]:
        # transformers 5 saves the number under this key for all families.
        key = "num_local_experts" if "num_local_experts" in file.values else self.count[0]
        experts, topk = file.integer(key, self.count[1]), file.integer(self.topk_key, self.topk)
        found: dict[str, Any] = {"num_experts": experts, "moe_router_topk": topk, **self._read_dense(file)}
        if self.width is not None:
            found["moe_ffn_hidden_size"] = file.integer("moe_intermediate_size", self.width)
        if self.shared is not None:
            key, default = self.shared
            width = file.integer(key, default)
            found["moe_shared_expert_intermediate_size"] = width * (found["moe_ffn_hidden_size"] if self._counts else 1)
            found["moe_shared_expert_gate"] = self.shared_gate
        whole = True if self.normalises is None else file.flag("norm_topk_prob", self.normalises)
        if self.scaling is not None:
            found["moe_router_topk_scaling_factor"] = file.number("routed_scaling_factor", self.scaling)
        if not self.sigmoid:
            if whole and self.scaling is not None:
                raise file.fault("norm_topk_prob is true; with a routed_scaling_factor only false is supported")
            return found | {"moe_router_pre_softmax": not whole, "moe_router_enable_expert_bias": self.biased}
        if whole != (topk > 1):
            raise file.fault(
                f"norm_topk_prob is {str(whole).lower()}; with sigmoid scores and num_experts_per_tok {topk} only "
                f"{str(not whole).lower()} is supported"
            )
        groups, chosen = (
            file.optional_integer(name, default) or 1
            for name, default in zip(("n_group", "topk_group"), self.groups or (1, 1), strict=True)
        )
        if groups > chosen and self.groups is not None:
            if topk // chosen != 2:
                # transformers ranks groups by their best two experts, megalite by their best topk / topk_group.
                raise file.fault(f"num_experts_per_tok is {topk} and topk_group {chosen}; it must be twice as many")
            found |= {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
        return found | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}

    def _read_dense(self, file: ModelFile) -> dict[str, Any]:
        layers = file.layers("num_hidden_layers")
        if self.dense in _FIRST:
            key = self._first_key
            first = file.values.get(key, self.first_dense)
            last = file.values.get("moe_layer_end_index", -1)
            if key == _FIRST[1] and last not in (None, -1, layers - 1):
                raise file.fault(f"moe_layer_end_index is {str(last)[:60]!r}; it must be the last of {layers} layers")
            kinds = file.values.get(self.dense) if self.dense == _FIRST[2] else None
            if kinds is not None:
                first = kinds.count("dense") if isinstance(kinds, list) else None
                if kinds != mlp_kinds(first or 0, layers):
                    raise file.fault(f"{self.dense} is {str(kinds)[:60]}; it must be dense layers and then sparse ones")
            if type(first) is not int or not 0 <= first < layers:
                raise file.fault(f"{key} is {str(first)[:60]!r}; it must be a whole number below {layers} layers")
            return {"moe_first_dense_layers": first}
        if self.dense is None:
            return {}
        every, only = file.integer(self.dense, 1), file.values.get("mlp_only_layers") or []
        if every == 1 and only == list(range(len(only))) and len(only) < layers:
            return {"moe_first_dense_layers": len(only)}
        if only or every > layers:
            raise file.fault(
                f"mlp_only_layers is {str(only)[:60]} with {self.dense} {every}; supported are dense layers at the start "
                f"([0, 1, ...] and 1), or experts in one of every {self.dense} layers ([] and up to {layers})"
            )
        return {"moe_first_dense_layers": every - 1, "moe_layer_freq": every}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        topk = model.moe_router_topk if model.num_experts else 1
        values: dict[str, Any] = {self.count[0]: model.num_experts or 1, self.topk_key: topk}
        values["output_router_logits"] = False
        if self.width is not None:
            values["moe_intermediate_size"] = model.expert_ffn_size
        if self.shared is not None:
            width = model.moe_shared_expert_intermediate_size or 0
            values[self.shared[0]] = max(1, width // model.expert_ffn_size if self._counts else width)
        if self.normalises is not None:
            values["norm_topk_prob"] = topk > 1 if self.sigmoid else not model.moe_router_pre_softmax
        if self.sigmoid and self.groups is not None:
            values["n_group"] = model.moe_router_num_groups or 1
            values["topk_group"] = model.moe_router_group_topk or 1
        if self.scaling is not None:
            values["routed_scaling_factor"] = model.moe_router_topk_scaling_factor
        first, every = model.moe_first_dense_layers, model.moe_layer_freq
        if self.dense in _FIRST:
            values[self._first_key] = first
            if self.dense == _FIRST[2]:
                values[self.dense] = mlp_kinds(first, model.num_layers)
        elif self.dense is not None:
            values |= {self.dense: every, "mlp_only_layers": list(range(first)) if every == 1 else []}
        return values

    def pieces(
        self, model: ModelConfig, layer: str, here: str, present: Collection[str] | None
    ) -> Iterator[WeightPiece]:
        """Yield the experts' tensors, as published (one tensor per matrix and expert) or merged as in transformers 5."""
        h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
        assert experts is not None
        there = f"{layer}.{self.layer}"
        if present is not None and f"{there}.gate.weight" not in present:
            there = f"{layer}.mlp"
        yield WeightPiece(f"{there}.gate.weight", f"{here}.router.weight", (experts, h))
        if model.moe_router_enable_expert_bias:
            shape = (1, experts) if self.biased else (experts,)
            yield WeightPiece(f"{there}.{self.bias}", f"{here}.router.bias", shape)
        up, down = f"{here}.experts.up.weight", f"{here}.experts.down.weight"
        if self.merged if present is None else f"{there}.experts.gate_up_proj" in present:
            yield WeightPiece(f"{there}.experts.gate_up_proj", up, (experts, 2 * f, h))
            yield WeightPiece(f"{there}.experts.down_proj", down, (experts, h, f))
        else:
            for e in range(experts):
                for i, name in enumerate(self.matrices[:2]):
                    yield WeightPiece(f"{there}.experts.{e}.{name}.weight", up, (f, h), part_at(e, i))
            for e in range(experts):
                yield WeightPiece(f"{there}.experts.{e}.{self.matrices[2]}.weight", down, (h, f), part_at(e))
        width = model.moe_shared_expert_intermediate_size
        if width is not None:
            shared = f"{there}.shared_expert{'s' if self._counts else ''}"
            for i, name in enumerate(self.matrices[:2]):
                yield WeightPiece(f"{shared}.{name}.weight", f"{here}.shared.up.weight", (width, h), part_at(i))
            yield WeightPiece(f"{shared}.{self.matrices[2]}.weight", f"{here}.shared.down.weight", (h, width))
        if model.moe_shared_expert_gate:
            yield WeightPiece(f"{there}.shared_expert_gate.weight", f"{here}.shared_gate.weight", (1, h))
