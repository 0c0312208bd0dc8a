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


def tensors_of(content: Mapping[Any, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a `model` entry, nested or not, by common name."""
    found: dict[str, torch.Tensor] = {}
    for key, value in content.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            for inner, tensor in tensors_of(value, f"{name}.").items():
                _add(found, inner, tensor)
        elif isinstance(value, torch.Tensor):
            common = common_name(name)
            if common is not None:
                _add(found, common, value)
    return found


def _add(found: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> None:
    if name in found:
        raise ConversionError(
            f"{name} is there twice, under the names of two versions of Megatron-LM or two models"
        )
    found[name] = tensor
