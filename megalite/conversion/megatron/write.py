"""Write Megatron-LM's `torch` format: a file for each tensor- and pipeline-parallel rank with its slices."""

import argparse
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.folders import TRACKER_NAME
from megalite.config.model import LATENT_SIZES, LAYER_LISTS, MULTIPLIERS, ModelConfig
from megalite.conversion.megatron.layout import Shard, Stage, fused_name, stage_pieces
from megalite.conversion.megatron.read import MODEL_FILES, RELEASE, rank_folder
from megalite.conversion.megatron.torch_file import Reserve, TorchFileWriter
from megalite.conversion.model_folder import MERGES, MODEL_SENTENCEPIECE, VOCAB, has_tokenizer, named_tokenizer_files
from megalite.conversion.output import Advance, Log, Output, identity_of, silent
from megalite.conversion.weights import TRANSFORMER_IMPLEMENTATIONS, ConversionError, LastRead, WeightPiece, Weights
from megalite.tokenizers.base import TOKENIZER_NAME, read_tokenizer_file
from megalite.tokenizers.build import detect_kind

_LLAMA3 = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_positions": 8192}
"""Constants of megatron.core's llama3 scaling."""
_YARN = {
    "rope_original_max_positions": 4096,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_truncate": True,
    "rope_attention_factor": None,
}
"""Values that megatron.core's YaRN of multi-latent attention has built in, or has no argument for."""
_GROWTH = ("rope_mscale", "rope_mscale_all_dim", "rope_attention_factor")


def require_expressible(model: ModelConfig, *, tp: int, pp: int) -> None:
    """Raise for a model that Megatron-LM does not support, or cannot split by tp and pp."""
    wrong = list(_inexpressible(model))
    if wrong:
        raise ConversionError(f"cannot be written for Megatron-LM: it has {'; '.join(wrong)}; use --to huggingface")
    for name, value, size in (
        ("num_attention_heads", model.num_attention_heads, tp),
        # Rows of qkv are split evenly, so ranks may share a key/value head.
        ("the rows of qkv", (model.num_attention_heads + 2 * model.query_groups) * model.head_size, tp),
        ("ffn_hidden_size", model.ffn_size, tp),
        ("moe_ffn_hidden_size", model.expert_ffn_size if model.num_experts else tp, tp),
        ("moe_shared_expert_intermediate_size", model.moe_shared_expert_intermediate_size or tp, tp),
        ("num_layers", model.num_layers, pp),
    ):
        if size < 1 or value % size:
            parallel = "tp" if name != "num_layers" else "pp"
            fitting = [n for n in range(1, value + 1) if value % n == 0]
            raise ConversionError(f"{parallel} {size} does not divide {name} {value}; use one of {fitting[:12]}")


def _inexpressible(model: ModelConfig) -> Iterator[str]:
    """Yield the settings that Megatron-LM does not support, with the supported values."""
    if model.block != "gpt":
        yield f"block {model.block}"
    if model.activation in ("geglu", "geglu_tanh"):
        yield f"activation {model.activation} (supported: gelu, gelu_tanh with biases, squared_relu, swiglu, quick_geglu)"
    if model.activation == "gelu_tanh" and not model.add_bias_linear:
        yield "activation gelu_tanh without add_bias_linear (it is part of the fused bias)"
    for name in (
        "scale_embeddings",
        "post_norms",
        "qk_norm_all_heads",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_mup",
        "attention_output_gate",
        "linear_attention_freq",
        "no_mlp_freq",
        "attn_temperature_beta",
    ):
        if getattr(model, name):
            yield name
    if model.is_sparse:
        yield "experimental_attention_variant dsa"
    if not model.pre_norms:
        yield "pre_norms false"
    if model.activation != "quick_geglu" and (model.activation_func_clamp_value is not None or model.glu_linear_offset):
        yield f"activation_func_clamp_value or glu_linear_offset with activation {model.activation} (only with quick_geglu)"
    for name, default in {"softmax_scale": None, "rotary_base_local": None, **dict.fromkeys(MULTIPLIERS, 1.0)}.items():
        if getattr(model, name) != default:
            yield f"{name} {getattr(model, name):g}"
    if model.num_experts is not None and model.add_bias_linear != model.moe_add_bias_linear:
        yield "add_bias_linear without moe_add_bias_linear, or vice versa (its experts have biases if all layers have)"
    if model.moe_router_enable_expert_bias and model.moe_router_score_function == "softmax":
        yield "moe_router_enable_expert_bias with moe_router_score_function softmax (supported: sigmoid)"
    if model.moe_add_bias_linear and model.moe_shared_expert_intermediate_size:
        yield "moe_shared_expert_intermediate_size with moe_add_bias_linear"
    if model.position_embedding_type == "rope":
        yield from _inexpressible_positions(model)


