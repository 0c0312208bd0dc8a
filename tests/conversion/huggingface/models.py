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
from tests.models.test_families import FAMILIES, LLAMA31, TOKENS, VOCAB, Family, all_float64, by_kind, rope, their_model
from tests.support.tiny import rows_of, words

_GLM_MOE = """num_key_value_heads=2 head_dim=8 n_routed_experts=8 num_experts_per_tok=2 moe_intermediate_size=12
    n_shared_experts=2 routed_scaling_factor=1.5 num_mtp_layers=0 experts_implementation=eager
    first_k_dense_replace=0"""
_DEEPSEEK = """num_key_value_heads=4 kv_lora_rank=10 qk_nope_head_dim=6 qk_rope_head_dim=4 v_head_dim=7
    n_routed_experts=8 num_experts_per_tok=4 moe_intermediate_size=12 n_shared_experts=2 experts_implementation=eager
    routed_scaling_factor=1.5 q_lora_rank=9"""
_DOTS = """num_key_value_heads=2 n_routed_experts=8 moe_intermediate_size=12 norm_topk_prob n_shared_experts=1
    routed_scaling_factor=1.5 sliding_window=4 experts_implementation=eager"""
_ERNIE = """num_key_value_heads=2 moe_num_experts=6 moe_k=3 moe_intermediate_size=12 experts_implementation=eager"""
_NEXT = """num_key_value_heads=2 head_dim=8 layer_types=["linear_attention","full_attention","linear_attention"]
    linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=6 linear_value_head_dim=8
    linear_conv_kernel_dim=3"""
_EXPERTS = """num_key_value_heads=2 num_experts=6 num_experts_per_tok=3 moe_intermediate_size=12
    experts_implementation=eager rms_norm_eps=1e-6"""
# Its least step, by which only transformers raises smaller ones, is out of reach.
_HYBRID = """mamba_num_heads=4 mamba_head_dim=6 n_groups=2 ssm_state_size=5 conv_kernel=3 chunk_size=4 time_step_min=1e-30
    num_key_value_heads=2 head_dim=6"""
_GRANITE = """num_key_value_heads=2 attention_multiplier=0.3 embedding_multiplier=7.0 residual_multiplier=0.6
    logits_scaling=3.0"""
_YARN = {"factor": 4.0, "original_max_position_embeddings": 6, "beta_fast": 3.0}
_HALF = rope(50.0, partial_rotary_factor=0.5)
_GROUPS: dict[str, dict[str, Any]] = {
    **{name.upper(): FAMILIES[name].theirs for name in ("gpt2", "llama3", "mistral", "qwen2", "mixtral")},
    "PAIRS": {"num_key_value_heads": 2},
    "BIASES": {"attention_bias": True, "mlp_bias": True},
    "EXPERTS": words(_EXPERTS) | rope(1e6),
    "GLM_MOE": words(_GLM_MOE) | _HALF,
    "DEEPSEEK": words(_DEEPSEEK),
    "INDEXER": words("index_n_heads=5 index_head_dim=6 index_topk=3"),
    "DOTS": words(_DOTS) | rope(50.0),
    "BAMBA": words("mamba_n_heads=4 mamba_n_groups=1 mamba_d_state=5 mamba_d_conv=3 mamba_chunk_size=4 mamba_expand=2"),
    "HYBRID": words(_HYBRID),
    "ERNIE": words(_ERNIE) | rope(50.0),
    "GRANITE": words(_GRANITE) | rope(50.0),
    "NEXT": words(_NEXT) | _HALF,
    "NEXT_EXPERTS": words(_NEXT) | words(_EXPERTS) | _HALF | {"shared_expert_intermediate_size": 20},
    "WINDOW": words("use_sliding_window sliding_window=4 max_window_layers=0"),
    "FULL": {"layer_types": ["full_attention"] * 3},
    "MIXED": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    "ROPE": rope(50.0),
    "HALF": _HALF,
    "WHOLE": rope(50.0, partial_rotary_factor=1.0),
    "LINEAR": rope(50.0, "linear", factor=3.0),
    "YARN": rope(50.0, "yarn", mscale=0.7, mscale_all_dim=0.9, **_YARN),
    "TEMPERATURE": rope(50.0, "yarn", mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.3, **_YARN),
    "LLAMA31": rope(50.0, "llama3", original_max_position_embeddings=6, **LLAMA31),
    "OLMO3": by_kind(rope(50.0, "yarn", **_YARN), rope(20.0)),
    "ALIKE": by_kind(rope(50.0), rope(50.0)),
}

