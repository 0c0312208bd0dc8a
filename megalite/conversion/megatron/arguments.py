"""A model's settings as Megatron-LM's `args`, written."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.tokenizer_files import (
    MERGES,
    MODEL_JSON,
    MODEL_SENTENCEPIECE,
    VOCAB,
    has_tokenizer,
    named_tokenizer_files,
)
from megalite.conversion.weights import ConversionError, Weights
from megalite.data.tokenizers.base import read_tokenizer_file
from megalite.data.tokenizers.kind import tell_kind

_LLAMA3 = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_positions": 8192}
"""What megatron.core's llama3 scaling has built in."""


def require_expressible(model: ModelConfig, *, tp: int, pp: int) -> None:
    """Refuse a model that Megatron-LM does not have, or cannot split that way.

    Raises:
        ConversionError: names the fields and what would do.
    """
    wrong = list(_inexpressible(model))
    if wrong:
        raise ConversionError(f"Megatron-LM has no such model: {'; '.join(wrong)}")
    for name, value, size in (
        ("num_attention_heads", model.num_attention_heads, tp),
        ("num_query_groups", model.query_groups, tp),
        ("ffn_hidden_size", model.ffn_size, tp),
        ("moe_ffn_hidden_size", model.expert_ffn_size if model.num_experts else tp, tp),
        ("moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size or tp, tp),
        ("num_layers", model.num_layers, pp),
    ):
        if size < 1 or value % size:
            parallel = "tp" if name != "num_layers" else "pp"
            fitting = [n for n in range(1, value + 1) if value % n == 0]
            raise ConversionError(
                f"{parallel} {size} does not divide {name} {value}; take one of {', '.join(map(str, fitting[:12]))}"
            )


def _inexpressible(model: ModelConfig) -> Iterator[str]:
    if model.activation in ("geglu", "geglu_tanh"):
        yield f"activation {model.activation} (it has gelu, gelu_tanh with biases, swiglu)"
    if model.activation == "gelu_tanh" and not model.add_bias_linear:
        yield "activation gelu_tanh without add_bias_linear (it is part of the fused bias)"
    if model.scale_embeddings:
        yield "scale_embeddings"
    if model.num_experts is not None and model.add_bias_linear:
        yield "num_experts with add_bias_linear (its experts would have biases)"
    if model.position_embedding_type == "rope":
        yield from _inexpressible_positions(model)


def _inexpressible_positions(model: ModelConfig) -> Iterator[str]:
    if model.rotary_base != int(model.rotary_base):
        yield f"rotary_base {model.rotary_base} (a whole number)"
    if model.rope_scaling == "linear" and model.rope_scaling_factor != int(model.rope_scaling_factor):
        yield f"rope_scaling_factor {model.rope_scaling_factor} (linear: a whole number)"
    if model.rope_scaling == "llama3":
        for name, value in _LLAMA3.items():
            if getattr(model, name) != value:
                yield f"{name} {getattr(model, name)} (built in: {value})"


def vocabulary_of(model: ModelConfig, tp: int) -> tuple[int, int]:
    """(multiple, padded size): Megatron-LM pads to `multiple · tp`.

    A model that was imported from `tp` ranks comes out with the rows it had.
    """
    multiple = model.make_vocab_size_divisible_by
    if multiple % (128 * tp) == 0:
        multiple //= tp
    assert model.vocab_size is not None
    return multiple, -(-model.vocab_size // (multiple * tp)) * multiple * tp


def megatron_args(weights: Weights, *, dtype: torch.dtype, tp: int, pp: int) -> argparse.Namespace:
    """What `--use-checkpoint-args` takes over, what loading compares, and the rest of the network's arguments."""
    model = weights.model
    multiple, padded = vocabulary_of(model, tp)
    length = model.max_position_embeddings or weights.seq_length
    scaling = model.rope_scaling if model.position_embedding_type == "rope" else "none"
    window = model.sliding_window
    values: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "kv_channels": model.head_size,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "seq_length": weights.seq_length,
        "encoder_seq_length": weights.seq_length,
        "max_position_embeddings": max(length, weights.seq_length),
        "position_embedding_type": model.position_embedding_type,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "rotary_base": int(model.rotary_base),
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": int(model.rope_scaling_factor)
        if scaling == "linear"
        else None,
        "use_rope_scaling": scaling == "llama3",
        "rope_scaling_factor": model.rope_scaling_factor if scaling == "llama3" else 8.0,
        "window_size": None if window is None else (window - 1, 0),
        "normalization": model.normalization,
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.norm_zero_centered,
        "qk_layernorm": model.qk_norm,
        "swiglu": model.activation == "swiglu",
        "squared_relu": False,
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_method_std,
        "apply_query_key_layer_scaling": False,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded,
        "make_vocab_size_divisible_by": multiple,
        "tokenizer_type": _tokenizer_type(weights.tokenizer_files),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": tp,
        "context_parallel_size": 1,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "ckpt_format": "torch",
        "iteration": 0,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        **_expert_args(model),
    }
    return argparse.Namespace(**values)


def _tokenizer_type(files: Sequence[Path]) -> str | None:
    """The kind that the source's files are of, under Megatron-LM's name for it; None of none.

    Its files do not go along.
    """
    named = named_tokenizer_files(files) if has_tokenizer(files) else {}
    if MODEL_JSON in named:
        return "HuggingFaceTokenizer"
    if MODEL_SENTENCEPIECE in named:  # or so it is called
        path = named[MODEL_SENTENCEPIECE]
        return tell_kind(read_tokenizer_file(path), path)
    return "GPT2BPETokenizer" if {VOCAB, MERGES} <= named.keys() else None


def _expert_args(model: ModelConfig) -> dict[str, Any]:
    if model.num_experts is None:
        return {"num_experts": None}
    return {
        "num_experts": model.num_experts,
        "moe_layer_freq": [int(model.is_moe_layer(index)) for index in range(model.num_layers)],
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_router_pre_softmax": model.moe_router_pre_softmax,
        "moe_router_score_function": "softmax",
        "moe_router_enable_expert_bias": False,
        "moe_router_topk_scaling_factor": (
            None if model.moe_router_topk_scaling_factor == 1.0 else model.moe_router_topk_scaling_factor
        ),
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "seq_aux_loss" if model.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
        "moe_expert_capacity_factor": model.moe_expert_capacity_factor,
        "moe_token_drop_policy": model.moe_token_drop_policy,
    }
