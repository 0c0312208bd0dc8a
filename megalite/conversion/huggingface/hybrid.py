"""Map families with Mamba-2 layers: Nemotron-H, in which mixers and MLPs are separate layers, and Bamba."""

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.megatron import hybrid_layers
from megalite.config.model import ModelConfig
from megalite.conversion.huggingface.config_json import ModelFile, written
from megalite.conversion.huggingface.experts import ExpertKeys
from megalite.conversion.huggingface.llama import LlamaLike, layers_without, mlp_pieces
from megalite.conversion.weights import View, WeightPiece, first_rows, part_at
from megalite.models.shapes import WORD

_SYMBOLS: Mapping[str, str] = MappingProxyType(
    {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
)
"""Name of a layer in `layers_block_type` -> its symbol in `hybrid_override_pattern`."""
_SIZES = (
    ("linear_num_value_heads", "mamba_num_heads", "integer", 128),
    ("linear_value_head_dim", "mamba_head_dim", "integer", 64),
    ("linear_num_key_heads", "n_groups", "integer", 8),
    ("linear_key_head_dim", "ssm_state_size", "integer", 128),
    ("linear_conv_kernel_dim", "conv_kernel", "integer", 4),
)

_NEMOTRON_ONLY: Mapping[str, Any] = MappingProxyType(
    {
        **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"), False),
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "n_shared_experts": 1,
        "moe_latent_size": None,
        "num_nextn_predict_layers": 0,
    }
)
"""Keys of Nemotron-H with one supported value."""
_BAMBA_NAMES = {
    ".post_attention_layernorm.": ".pre_ff_layernorm.",
    ".mlp.": ".feed_forward.",
    "model.norm.": "model.final_layernorm.",
}
"""Llama's name of a tensor -> Bamba's."""
_UNLIMITED = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])  # the last as transformers saves it


def refuse_limit(file: ModelFile) -> None:
    """Raise if the steps of Mamba-2 are limited."""
    if (limit := file.values.get("time_step_limit")) not in _UNLIMITED:
        raise file.fault(f"time_step_limit is {str(limit)[:60]}; only [0, Infinity], no limit, is supported")


