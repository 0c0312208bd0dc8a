"""Files as Megatron-LM saves them, built rank by rank from whole weights, without code of the package's writer."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalite.config.model import ModelConfig
from megalite.conversion.weights import Weights, parameter_shapes
from tests.conversion.samples import MadeUp

Tensors = dict[str, torch.Tensor]


def arguments(weights: MadeUp, tp: int, pp: int, **changes: Any) -> Namespace:
    model = weights.model
    same = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "position_embedding_type")
    same += ("normalization", "norm_epsilon", "add_bias_linear", "add_qkv_bias", "vocab_size")
    same += ("softmax_type", "activation_func_clamp_value", "glu_linear_offset")
    args = Namespace(
        **{name: getattr(model, name) for name in same},
        ffn_hidden_size=model.ffn_size,
        group_query_attention=model.query_groups != model.num_attention_heads,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        seq_length=weights.seq_length,
        rotary_base=int(model.rotary_base),
        swiglu=model.activation == "swiglu",
        quick_geglu=model.activation == "quick_geglu",
        bias_gelu_fusion=model.activation == "gelu_tanh",
        qk_layernorm=model.qk_norm,
        untie_embeddings_and_output_weights=not model.tie_embeddings,
        padded_vocab_size=padded(model, tp),
        make_vocab_size_divisible_by=8,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=1,
        params_dtype=torch.float32,
    )
    if model.rope_scaling == "yarn":
        args.position_embedding_type = "yarn"
        args.rotary_scaling_factor = model.rope_scaling_factor
        args.yarn_original_max_position_embeddings = model.rope_original_max_positions
        args.yarn_correction_range_round_to_int = model.rope_truncate
    if model.num_experts:
        args.num_experts = model.num_experts
        args.moe_layer_freq = [int(model.is_moe_layer(i)) for i in range(model.num_layers)]
        args.moe_ffn_hidden_size = model.expert_ffn_size
        args.moe_router_topk = model.moe_router_topk
        args.moe_shared_expert_intermediate_size = model.moe_shared_expert_intermediate_size
        for name in ("score_function", "enable_expert_bias", "num_groups", "group_topk", "topk_scaling_factor"):
            setattr(args, f"moe_router_{name}", getattr(model, f"moe_router_{name}"))
        args.moe_shared_expert_gate = model.moe_shared_expert_gate
    vars(args).update(changes)
    return args


def padded(model: ModelConfig, tp: int) -> int:
    assert model.vocab_size is not None
    return -(-model.vocab_size // (8 * tp)) * 8 * tp


def rows(weights: MadeUp, name: str, tp: int, rank: int) -> torch.Tensor:
    ours = weights.read(name)
    total = padded(weights.model, tp)
    whole = torch.zeros(total, ours.shape[1], dtype=ours.dtype)
    whole[: weights.model.vocab_size] = ours[: weights.model.vocab_size]
    return whole.chunk(tp)[rank].clone()


def layer(weights: MadeUp, index: int, number: int, tp: int, rank: int) -> Tensors:
    model, there, made = weights.model, f"decoder.layers.{number}", {}

    def read(name: str) -> torch.Tensor:
        return weights.read(f"layers.{index}.{name}")

    kinds = ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)
    for kind in kinds:
        made[f"{there}.input_layernorm.{kind}"] = read(f"attention_norm.{kind}")
        made[f"{there}.pre_mlp_layernorm.{kind}"] = read(f"mlp_norm.{kind}")
        if model.qk_norm and not model.multi_latent_attention:
            for letter in "qk":
                name = f"{there}.self_attention.{letter}_layernorm.{kind}"
                made[name] = read(f"attention.{letter}_norm.{kind}")
    if model.multi_latent_attention:
        made |= latent_attention(read, f"{there}.self_attention", tp, rank)
    else:
        made[f"{there}.self_attention.linear_qkv.weight"] = read("attention.qkv.weight").chunk(tp)[rank]
    if model.add_bias_linear or model.add_qkv_bias:
        made[f"{there}.self_attention.linear_qkv.bias"] = read("attention.qkv.bias").chunk(tp)[rank]
    made[f"{there}.self_attention.linear_proj.weight"] = read("attention.out.weight").chunk(tp, 1)[rank]
    if model.add_bias_linear:
        made[f"{there}.self_attention.linear_proj.bias"] = read("attention.out.bias")
    if model.softmax_type == "learnable":
        made[f"{there}.self_attention.core_attention.softmax_offset"] = read("attention.sinks").chunk(tp)[rank]
    if model.is_moe_layer(index):
        made[f"{there}.mlp.router.weight"] = read("moe.router.weight")
        ups, downs = read("moe.experts.up.weight"), read("moe.experts.down.weight")
        if model.moe_add_bias_linear:
            made[f"{there}.mlp.router.bias"] = read("moe.router.linear_bias")
            for expert in range(model.num_experts or 0):
                name = f"{there}.mlp.experts.local_experts.{expert}"
                made[f"{name}.linear_fc1.bias"] = gate_and_up(read("moe.experts.up.bias")[expert], tp, rank)
                made[f"{name}.linear_fc2.bias"] = read("moe.experts.down.bias")[expert]
        for expert in range(model.num_experts or 0):
            name = f"{there}.mlp.experts.local_experts.{expert}"
            made[f"{name}.linear_fc1.weight"] = gate_and_up(ups[expert], tp, rank)
            made[f"{name}.linear_fc2.weight"] = downs[expert].chunk(tp, 1)[rank]
        if model.moe_shared_expert_intermediate_size:
            name = f"{there}.mlp.shared_experts"
            made[f"{name}.linear_fc1.weight"] = gate_and_up(read("moe.shared.up.weight"), tp, rank)
            made[f"{name}.linear_fc2.weight"] = read("moe.shared.down.weight").chunk(tp, 1)[rank]
        if model.moe_shared_expert_gate:
            made[f"{name}.gate_weight"] = read("moe.shared_gate.weight")
        if model.moe_router_enable_expert_bias:
            made[f"{there}.mlp.router.expert_bias"] = read("moe.router.bias")
    else:
        for kind in ("weight", "bias") if model.add_bias_linear else ("weight",):
            up = read(f"mlp.up.{kind}")
            made[f"{there}.mlp.linear_fc1.{kind}"] = gate_and_up(up, tp, rank) if model.is_gated else up.chunk(tp)[rank]
        made[f"{there}.mlp.linear_fc2.weight"] = read("mlp.down.weight").chunk(tp, 1)[rank]
        if model.add_bias_linear:
            made[f"{there}.mlp.linear_fc2.bias"] = read("mlp.down.bias")
    return {name: tensor.clone() for name, tensor in made.items()}


def latent_attention(read: Callable[[str], torch.Tensor], there: str, tp: int, rank: int) -> Tensors:
    """Layers of Transformer Engine: down projections whole on every rank, up projections split by heads."""
    made = {}
    for letter in ("q", "kv"):
        made[f"{there}.linear_{letter}_down_proj.weight"] = read(f"attention.{letter}_down.weight")
        made[f"{there}.{letter}_layernorm.weight"] = read(f"attention.{letter}_latent_norm.weight")
        made[f"{there}.linear_{letter}_up_proj.weight"] = read(f"attention.{letter}_up.weight").chunk(tp)[rank]
    return made


def gate_and_up(stacked: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    gate, up = stacked
    return torch.cat((gate.chunk(tp)[rank], up.chunk(tp)[rank]))


def stage(weights: MadeUp, layers: range, tp: int, rank: int, *, first: bool, last: bool) -> Tensors:
    """The part of GPTModel's state dict of one stage."""
    model, made = weights.model, {}
    if first:
        made["embedding.word_embeddings.weight"] = rows(weights, "embedding.word.weight", tp, rank)
        if model.position_embedding_type == "learned_absolute":
            made["embedding.position_embeddings.weight"] = weights.read("embedding.position.weight")
    for number, index in enumerate(layers):
        made |= layer(weights, index, number, tp, rank)
    if last:
        for kind in ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",):
            made[f"decoder.final_layernorm.{kind}"] = weights.read(f"final_norm.{kind}")
        if not model.tie_embeddings:
            made["output_layer.weight"] = rows(weights, "head.weight", tp, rank)
        elif not first:
            made["output_layer.weight"] = rows(weights, "embedding.word.weight", tp, rank)
    return made