def _inexpressible_positions(model: ModelConfig) -> Iterator[str]:
    if model.rotary_base != int(model.rotary_base):
        yield f"rotary_base {model.rotary_base} (a whole number)"
    if model.rope_scaling == "linear" and model.rope_scaling_factor != int(model.rope_scaling_factor):
        yield f"rope_scaling_factor {model.rope_scaling_factor} (linear: a whole number)"
    if model.rope_scaling == "dynamic":
        yield "rope_scaling dynamic"
    elif model.rope_scaling == "yarn":
        # Normal attention has arguments for the first four.
        built_in = _YARN if model.multi_latent_attention else dict.fromkeys(_GROWTH)
        for name, value in built_in.items():
            if getattr(model, name) != value:
                yield f"{name} {getattr(model, name)} (built in: {value})"
    elif model.multi_latent_attention and model.rope_scaling != "none":
        yield f"rope_scaling {model.rope_scaling} with multi_latent_attention (supported: yarn)"
    if model.rope_scaling == "llama3":
        for name, value in _LLAMA3.items():
            if getattr(model, name) != value:
                yield f"{name} {getattr(model, name)} (built in: {value})"


def vocabulary_of(model: ModelConfig, tp: int) -> tuple[int, int]:
    """Return (multiple, padded size). Megatron-LM pads to a multiple of `multiple · tp`. A model that was imported from
    `tp` ranks gets its original number of rows."""
    multiple = model.make_vocab_size_divisible_by
    if multiple % (128 * tp) == 0:
        multiple //= tp
    assert model.vocab_size is not None
    return multiple, -(-model.vocab_size // (multiple * tp)) * multiple * tp


def _layers(layers: list[int] | None) -> int | list[int] | None:
    """Return Megatron-LM's form of the settings `LAYER_LISTS`."""
    return layers[0] if layers is not None and len(layers) == 1 else layers


_SAME = (
    *("num_layers", "hidden_size", "num_attention_heads", "vocab_size", "position_embedding_type", "normalization"),
    *("norm_epsilon", "add_bias_linear", "add_qkv_bias", "hidden_dropout", "attention_dropout", "init_method_std"),
    *("softmax_type", "activation_func_clamp_value", "glu_linear_offset"),
)
_SAME_EXPERTS = (
    *("num_experts", "moe_router_topk", "moe_router_pre_softmax", "moe_shared_expert_intermediate_size"),
    *("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_bias_update_rate"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_shared_expert_gate"),
    *("moe_aux_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy"),
    "moe_pad_expert_input_to_capacity",
)
"""Settings with the same name and meaning in Megatron-LM."""


def megatron_args(weights: Weights, *, dtype: torch.dtype, tp: int, pp: int) -> argparse.Namespace:
    """Return the args of the checkpoint: all arguments of the model, which include those that Megatron-LM reads with
    `--use-checkpoint-args` or compares while loading."""
    model = weights.model
    multiple, padded = vocabulary_of(model, tp)
    length = model.max_position_embeddings or weights.seq_length
    scaling = model.rope_scaling if model.position_embedding_type == "rope" else "none"
    window = model.sliding_window
    values: dict[str, Any] = {
        **{name: getattr(model, name) for name in _SAME},
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "group_query_attention": model.query_groups != model.num_attention_heads,
        "num_query_groups": model.query_groups,
        "seq_length": weights.seq_length,
        "encoder_seq_length": weights.seq_length,
        "max_position_embeddings": max(length, weights.seq_length),
        "add_position_embedding": True,
        "use_rotary_position_embeddings": model.position_embedding_type == "rope",
        "rotary_base": int(model.rotary_base),
        "rotary_percent": model.rotary_percent,
        "rotary_interleaved": model.rotary_interleaved,
        "rotary_seq_len_interpolation_factor": int(model.rope_scaling_factor) if scaling == "linear" else None,
        "use_rope_scaling": scaling == "llama3",
        "rope_scaling_factor": model.rope_scaling_factor if scaling == "llama3" else 8.0,
        "window_size": None if window is None else (window - 1, 0),
        **{name: _layers(getattr(model, name)) for name in LAYER_LISTS},
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": model.norm_zero_centered,
        "qk_layernorm": model.qk_norm,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "squared_relu",
        "quick_geglu": model.activation == "quick_geglu",
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "apply_query_key_layer_scaling": False,
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
        **_latent_args(model),
        **_yarn_args(model),
        **_expert_args(model),
    }
    return argparse.Namespace(**values)


def _latent_args(model: ModelConfig) -> dict[str, Any]:
    if not model.multi_latent_attention:
        return {}
    yarn = model.rope_scaling == "yarn"
    return {
        "multi_latent_attention": True,
        **{name: getattr(model, name) for name in LATENT_SIZES},
        "rope_type": "yarn" if yarn else "rope",
        "rotary_scaling_factor": model.rope_scaling_factor if yarn else 1.0,
        "mscale": model.rope_mscale or 1.0,
        "mscale_all_dim": model.rope_mscale_all_dim or 0.0,
    }


def _yarn_args(model: ModelConfig) -> dict[str, Any]:
    """Return YaRN's arguments of normal attention. Multi-latent attention has other arguments."""
    if model.position_embedding_type != "rope" or model.rope_scaling != "yarn" or model.multi_latent_attention:
        return {}
    return {
        "position_embedding_type": "yarn",
        "use_rotary_position_embeddings": False,
        "rotary_scaling_factor": model.rope_scaling_factor,
        "mscale": 1.0,
        "mscale_all_dim": 0.0,
        "yarn_original_max_position_embeddings": model.rope_original_max_positions,
        "yarn_beta_fast": model.rope_beta_fast,
        "yarn_beta_slow": model.rope_beta_slow,
        "yarn_correction_range_round_to_int": model.rope_truncate,
    }


def _tokenizer_type(files: Sequence[Path]) -> str | None:
    """Return Megatron-LM's name of the source's kind of tokenizer, or None. The tokenizer's files are not written."""
    named = named_tokenizer_files(files) if has_tokenizer(files) else {}
    if TOKENIZER_NAME in named:
        return "HuggingFaceTokenizer"
    if MODEL_SENTENCEPIECE in named:  # also the standard name of tiktoken files
        path = named[MODEL_SENTENCEPIECE]
        return detect_kind(read_tokenizer_file(path), path)
    return "GPT2BPETokenizer" if {VOCAB, MERGES} <= named.keys() else None


def _expert_args(model: ModelConfig) -> dict[str, Any]:
    if model.num_experts is None:
        return {"num_experts": None}
    scaling = model.moe_router_topk_scaling_factor
    return {
        **{name: getattr(model, name) for name in _SAME_EXPERTS},
        "moe_layer_freq": [int(model.is_moe_layer(index)) for index in range(model.num_layers)],
        "moe_ffn_hidden_size": model.expert_ffn_size,
        "moe_router_topk_scaling_factor": None if scaling == 1.0 else scaling,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "seq_aux_loss" if model.moe_aux_loss_coeff else "none",
        "moe_z_loss_coeff": model.moe_z_loss_coeff or None,
    }


def write_megatron(
    weights: Weights,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    tp: int = 1,
    pp: int = 1,
    advance: Advance = silent,
    implementation: str = "transformer_engine",
    log: Log = silent,
) -> Path:
    """Write a model for Megatron-LM on tp x pp ranks: `release/mp_rank_*/model_optim_rng.pt` and the tracker file.

    Megatron-LM loads a release without optimizer and random states. Each of our tensors is read once and split into the
    files of its pipeline stage, which are written together. An interrupted conversion continues with the first unfinished
    stage.

    tp must divide heads, rows of qkv and MLP widths; pp must divide the layers."""
    if implementation not in TRANSFORMER_IMPLEMENTATIONS:
        raise ConversionError(f"--transformer-impl {implementation!r}; use {', '.join(TRANSFORMER_IMPLEMENTATIONS)}")
    require_expressible(weights.model, tp=tp, pp=pp)
    if weights.model.multi_latent_attention and implementation == "local" and tp > 1:
        raise ConversionError(
            f"--transformer-impl local splits the down-projections to latents over tp {tp}, transformer_engine does not; "
            "use --transformer-impl transformer_engine, or --tp 1"
        )
    if weights.model.mtp_num_layers:
        log(f"layers for multi-token prediction are left out: {weights.model.mtp_num_layers}")
    identity = identity_of(weights, to="megatron", dtype=dtype, tp=tp, pp=pp, implementation=implementation)
    export = _Export(weights, dtype, tp, pp, implementation)
    planned = [name for stage in range(pp) for name in export.files(stage)]
    output = Output(folder, identity=identity, files=planned, log=log)
    for stage in range(pp):
        facts = [output.finished(name) for name in export.files(stage)]
        if all(fact is not None for fact in facts):
            advance(sum(fact["bytes"] for fact in facts if fact is not None))
        else:
            export.write_stage(stage, output, advance)
    output.write(TRACKER_NAME, RELEASE.encode())
    return output.commit()


def written_bytes(weights: Weights, *, dtype: torch.dtype | None, tp: int, pp: int) -> int:
    """Return the bytes of tensors that `write_megatron` writes, the sum of its calls of `advance`."""
    require_expressible(weights.model, tp=tp, pp=pp)
    export = _Export(weights, dtype, tp, pp, "local")
    return sum(export.bytes_of(stage, rank) for stage in range(pp) for rank in range(tp))


@dataclass(frozen=True)
class _Export:
    weights: Weights
    dtype: torch.dtype | None
    tp: int
    pp: int
    implementation: str

    def files(self, stage: int) -> list[str]:
        return [f"{RELEASE}/{rank_folder(rank, stage, pp=self.pp)}/{MODEL_FILES[0]}" for rank in range(self.tp)]

    def pieces(self, stage: int, rank: int) -> list[WeightPiece]:
        vocabulary = vocabulary_of(self.weights.model, self.tp)[1]
        return list(stage_pieces(self.weights.model, self._stage(stage), Shard(self.tp, rank), vocabulary=vocabulary))

    def bytes_of(self, stage: int, rank: int) -> int:
        pieces = self.pieces(stage, rank)
        return sum(math.prod(piece.shape) * self._type(piece).itemsize for piece in pieces)

    def write_stage(self, stage: int, output: Output, advance: Advance) -> None:
        names = self.files(stage)
        ranks = [self.pieces(stage, rank) for rank in range(self.tp)]
        with contextlib.ExitStack() as files:
            writers = []
            for name, pieces in zip(names, ranks, strict=True):
                path = output.staging / name
                path.parent.mkdir(parents=True, exist_ok=True)
                writers.append(files.enter_context(contextlib.closing(self._writer(path, stage, pieces))))
            weights = LastRead(self.weights)
            for slices in zip(*ranks, strict=True):
                for writer, piece in zip(writers, slices, strict=True):
                    writer.fill(weights, piece, advance)
            for writer in writers:
                writer.finish()
        for rank, name in enumerate(names):
            output.mark(name, {"bytes": self.bytes_of(stage, rank)})

    def _writer(self, path: Path, stage: int, pieces: list[WeightPiece]) -> TorchFileWriter:
        arguments = megatron_args(self.weights, dtype=self._type(pieces[0]), tp=self.tp, pp=self.pp)

        def content(reserve: Reserve) -> Mapping[str, Any]:
            tensors = {self._name(piece, stage): reserve(piece.shape, self._type(piece)) for piece in pieces}
            return {"args": arguments, "checkpoint_version": 3.0, "iteration": 0, "model": tensors}

        return TorchFileWriter(path, content)

    def _stage(self, index: int) -> Stage:
        count = self.weights.model.num_layers // self.pp
        first = index * count
        return Stage(first, first + count, has_embedding=index == 0, has_head=index == self.pp - 1)

    def _type(self, piece: WeightPiece) -> torch.dtype:
        return self.dtype or self.weights.dtype(piece.parameter)

    def _name(self, piece: WeightPiece, stage: int) -> str:
        """Return the tensor's name in the layers of `implementation`."""
        if self.implementation == "local":
            return piece.name
        parts = piece.name.split(".")
        in_layer = parts[1] == "layers"
        layer = self._stage(stage).first + int(parts[2]) if in_layer else 0
        model = self.weights.model
        has_experts = in_layer and model.is_moe_layer(layer)
        return fused_name(piece.name, has_experts=has_experts, latent=model.multi_latent_attention)
