"""Megatron-LM's names of the same tensors through its versions, turned into those of megatron.core's local layers."""

import re
from collections.abc import Mapping
from typing import Any

import torch

from megalite.conversion.weights import ConversionError

_RENAMED = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^(module\.)+", ""),
        # Before megatron.core: nested dicts, here with their keys joined.
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
        # Transformer Engine's layers that have the norm before them inside.
        (r"\.self_attention\.linear_qkv\.layer_norm_(weight|bias)$", r".input_layernorm.\1"),
        (r"\.mlp\.linear_fc1\.layer_norm_(weight|bias)$", r".pre_mlp_layernorm.\1"),
        # Its grouped experts.
        (r"\.mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r".mlp.experts.local_experts.\3.\1.\2"),
    )
)
_DEEPEST = 16
"""Dicts in each other; the oldest versions had 4."""
_IGNORED = re.compile(r"(\._extra_state\d*(/.*)?|(^|\.)rotary_pos_emb\.inv_freq)$")
_FUSED = (
    (re.compile(r"\.input_layernorm\.(weight|bias)$"), r".self_attention.linear_qkv.layer_norm_\1"),
    (re.compile(r"\.pre_mlp_layernorm\.(weight|bias)$"), r".mlp.linear_fc1.layer_norm_\1"),
)


def common_name(name: str) -> str | None:
    """The name in megatron.core's local layers; None for what is no weight (fp8 state, RoPE's frequencies)."""
    if _IGNORED.search(name):
        return None
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


def fused_name(name: str, *, has_experts: bool) -> str:
    """The name in Transformer Engine's layers, where a norm belongs to the linear layer after it.

    The norm before experts has no linear layer after it.
    """
    for pattern, replacement in _FUSED[:1] if has_experts else _FUSED:
        name = pattern.sub(replacement, name)
    return name


class Named(dict[str, torch.Tensor]):
    """Tensors by common name.

    Attributes:
        old_qkv: names of those that are stored as `query_key_value`, whose rows had other orders at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.old_qkv: set[str] = set()


def tensors_of(content: Mapping[Any, Any]) -> Named:
    """The tensors of a `model` entry, nested or not, by common name.

    Raises:
        ConversionError: a name is there twice, or dicts that no model needs: in more than one place, or 16 deep.
    """
    found = Named()
    _collect(content, "", found, {id(content)}, 1)
    return found


def _collect(content: Mapping[Any, Any], prefix: str, found: Named, seen: set[int], depth: int) -> None:
    if depth > _DEEPEST:
        raise ConversionError(f"its model has dicts more than {_DEEPEST} deep in each other")
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            if id(value) in seen:
                raise ConversionError(f"its model has one dict in more than one place, or in itself: {name}")
            seen.add(id(value))
            _collect(value, f"{name}.", found, seen, depth + 1)
        elif isinstance(value, torch.Tensor):
            common = common_name(name)
            if common is None:
                continue
            if common in found:
                raise ConversionError(
                    f"{common} is there twice, under the names of two versions of Megatron-LM or two models"
                )
            found[common] = value
            if ".query_key_value." in name:
                found.old_qkv.add(common)