_MORE = rows_of(
    """
gpt2-untied: kind=GPT2 GPT2 tie_word_embeddings=false n_inner=24
llama-tied: kind=Llama LLAMA3 tie_word_embeddings
llama-biases: kind=Llama LLAMA3 BIASES head_dim=6
llama-linear: kind=Llama LLAMA3 LINEAR
llama-geglu: kind=Llama LLAMA3 hidden_act=gelu_pytorch_tanh
mistral-no-window: kind=Mistral MISTRAL sliding_window=null head_dim=6
qwen2-window: kind=Qwen2 QWEN2 WINDOW tie_word_embeddings
qwen2-moe: kind=Qwen2Moe EXPERTS shared_expert_intermediate_size=20
qwen2-moe-sparse: kind=Qwen2Moe EXPERTS shared_expert_intermediate_size=8 decoder_sparse_step=2
qwen3-moe: kind=Qwen3Moe EXPERTS head_dim=6 norm_topk_prob mlp_only_layers=[0]
qwen3-moe-parts: kind=Qwen3Moe EXPERTS head_dim=4 tie_word_embeddings
phi3: kind=Phi3 PAIRS ROPE
phi3-window: kind=Phi3 sliding_window=4 HALF
glm: kind=Glm head_dim=8 HALF
glm-plain: kind=Glm head_dim=8 attention_bias=false WHOLE
glm4: kind=Glm4 head_dim=8 HALF
glm4-moe: kind=Glm4Moe GLM_MOE use_qk_norm first_k_dense_replace=1
glm4-moe-groups: kind=Glm4Moe GLM_MOE num_experts_per_tok=4 n_group=4 topk_group=2 attention_bias
deepseek-v2: kind=DeepseekV2 DEEPSEEK YARN first_k_dense_replace=1
deepseek-v2-lite: kind=DeepseekV2 DEEPSEEK ROPE q_lora_rank=null v_head_dim=10
deepseek-v3: kind=DeepseekV3 DEEPSEEK YARN n_group=4 topk_group=2 num_mtp_layers=0 first_k_dense_replace=2
moonlight: kind=DeepseekV3 DEEPSEEK ROPE n_group=1 topk_group=1 num_mtp_layers=0 first_k_dense_replace=0
olmo3: kind=Olmo3 PAIRS sliding_window=4 num_hidden_layers=4 OLMO3
  layer_types=["sliding_attention","full_attention","sliding_attention","full_attention"]
olmo3-plain: kind=Olmo3 sliding_window=4 ALIKE
smollm3-biases: kind=SmolLM3 PAIRS BIASES tie_word_embeddings=false no_rope_layers=[0,1,1] ROPE
seed-oss: kind=SeedOss PAIRS head_dim=6 ROPE
seed-oss-plain: kind=SeedOss num_key_value_heads=4 head_dim=6 attention_bias=false ROPE
ernie4.5: kind=Ernie4_5 PAIRS head_dim=6 ROPE
ernie4.5-moe: kind=Ernie4_5_Moe ERNIE
ernie4.5-moe-no-dense: kind=Ernie4_5_Moe ERNIE moe_layer_start_index=0 moe_num_shared_experts=1
  tie_word_embeddings=false
arcee: kind=Arcee PAIRS ROPE
arcee-biases: kind=Arcee BIASES head_dim=6 ROPE
ministral: kind=Ministral PAIRS head_dim=6 sliding_window=4 MIXED ROPE
exaone4: kind=Exaone4 PAIRS sliding_window=4 MIXED LLAMA31
exaone4-no-window: kind=Exaone4 PAIRS sliding_window=null FULL ROPE
minimax-m2: kind=MiniMaxM2 PAIRS head_dim=8 num_local_experts=6 num_experts_per_tok=3 rotary_dim=4
  experts_implementation=eager ROPE
dots1: kind=Dots1 DOTS first_k_dense_replace=1 n_shared_experts=2 num_experts_per_tok=4 MIXED
dots1-groups: kind=Dots1 DOTS n_group=4 topk_group=2 num_experts_per_tok=4 max_window_layers=1
dots1-one-expert: kind=Dots1 DOTS num_experts_per_tok=1 norm_topk_prob=false sliding_window=null
deepseek-v3.2: kind=DeepseekV32 DEEPSEEK YARN INDEXER n_group=4 topk_group=2 num_mtp_layers=0 first_k_dense_replace=2
glm5: kind=GlmMoeDsa DEEPSEEK ROPE INDEXER num_mtp_layers=0 rms_norm_eps=1e-6 index_topk=5 first_k_dense_replace=2
  mlp_layer_types=["dense","dense","sparse"]
glm4-moe-lite: kind=Glm4MoeLite DEEPSEEK ROPE num_mtp_layers=0 rms_norm_eps=1e-6
  mlp_layer_types=["dense","dense","sparse"]
qwen3-next: kind=Qwen3Next NEXT_EXPERTS mlp_only_layers=[0]
qwen3-next-parts: kind=Qwen3Next NEXT_EXPERTS num_hidden_layers=4 layer_types=null num_experts_per_tok=1
  norm_topk_prob=false num_key_value_heads=4 linear_num_value_heads=2 tie_word_embeddings
qwen3.5: kind=Qwen3_5 NEXT
qwen3.5-moe: kind=Qwen3_5Moe NEXT_EXPERTS
bamba: kind=Bamba num_key_value_heads=2 attn_layer_indices=[1] BAMBA HALF
bamba-biases: kind=Bamba num_key_value_heads=4 attn_layer_indices=[0,2] BIASES BAMBA mamba_n_groups=2 HALF
nemotron-h: kind=NemotronH HYBRID
  layers_block_type=["linear_attention","mlp","linear_attention","full_attention","mlp","linear_attention"]
nemotron-3: kind=NemotronH HYBRID layers_block_type=["linear_attention","moe","linear_attention","full_attention","moe"]
  n_routed_experts=6 num_experts_per_tok=3 moe_intermediate_size=12 moe_shared_expert_intermediate_size=20
  routed_scaling_factor=1.5 experts_implementation=eager
granite-biases: kind=Granite GRANITE BIASES head_dim=6
granite-moe: kind=GraniteMoe GRANITE num_local_experts=6 num_experts_per_tok=3 experts_implementation=eager
granite-moe-shared: kind=GraniteMoeShared GRANITE num_local_experts=6 shared_intermediate_size=12 tie_word_embeddings
  experts_implementation=eager
granite-hybrid: kind=GraniteMoeHybrid GRANITE num_local_experts=0 shared_intermediate_size=20 mamba_n_heads=1
  position_embedding_type=rope layer_types=["attention","attention","attention"]
granite-hybrid-mamba: kind=GraniteMoeHybrid GRANITE BAMBA position_embedding_type=nope rope_parameters=null
  num_local_experts=0 shared_intermediate_size=20
  layer_types=["linear_attention","full_attention","linear_attention"]
granite-hybrid-experts: kind=GraniteMoeHybrid GRANITE BAMBA position_embedding_type=rope
  num_local_experts=6 shared_intermediate_size=12 num_experts_per_tok=3 experts_implementation=eager
  layer_types=["linear_attention","linear_attention","full_attention"]
ministral3: kind=Ministral3 PAIRS head_dim=6 TEMPERATURE
ministral3-window: kind=Ministral3 PAIRS head_dim=6 sliding_window=4 tie_word_embeddings TEMPERATURE
mistral4: kind=Mistral4 DEEPSEEK TEMPERATURE num_experts_per_tok=3 routed_scaling_factor=1.0 first_k_dense_replace=1
olmoe: kind=Olmoe PAIRS num_experts=6 num_experts_per_tok=3 experts_implementation=eager ROPE
olmoe-normalised: kind=Olmoe num_experts=6 num_experts_per_tok=3 norm_topk_prob experts_implementation=eager ROPE
solar-open: kind=SolarOpen GLM_MOE attention_bias ROPE
solar-open-groups: kind=SolarOpen GLM_MOE num_experts_per_tok=4 n_group=4 topk_group=2 tie_word_embeddings ROPE
exaone-moe: kind=ExaoneMoe EXPERTS num_shared_experts=2 routed_scaling_factor=1.5 sliding_window=4 MIXED
exaone-moe-dense: kind=ExaoneMoe EXPERTS head_dim=6 first_k_dense_replace=2 sliding_window=4
mixtral-window: kind=Mixtral MIXTRAL sliding_window=4
""",
    _GROUPS,
)
CASES = {name: family for name, family in FAMILIES.items() if name != "gemma"} | {
    name: Family("", {}, theirs.pop("kind"), theirs) for name, theirs in _MORE.items()
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
