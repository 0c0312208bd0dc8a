"""Map the tensors of a Megatron-LM rank, in all versions, to slices of our tensors.

Both formats group the rows of qkv by key/value head. In Megatron-LM the gate is the first half of each rank's rows of
fc1, so the whole fc1 is not the concatenation of the ranks' rows. The vocabulary is padded to a multiple of the
tensor-parallel size, so the number of padding rows may differ."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.weights import ConversionError, WeightPiece, first_rows
from megalite.models.shapes import ParameterShape, buffer_shapes, embedding_shapes, head_shapes, layer_shapes

_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(module\.)+", ""),
        # Versions before megatron.core have nested dicts; their keys are joined.
        (r"^language_model\.(encoder|transformer|embedding|output_layer)\.", r"\1."),
        (r"^language_model\.(word_embeddings|position_embeddings)\.", r"embedding.\1."),
        (r"^(encoder|transformer)\.", "decoder."),
        (r"^word_embeddings_for_head\.", "output_layer."),
        (r"\.(self_)?attention\.query_key_value\.", ".self_attention.linear_qkv."),
        (r"\.(self_)?attention\.dense\.", ".self_attention.linear_proj."),
        (r"\.dense_h_to_4h\.", ".linear_fc1."),
        (r"\.dense_4h_to_h\.", ".linear_fc2."),
        (r"\.input_norm\.", ".input_layernorm."),
        (r"\.post_attention_(layer)?norm\.", ".pre_mlp_layernorm."),
        (r"\.final_norm\.", ".final_layernorm."),
        # Transformer Engine's linear layers that contain the preceding norm.
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        (r"\.linear_(q|kv)_up_proj\.layer_norm_(weight|bias)$", r".\1_layernorm.\2"),
        # Transformer Engine's grouped experts.
        (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.local_experts.\3.\1.\2"),
    )
)
_DEEPEST = 16  # maximum nesting of dicts; the oldest versions have 4 levels
_IGNORED = re.compile(r"(\._extra_state\d*(/.*)?|(^|\.)rotary_pos_emb\.inv_freq)$")
_FUSED = (
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1"),
)
_LATENT = (re.compile(r"\.(q|kv)_layernorm\.(weight|bias)$"), r".linear_\1_up_proj.layer_norm_\2")


def common_name(name: str) -> str | None:
    """Return a tensor's name in megatron.core's local layers; None if it is not a weight (fp8 state, RoPE frequencies)."""
    if _IGNORED.search(name):
        return None
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def fused_name(name: str, *, has_experts: bool, latent: bool = False) -> str:
    """Return a tensor's name in Transformer Engine's layers, where a norm belongs to the linear layer after it. The
    norm before experts stays separate, because no linear layer follows it; so does the norm before `latent` attention,
    because two follow it."""
    before_attention, before_mlp = _FUSED
    for pattern, replacement in (_LATENT if latent else before_attention, *(() if has_experts else (before_mlp,))):
        name = pattern.sub(replacement, name)
    return name


class Named(dict[str, torch.Tensor]):
    """Tensors by common name. `old_qkv`: names of tensors stored as `query_key_value`, of which early versions have
    another order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.old_qkv: set[str] = set()


def tensors_of(content: Mapping[Any, Any]) -> Named:
    """Return the tensors of a `model` entry, nested or not, by common name."""
    found = Named()
    _collect(content, "", found, {id(content)}, 1)
    return found


def _collect(content: Mapping[Any, Any], prefix: str, found: Named, seen: set[int], depth: int) -> None:
    if depth > _DEEPEST:
        raise ConversionError(f"its model has dicts nested more than {_DEEPEST} deep")
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if id(value) in seen:
                raise ConversionError(f"its model contains one dict twice, or in itself: {name}")
            seen.add(id(value))
            _collect(value, f"{name}.", found, seen, depth + 1)
        elif isinstance(value, torch.Tensor):
            common = common_name(name)
            if common is None:
                continue
            if common in found:
                raise ConversionError(f"{common} exists twice, under the names of two versions or models")
            found[common] = value
            if ".query_key_value." in name:
                found.old_qkv.add(common)


WORD = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"


@dataclass(frozen=True)
class Shard:
    """The position of a rank: tensor-parallel rank r of tp, expert-parallel rank e of ep."""

    tp: int
    r: int
    ep: int = 1
    e: int = 0


@dataclass(frozen=True)
class Stage:
    """A pipeline stage, or one chunk of it: layers [first, last) of the whole model, embedding and head."""

    first: int
    last: int
    has_embedding: bool
    has_head: bool


def stage_pieces(
    model: ModelConfig, stage: Stage, shard: Shard, *, vocabulary: int, grouped: bool = False
) -> Iterator[WeightPiece]:
    """Yield the tensors of one file's model by common name, in the order of the forward pass, without MTP layers.
    `vocabulary`: Megatron-LM's padded vocabulary, over all ranks. `grouped`: experts are megatron.core's GroupedMLP,
    with two matrices for all experts."""
    model = replace(model, mtp_num_layers=0)
    if stage.has_embedding:
        for shape in embedding_shapes(model):
            yield (
                vocabulary_piece(WORD, shape.name, vocabulary, model.hidden_size, shard)
                if shape.shard_dim == 0
                else WeightPiece("embedding.position_embeddings.weight", shape.name, shape.shape)
            )
    for local, index in enumerate(range(stage.first, stage.last)):
        prefix = f"layers.{index}."
        for shape in (*layer_shapes(model, index), *buffer_shapes(model, index, index + 1)):
            rest, there = shape.name.removeprefix(prefix), f"decoder.layers.{local}"
            if shape.expert:
                yield from _experts(model, shape, there, rest, shard, grouped)
                continue
            yield _sliced(f"{there}.{_LAYER_NAMES[rest]}", shape, shard)
    if stage.has_head:
        for shape in head_shapes(model):
            if shape.shard_dim == 0:
                yield vocabulary_piece(HEAD, shape.name, vocabulary, model.hidden_size, shard)
            else:
                kind = shape.name.rpartition(".")[2]
                yield WeightPiece(f"decoder.final_layernorm.{kind}", shape.name, shape.shape)
        if model.tie_embeddings and not stage.has_embedding:
            word = embedding_shapes(model)[0]
            yield vocabulary_piece(HEAD, word.name, vocabulary, model.hidden_size, shard)