def fuse(tensors: Tensors) -> Tensors:
    """Rename norms before linear layers as Transformer Engine does."""
    renamed = {}
    for name, tensor in tensors.items():
        latent = any(".linear_kv_up_proj." in other for other in tensors)
        if not latent:
            name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        for letter in ("q", "kv") if latent else ():
            name = name.replace(f".{letter}_layernorm.", f".linear_{letter}_up_proj.layer_norm_")
        if "pre_mlp_layernorm." in name:
            number = name.split(".")[2]
            if f"decoder.layers.{number}.mlp.linear_fc1.weight" in tensors:
                name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        renamed[name] = tensor
    return renamed


def save(
    folder: Path,
    weights: MadeUp,
    *,
    tp: int = 1,
    stages: tuple[int, ...] | None = None,
    change: Callable[[dict[str, Any]], dict[str, Any]] = lambda content: content,
    **args: Any,
) -> Path:
    """Save iter_0000003 and the tracker. `stages`: layers per pipeline stage, by default all in one; `change`:
    applied to a file's content before it is saved; `args`: changed arguments."""
    counts = stages or (weights.model.num_layers,)
    pp, done = len(counts), 0
    for index, count in enumerate(counts):
        for rank in range(tp):
            layers = range(done, done + count)
            model = stage(weights, layers, tp, rank, first=index == 0, last=index == pp - 1)
            content = {
                "args": arguments(weights, tp, pp, **args),
                "checkpoint_version": 3.0,
                "iteration": 3,
                "model": model,
            }
            name = f"mp_rank_{rank:02d}" + (f"_{index:03d}" if pp > 1 else "")
            write(folder, name, change(content))
        done += count
    return folder


def write(folder: Path, rank: str, content: Any) -> Path:
    path = folder / "iter_0000003" / rank / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return path


VOCABULARY = ("embedding.word.weight", "head.weight")


def assert_same(found: Weights, made: Weights) -> None:
    """Check that every tensor is bit-equal, except rows of padding, which must be zeros."""
    assert parameter_shapes(found.model).keys() == parameter_shapes(made.model).keys()
    assert found.model.vocab_size == made.model.vocab_size
    for name, shape in parameter_shapes(found.model).items():
        ours, theirs = made.read(name), found.read(name)
        assert tuple(theirs.shape) == shape.shape, name
        assert theirs.dtype == found.dtype(name) == ours.dtype, name
        size = made.model.vocab_size if name in VOCABULARY else None
        assert torch.equal(ours[:size], theirs[:size]), name
        assert size is None or not theirs[size:].any(), name