def mamba_pieces(model: ModelConfig, there: str, here: str) -> Iterator[WeightPiece]:
    """Yield the tensors of a Mamba-2 mixer."""
    h, heads, values = model.hidden_size, model.linear_num_key_heads, model.linear_num_value_heads
    convolved, projected = model.linear_channels
    key, value = model.linear_key_head_dim, values // heads * model.linear_value_head_dim
    # Ends of a key head's channels: query (C), key (B), values (x), output gates (z), steps.
    ends = list(itertools.accumulate((key, key, value, value, values // heads), initial=0))

    def rows(part: int) -> View:
        return lambda ours: ours.unflatten(0, (heads, -1))[:, ends[part] : ends[part + 1]]

    # Theirs has the channels of all heads, one kind after the other.
    order = rows(2), (rows(1), rows(0))
    own = f"{here}.in_proj.weight"
    yield WeightPiece(f"{there}.in_proj.weight", own, (projected, h), rows(3), (*map(rows, (2, 1, 0, 4)),))
    shape = (convolved, 1, model.linear_conv_kernel_dim)
    yield WeightPiece(f"{there}.conv1d.weight", f"{here}.conv.weight", shape, *order)
    yield WeightPiece(f"{there}.conv1d.bias", f"{here}.conv.bias", (convolved,), *order)
    for theirs, ours in (("A_log", "a_log"), ("dt_bias", "dt_bias"), ("D", "skip")):
        yield WeightPiece(f"{there}.{theirs}", f"{here}.{ours}", (values,))
    yield WeightPiece(f"{there}.norm.weight", f"{here}.norm.weight", (heads * value,))
    yield WeightPiece(f"{there}.out_proj.weight", f"{here}.out.weight", (h, heads * value))


class NemotronExperts(ExpertKeys):
    """Experts of Nemotron 3, which have no gate."""

    def pieces(
        self, model: ModelConfig, layer: str, here: str, present: Collection[str] | None
    ) -> Iterator[WeightPiece]:
        h, f, experts = model.hidden_size, model.expert_ffn_size, model.num_experts
        assert experts is not None
        yield WeightPiece(f"{layer}.gate.weight", f"{here}.router.weight", (experts, h))
        yield WeightPiece(f"{layer}.{self.bias}", f"{here}.router.bias", (experts,))
        for name, shape in (("up", (f, h)), ("down", (h, f))):
            ours, merged = f"{here}.experts.{name}.weight", f"{layer}.experts.{name}_proj"
            if present is not None and merged in present:
                yield WeightPiece(merged, ours, (experts, *shape))
                continue
            for e in range(experts):
                yield WeightPiece(f"{layer}.experts.{e}.{name}_proj.weight", ours, shape, part_at(e))
        if (width := model.moe_shared_expert_intermediate_size) is not None:
            yield from mlp_pieces(model, f"{layer}.shared_experts", f"{here}.shared", width=width)


@dataclass(frozen=True, kw_only=True)
class NemotronH(LlamaLike):
    """Nemotron-H: each of its layers is a norm and either Mamba-2, attention, an MLP or experts. A mixer and the MLP that may
    follow it are one of our layers."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        refuse_limit(file)
        pattern = _pattern(file)
        try:
            layers = hybrid_layers(pattern, "hybrid_override_pattern")
        except ConfigError as error:
            raise file.fault(str(error)) from None
        values = {name: value for name, value in file.values.items() if name not in ("layer_types", "sliding_window")}
        values |= {"num_hidden_layers": layers["num_layers"], "rms_norm_eps": values.get("layer_norm_epsilon", 1e-5)}
        values.setdefault("intermediate_size", 21504)
        family = self if "E" in pattern else replace(self, experts=None)
        settings = super(NemotronH, family)._settings(ModelFile(values, file.where), positions)
        sizes = file.settings(_SIZES) if "M" in pattern else {}
        return settings | layers | sizes | {"position_embedding_type": "none"}

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        family = self if model.num_experts else replace(self, experts=None)
        values = super(NemotronH, family).write(model, seq_length) | written(model, _SIZES)
        for name in ("rms_norm_eps", "rope_theta", "rope_scaling"):
            del values[name]
        pattern = "".join(map(_symbols, itertools.repeat(model), range(model.num_layers)))
        own = {"num_hidden_layers": len(pattern), "layer_norm_epsilon": model.norm_epsilon}
        return values | own | {"hybrid_override_pattern": pattern}

    def pieces(self, model: ModelConfig, present: Collection[str] | None) -> Iterator[WeightPiece]:
        assert model.vocab_size is not None
        h, rows, vocabulary = model.hidden_size, (model.vocab_size, model.hidden_size), first_rows(model.vocab_size)
        prefix = "model" if present is not None and "model.embeddings.weight" in present else "backbone"
        yield WeightPiece(f"{prefix}.embeddings.weight", WORD, rows, vocabulary)
        number = itertools.count()
        for i in range(model.num_layers):
            for symbol in _symbols(model, i):
                there, here = f"{prefix}.layers.{next(number)}", f"layers.{i}"
                branch = "attention" if symbol in "M*" else "mlp"
                yield WeightPiece(f"{there}.norm.weight", f"{here}.{branch}_norm.weight", (h,))
                if symbol == "M":
                    yield from mamba_pieces(model, f"{there}.mixer", f"{here}.attention")
                elif symbol == "*":
                    yield from self.attention_pieces(model, f"{there}.mixer", f"{here}.attention")
                elif symbol == "E":
                    assert self.experts is not None
                    yield from self.experts.pieces(model, f"{there}.mixer", f"{here}.moe", present)
                else:
                    yield from mlp_pieces(model, f"{there}.mixer", f"{here}.mlp")
        yield WeightPiece(f"{prefix}.norm_f.weight", "final_norm.weight", (h,))
        if not model.tie_embeddings:
            yield WeightPiece("lm_head.weight", "head.weight", rows, vocabulary)


@dataclass(frozen=True, kw_only=True)
class WithMamba(LlamaLike):
    """A Llama-like architecture in which some or all layers have Mamba-2 instead of attention."""

    def mixer_pieces(self, model: ModelConfig, index: int, layer: str, here: str) -> Iterator[WeightPiece]:
        if model.is_linear_layer(index):
            yield from mamba_pieces(model, f"{layer}.mamba", here)
        else:
            yield from super().mixer_pieces(model, index, layer, here)


class Bamba(WithMamba):
    """Bamba: Llama with Mamba-2 in most layers."""

    def _settings(self, file: ModelFile, positions: int) -> dict[str, Any]:
        refuse_limit(file)
        settings = super()._settings(file, positions)
        softmax = file.values.get("attn_layer_indices") or []
        layers = range(settings["num_layers"])
        if not isinstance(softmax, list) or any(each not in layers for each in softmax):
            raise file.fault(
                f"attn_layer_indices is {str(softmax)[:60]}; it must be a list of numbers below {layers.stop}"
            )
        linear = [index not in softmax for index in layers]
        if any(linear):
            settings |= mamba_settings(file, linear, settings["hidden_size"])
        return settings

    def write(self, model: ModelConfig, seq_length: int) -> dict[str, Any]:
        softmax = [index for index in range(model.num_layers) if not model.is_linear_layer(index)]
        return super().write(model, seq_length) | mamba_values(model) | {"attn_layer_indices": softmax}

    def pieces(self, model: ModelConfig, present: Collection[str] | None) -> Iterator[WeightPiece]:
        for piece in super().pieces(model, present):
            name = piece.name
            for llama, theirs in _BAMBA_NAMES.items():
                name = name.replace(llama, theirs)
            yield replace(piece, name=name)


_MAMBA = (
    ("linear_num_value_heads", "mamba_n_heads", "integer", 128),
    ("linear_num_key_heads", "mamba_n_groups", "integer", 1),
    ("linear_key_head_dim", "mamba_d_state", "integer", 256),
    ("linear_conv_kernel_dim", "mamba_d_conv", "integer", 4),
)


def mamba_settings(file: ModelFile, linear: list[bool], hidden_size: int) -> dict[str, Any]:
    """Read the settings of layers with Mamba-2."""
    file.require({"mamba_conv_bias": True, "mamba_proj_bias": False})
    found = file.settings(_MAMBA)
    heads, width = found["linear_num_value_heads"], file.integer("mamba_expand", 2) * hidden_size
    size = file.values.get("mamba_d_head", "auto")
    if width % heads or size not in ("auto", width // heads):
        raise file.fault(
            f"mamba_expand·hidden_size is {width}; it must be mamba_n_heads {heads} times mamba_d_head {size}"
        )
    found |= {"linear_value_head_dim": width // heads, "experimental_attention_variant": "mamba2"}
    return found | {"linear_attention_freq": layers_without(linear, listed=0) or [len(linear) + 1]}


def mamba_values(model: ModelConfig) -> dict[str, Any]:
    """Return what `mamba_settings` reads. An expansion that is no whole number is rounded, and then refused by it."""
    width = model.linear_num_value_heads * model.linear_value_head_dim
    own = {"mamba_d_head": model.linear_value_head_dim, "mamba_expand": max(1, width // model.hidden_size)}
    return written(model, _MAMBA) | own


def _symbols(model: ModelConfig, index: int) -> str:
    """Return the symbols of layer `index`: its mixer and, if there is one, its MLP."""
    feed_forward = ("E" if model.is_moe_layer(index) else "-") if model.has_mlp(index) else ""
    return ("M" if model.is_linear_layer(index) else "*") + feed_forward


def _pattern(file: ModelFile) -> str:
    """Return the symbols of the layers in config.json; `?` stands for another kind."""
    pattern = str(file.values.get("hybrid_override_pattern", "")).replace("G", "?")
    for name in ("layers_block_type", "layer_types"):
        if isinstance(names := file.values.get(name), list):
            return "".join(_SYMBOLS.get(str(each), "?") for each in names)
    return pattern


HYBRID = (
    Bamba(
        *("bamba", "BambaForCausalLM"),
        max_positions=262144,
        norm_epsilon=1e-5,
        key_value_heads=8,
        linear_biases=True,
        partial_rotary=0.5,
        activations={"silu": "swiglu"},  # of Mamba-2 too, where megalite has no other
        whole_heads=True,
    ),
    NemotronH(
        *("nemotron_h", "NemotronHForCausalLM"),
        max_positions=4096,
        norm_epsilon=1e-5,
        key_value_heads=8,
        head_size=128,
        activation=("mlp_hidden_act", "relu2"),
        activations={"relu2": "squared_relu"},
        only=_NEMOTRON_ONLY,
        experts=NemotronExperts(
            count=("n_routed_experts", 8),
            width=7688,
            normalises=True,
            shared=("moe_shared_expert_intermediate_size", 7688),
            scaling=1.0,
            sigmoid=True,
        ),
    ),
)