def _both(there: str, here: str) -> dict[str, str]:
    return {f"{here}.{kind}": f"{there}.{kind}" for kind in ("weight", "bias")}


_LAYER_NAMES = {
    **_both("input_layernorm", "attention_norm"),
    **_both("self_attention.linear_qkv", "attention.qkv"),
    **_both("self_attention.q_layernorm", "attention.q_norm"),
    **_both("self_attention.k_layernorm", "attention.k_norm"),
    **_both("self_attention.linear_proj", "attention.out"),
    "attention.sinks": "self_attention.core_attention.softmax_offset",
    "attention.q.weight": "self_attention.linear_q_proj.weight",
    "attention.q_down.weight": "self_attention.linear_q_down_proj.weight",
    "attention.q_up.weight": "self_attention.linear_q_up_proj.weight",
    "attention.kv_down.weight": "self_attention.linear_kv_down_proj.weight",
    "attention.kv_up.weight": "self_attention.linear_kv_up_proj.weight",
    **_both("self_attention.q_layernorm", "attention.q_latent_norm"),
    **_both("self_attention.kv_layernorm", "attention.kv_latent_norm"),
    **_both("pre_mlp_layernorm", "mlp_norm"),
    **_both("mlp.linear_fc1", "mlp.up"),
    **_both("mlp.linear_fc2", "mlp.down"),
    "moe.router.weight": "mlp.router.weight",
    "moe.router.linear_bias": "mlp.router.bias",
    "moe.router.bias": "mlp.router.expert_bias",
    "moe.shared_gate.weight": "mlp.shared_experts.gate_weight",
    **_both("mlp.shared_experts.linear_fc1", "moe.shared.up"),
    **_both("mlp.shared_experts.linear_fc2", "moe.shared.down"),
}


def _sliced(name: str, shape: ParameterShape, shard: Shard) -> WeightPiece:
    """Return the shard of one of our tensors. [2, f/tp, ...] of gate and up is [2·f/tp, ...] in Megatron-LM."""
    dim = shape.shard_dim
    if dim is None:
        return WeightPiece(name, shape.name, shape.shape)
    size = shape.shape[dim] // shard.tp
    local = (*shape.shape[:dim], size, *shape.shape[dim + 1 :])
    if dim == 1 and shape.name.rpartition(".")[0].endswith(".up"):
        local = (2 * size, *local[2:])
    return WeightPiece(name, shape.name, local, lambda tensor: tensor.narrow(dim, shard.r * size, size))


def vocabulary_piece(name: str, ours: str, vocabulary: int, hidden_size: int, shard: Shard) -> WeightPiece:
    rows = vocabulary // shard.tp
    return WeightPiece(name, ours, (rows, hidden_size), first_rows(rows, shard.r * rows))


def _experts(
    model: ModelConfig, shape: ParameterShape, there: str, rest: str, shard: Shard, grouped: bool
) -> Iterator[WeightPiece]:
    """Yield the pieces of our stack of experts: one for each expert of this rank or, if `grouped`, one for all."""
    matrix, _, kind = rest.rpartition(".")
    layer = "linear_fc1" if matrix == "moe.experts.up" else "linear_fc2"
    # The bias of fc2 is replicated on every rank.
    dim, h = shape.shard_dim or 1, model.hidden_size
    parts, place = (1, 0) if shape.shard_dim is None else (shard.tp, shard.r)
    size, count = shape.shape[dim] // parts, shape.shape[0] // shard.ep
    first = shard.e * count
    width = 2 * size if layer == "linear_fc1" and model.is_gated else size

    def local_part(tensor: torch.Tensor) -> torch.Tensor:
        """Return [count, 2, f/tp, h] (gated) or [count, f/tp, h] of fc1, [count, h, f/tp] of fc2; biases lack the last."""
        return tensor.narrow(dim, place * size, size)[first : first + count]

    if grouped and layer == "linear_fc1":  # [count, h, width], flattened to the piece's shape
        name = f"{there}.mlp.experts.weight1"
        yield WeightPiece(name, shape.name, (h, count * width), lambda up: local_part(up).movedim(-1, 1))
    elif grouped:  # [count, f/tp, h], flattened
        name = f"{there}.mlp.experts.weight2"
        yield WeightPiece(name, shape.name, (count * size, h), lambda down: local_part(down).transpose(1, 2))
    else:
        local = (width,) if kind == "bias" else (width, h) if layer == "linear_fc1" else (h, size)
        for expert in range(count):
            name = f"{there}.mlp.experts.local_experts.{expert}.{layer}.{kind}"
            yield WeightPiece(name, shape.name, local, partial(lambda index, tensor: local_part(tensor)[index], expert))


def old_order(piece: WeightPiece, model: ModelConfig, version: float) -> WeightPiece:
    """Return a qkv piece of checkpoint versions before 2, with rows [3, heads, d] (version 0) or [heads, d, 3] (1)."""
    dims = (0, 1) if version < 1.0 else (1, 2)
    return replace(
        piece, view=lambda tensor: piece.view(tensor).unflatten(0, (-1, 3, model.head_size)).transpose(*dims)
    )
