"""Tiny models of transformers, one per readable family and feature, and their folders."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.conversion.weights import Weights, parameter_shapes
from megalite.generation.continuation import Sampling
from megalite.models.gpt import GPTStage
from tests.generation.models import new_tokens
from tests.models.stages import build, named
from tests.models.test_families import FAMILIES, TOKENS, VOCAB, Family, all_float64, rope, their_model

LLAMA = FAMILIES["llama3"].theirs
_EXPERTS = {"num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
_EXPERTS |= {"experts_implementation": "eager", "rms_norm_eps": 1e-6, **rope(1e6)}
_GLM_MOE = {"num_key_value_heads": 2, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
_GLM_MOE |= {"moe_intermediate_size": 12, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "num_mtp_layers": 0}
_GLM_MOE |= {"experts_implementation": "eager", "first_k_dense_replace": 0, **rope(50.0, partial_rotary_factor=0.5)}
_DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
_DEEPSEEK |= {"n_routed_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 12, "n_shared_experts": 2}
_DEEPSEEK |= {"experts_implementation": "eager", "routed_scaling_factor": 1.5, "q_lora_rank": 9}
_MSCALES = {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 3.0}
_YARN = rope(50.0, "yarn", factor=4.0, original_max_position_embeddings=6, **_MSCALES)
_OLMO_YARN = rope(50.0, "yarn", factor=4.0, original_max_position_embeddings=6, beta_fast=3.0)["rope_parameters"]
_OLMO_LOCAL = rope(20.0)["rope_parameters"]
WINDOW_KINDS = ("full_attention", "sliding_attention")
_FULL, _MIXED = ["full_attention"] * 3, ["full_attention", "sliding_attention", "sliding_attention"]
_DOTS = {"num_key_value_heads": 2, "n_routed_experts": 8, "moe_intermediate_size": 12, "norm_topk_prob": True}
_DOTS |= {"n_shared_experts": 1, "routed_scaling_factor": 1.5, "sliding_window": 4, "experts_implementation": "eager"}
_DOTS |= rope(50.0)
_LINEAR, _SOFTMAX = "linear_attention", "full_attention"
_NEXT: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8, "layer_types": [_LINEAR, _SOFTMAX, _LINEAR]}
_NEXT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 8}
_NEXT |= {"linear_conv_kernel_dim": 3, **rope(50.0, partial_rotary_factor=0.5)}
_NEXT_EXPERTS = _NEXT | _EXPERTS | {"shared_expert_intermediate_size": 20, **rope(50.0, partial_rotary_factor=0.5)}
WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


def _case(name: str, changes: dict[str, Any]) -> Family:
    return Family("", {}, name, changes)


CASES = {name: family for name, family in FAMILIES.items() if name != "gemma"} | {
    "gpt2-untied": _case("GPT2", {**FAMILIES["gpt2"].theirs, "tie_word_embeddings": False, "n_inner": 24}),
    "llama-tied": _case("Llama", {**LLAMA, "tie_word_embeddings": True}),
    "llama-biases": _case("Llama", {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 6}),
    "llama-linear": _case("Llama", {**LLAMA, **rope(50.0, "linear", factor=3.0)}),
    "llama-geglu": _case("Llama", {**LLAMA, "hidden_act": "gelu_pytorch_tanh"}),
    "mistral-no-window": _case("Mistral", FAMILIES["mistral"].theirs | {"sliding_window": None, "head_dim": 6}),
    "qwen2-window": _case("Qwen2", FAMILIES["qwen2"].theirs | WINDOW | {"tie_word_embeddings": True}),
    "qwen2-moe": _case("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 20}),
    "qwen2-moe-sparse": _case("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 2}),
    "qwen3-moe": _case("Qwen3Moe", {**_EXPERTS, "head_dim": 6, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen3-moe-parts": _case("Qwen3Moe", {**_EXPERTS, "head_dim": 4, "tie_word_embeddings": True}),
    "phi3": _case("Phi3", {"num_key_value_heads": 2, **rope(50.0)}),
    "phi3-window": _case("Phi3", {"sliding_window": 4, **rope(50.0, partial_rotary_factor=0.5)}),
    "glm": _case("Glm", {"head_dim": 8, **rope(50.0, partial_rotary_factor=0.5)}),
    "glm-plain": _case("Glm", {"head_dim": 8, "attention_bias": False, **rope(50.0, partial_rotary_factor=1.0)}),
    "glm4": _case("Glm4", {"head_dim": 8, **rope(50.0, partial_rotary_factor=0.5)}),
    "glm4-moe": _case("Glm4Moe", {**_GLM_MOE, "use_qk_norm": True, "first_k_dense_replace": 1}),
    "glm4-moe-groups": _case(
        "Glm4Moe", {**_GLM_MOE, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "attention_bias": True}
    ),
    "deepseek-v2": _case("DeepseekV2", {**_DEEPSEEK, **_YARN, "first_k_dense_replace": 1}),
    "deepseek-v2-lite": _case("DeepseekV2", {**_DEEPSEEK, **rope(50.0), "q_lora_rank": None, "v_head_dim": 10}),
    "deepseek-v3": _case(
        "DeepseekV3",
        {**_DEEPSEEK, **_YARN, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0, "first_k_dense_replace": 2},
    ),
    "moonlight": _case(
        "DeepseekV3",
        {**_DEEPSEEK, **rope(50.0), "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "first_k_dense_replace": 0},
    ),
    "olmo3": _case(
        "Olmo3",
        {"num_key_value_heads": 2, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        | {"num_hidden_layers": 4, "rope_parameters": {"full_attention": _OLMO_YARN, "sliding_attention": _OLMO_LOCAL}},
    ),
    "olmo3-plain": _case(
        "Olmo3",
        {"sliding_window": 4, "rope_parameters": {kind: rope(50.0)["rope_parameters"] for kind in WINDOW_KINDS}},
    ),
    "smollm3-biases": _case(
        "SmolLM3",
        {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}
        | {"no_rope_layers": [0, 1, 1], **rope(50.0)},
    ),
    "seed-oss": _case("SeedOss", {"num_key_value_heads": 2, "head_dim": 6, **rope(50.0)}),
    "seed-oss-plain": _case(
        "SeedOss", {"num_key_value_heads": 4, "head_dim": 6, "attention_bias": False, **rope(50.0)}
    ),
    "ernie4.5": _case("Ernie4_5", {"num_key_value_heads": 2, "head_dim": 6, **rope(50.0)}),
    "arcee": _case("Arcee", {"num_key_value_heads": 2, **rope(50.0)}),
    "arcee-biases": _case("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 6, **rope(50.0)}),
    "ministral": _case(
        "Ministral", {"num_key_value_heads": 2, "head_dim": 6, "sliding_window": 4, "layer_types": _MIXED, **rope(50.0)}
    ),
    "exaone4": _case(
        "Exaone4",
        {"num_key_value_heads": 2, "sliding_window": 4, "layer_types": _MIXED}
        | rope(
            50.0, "llama3", original_max_position_embeddings=6, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0
        ),
    ),
    "exaone4-no-window": _case(
        "Exaone4", {"num_key_value_heads": 2, "sliding_window": None, "layer_types": _FULL, **rope(50.0)}
    ),
    "minimax-m2": _case(
        "MiniMaxM2",
        {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 4}
        | {"experts_implementation": "eager", **rope(50.0)},
    ),
    "dots1": _case(
        "Dots1",
        _DOTS | {"first_k_dense_replace": 1, "n_shared_experts": 2, "num_experts_per_tok": 4, "layer_types": _MIXED},
    ),
    "dots1-groups": _case(
        "Dots1", _DOTS | {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4, "max_window_layers": 1}
    ),
    "dots1-one-expert": _case(
        "Dots1", _DOTS | {"num_experts_per_tok": 1, "norm_topk_prob": False, "sliding_window": None}
    ),
    "glm4-moe-lite": _case(
        "Glm4MoeLite",
        {
            **_DEEPSEEK,
            **rope(50.0),
            "num_mtp_layers": 0,
            "rms_norm_eps": 1e-6,
            "mlp_layer_types": ["dense", "dense", "sparse"],
        },
    ),
    "qwen3-next": _case("Qwen3Next", {**_NEXT_EXPERTS, "mlp_only_layers": [0]}),
    "qwen3-next-parts": _case(
        "Qwen3Next",
        {
            **_NEXT_EXPERTS,
            "num_hidden_layers": 4,
            "layer_types": None,
            "num_experts_per_tok": 1,
            "norm_topk_prob": False,
        }
        | {"num_key_value_heads": 4, "linear_num_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen3.5": _case("Qwen3_5", _NEXT),
    "qwen3.5-moe": _case("Qwen3_5Moe", _NEXT_EXPERTS),
    "mixtral-window": _case("Mixtral", {**FAMILIES["mixtral"].theirs, "sliding_window": 4}),
}
"""Every case of `test_families` except Gemma, which cannot be converted, plus further features."""


@functools.cache
def stock_model(name: str) -> Any:
    """transformers' float64 model of a case."""
    return their_model(CASES[name])


def saved(name: str, folder: Path) -> Any:
    """Save the model of a case in a folder by its save_pretrained. Returns the model."""
    model = stock_model(name)
    model.save_pretrained(folder)
    return model


def their_logits(model: Any) -> torch.Tensor:
    """Logits [b, s, vocab_size] in float64."""
    with torch.no_grad(), all_float64():
        return model(TOKENS, use_cache=False).logits


def our_stage(weights: Weights) -> GPTStage:
    stage = build(weights.model)
    parameters = named(stage)
    assert sorted(parameters) == sorted(parameter_shapes(weights.model))
    with torch.no_grad():
        for name, parameter in parameters.items():
            values = weights.read(name)
            assert values.dtype == weights.dtype(name)
            assert values.shape == parameter.shape, name
            parameter.copy_(values)
    return stage.eval()


def our_logits(stage: GPTStage) -> torch.Tensor:
    """Logits [b, s, vocab_size] in float64."""
    with torch.no_grad():
        return stage(TOKENS, stage.context()).transpose(0, 1)[..., :VOCAB]


def our_text(stage: GPTStage, prompt: list[int], length: int) -> list[int]:
    return new_tokens(stage, prompt, Sampling(max_new_tokens=length, temperature=0.0))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.dtype == theirs.dtype == torch.float64
    return float((ours - theirs).abs().max() / theirs.abs().max())


def edit_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; `...` removes one."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not ...}))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def rename(folder: Path, change: Any) -> None:
    """Rewrite model.safetensors with `change` (tensors -> tensors) applied."""
    tensors = change(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def _packed(tensor: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """Random bytes and scales of a matrix [experts, columns, rows] in transformers' format, and the represented numbers."""
    experts, columns, rows = tensor.shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(118, 127, blocks.shape[:3], generator=generator).to(torch.uint8)
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = torch.tensor([*positive, *(-value for value in positive)])
    halves = numbers[(blocks % 16).long()], numbers[(blocks // 16).long()]
    values = torch.stack(halves, dim=-1).flatten(-2) * 2.0 ** (scales.float() - 127)[..., None]
    return blocks, scales, values.flatten(2).mT.bfloat16()


def saved_in_four_bits(folder: Path) -> dict[str, torch.Tensor]:
    """Save a gpt-oss with experts in MXFP4 in a folder. Returns its tensors, experts as the represented numbers."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "layer_types": None}
    family = CASES["gpt-oss"]
    their_model(dataclasses.replace(family, theirs=family.theirs | sizes)).save_pretrained(folder)
    generator = torch.Generator().manual_seed(4)
    stored, plain = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = plain[name] = tensor
        if name.endswith("_proj") and "experts" in name:
            stored[f"{name}_blocks"], stored[f"{name}_scales"], plain[name] = _packed(stored.pop(name), generator)
    rename(folder, lambda _: stored)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})
    return plain


class InMemory(Weights):
    """`Weights` from a dictionary by megalite's names, as an intermediate conversion gives."""

    format = "megalite"
    tokenizer_hints = DataConfig()
    generation: Mapping[str, Any] = {}

    def __init__(self, path: Path, model: ModelConfig, seq_length: int, tensors: dict[str, torch.Tensor]) -> None:
        self.path, self.model, self.seq_length, self.tensors = path, model, seq_length, tensors
        self.tokenizer_files: list[Path] = []

    @classmethod
    def copy(cls, weights: Weights) -> "InMemory":
        tensors = {name: weights.read(name) for name in parameter_shapes(weights.model)}
        return cls(weights.path, weights.model, weights.seq_length, tensors)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()
