"""Run by test_megatron_core.py: one tensor-parallel rank of megatron.core's own GPTModel on the CPU.

    python megatron_core_logits.py FOLDER RANK TP STORE

Builds the model described by the args in FOLDER's file, loads the file strictly, and writes logits and the state that
megatron.core itself would save, in both formats."""

import argparse
import contextlib
import sys
import types
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")  # megatron.core warns of every missing package

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel  # noqa: E402
from megatron.core.fusions.fused_bias_geglu import quick_gelu  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec  # noqa: E402
from megatron.core.transformer import multi_latent_attention  # noqa: E402
from megatron.core.transformer.moe import moe_utils  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402


class PlainAttention(torch.nn.Module):
    """softmax(q·kᵀ·scale)·v of [s, b, heads, d] with a separate value size, for which local layers have no attention."""

    def __init__(self, config: TransformerConfig, softmax_scale: float, **_: object) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor, **_: object) -> object:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        scores = (q @ k.mT * self.scale).masked_fill(hidden, float("-inf"))
        return (scores.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(2).contiguous()


def build(args: argparse.Namespace) -> GPTModel:
    """Build the model that Megatron-LM's training script builds from args, with the local layers."""
    settings = {
        "num_layers": args.num_layers,
        "hidden_size": args.hidden_size,
        "ffn_hidden_size": args.ffn_hidden_size,
        "num_attention_heads": args.num_attention_heads,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "kv_channels": args.kv_channels,
        "normalization": args.normalization,
        "layernorm_epsilon": args.norm_epsilon,
        "qk_layernorm": args.qk_layernorm,
        "add_bias_linear": args.add_bias_linear,
        "add_qkv_bias": args.add_qkv_bias,
        "gated_linear_unit": args.swiglu or args.quick_geglu,
        "activation_func": (
            quick_gelu if args.quick_geglu else torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu
        ),
        "activation_func_clamp_value": args.activation_func_clamp_value,
        "glu_linear_offset": args.glu_linear_offset,
        "softmax_type": args.softmax_type,
        "bias_activation_fusion": args.bias_gelu_fusion,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": args.tensor_model_parallel_size,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "params_dtype": args.params_dtype,
    }
    if args.num_experts:
        names = ("moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax")
        names += ("moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_num_groups")
        names += ("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_shared_expert_gate")
        settings |= {name: getattr(args, name) for name in names}
        settings |= {
            "num_moe_experts": args.num_experts,
            "moe_shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    latent = getattr(args, "multi_latent_attention", False)
    if latent:
        names = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        names += ("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim")
        settings |= {name: getattr(args, name) for name in names}
        settings |= {"multi_latent_attention": True, "rotary_base": args.rotary_base, "apply_rope_fusion": False}
    config = MLATransformerConfig(**settings) if latent else TransformerConfig(**settings)
    if args.position_embedding_type == "yarn":  # the script sets them on the finished configuration
        config.yarn_rotary_scaling_factor = args.rotary_scaling_factor
        config.yarn_mscale, config.yarn_mscale_all_dim = args.mscale, args.mscale_all_dim
        names = ("original_max_position_embeddings", "beta_fast", "beta_slow", "correction_range_round_to_int")
        for name in names:
            setattr(config, f"yarn_{name}", getattr(args, f"yarn_{name}"))
    if args.num_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    else:
        kinds = {"normalization": args.normalization, "qk_layernorm": args.qk_layernorm}
        spec = get_gpt_layer_local_spec(multi_latent_attention=latent, **kinds)
    for layer in getattr(spec, "layer_specs", [spec]) if latent else ():
        layer.submodules.self_attention.submodules.core_attention = PlainAttention
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    )


def main() -> None:
    folder, rank, tp = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")  # device of RoPE's frequencies
    torch.cuda.synchronize = lambda *_: None
    no_states = types.SimpleNamespace(fork=contextlib.nullcontext)  # CUDA's random numbers, for dropout
    tensor_parallel.get_cuda_rng_tracker = lambda: no_states
    moe_utils.te_general_gemm = None  # Transformer Engine's, missing without it
    for name in ("TELinear", "TEColumnParallelLinear"):
        if not isinstance(getattr(multi_latent_attention, name), type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[4]}", rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    file = folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
    with torch.serialization.safe_globals([argparse.Namespace]):
        content = torch.load(file, weights_only=True)
    model = build(content["args"])
    model.load_state_dict(content["model"], strict=True)
    model.eval()
    tokens = torch.load(folder / "tokens.pt", weights_only=True)
    length = tokens.shape[1]
    hidden = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    with torch.no_grad():
        logits = model(tokens, torch.arange(length)[None].expand_as(tokens), hidden)
    torch.save(logits, folder / f"logits-{rank}.pt")
    content["model"] = model.state_dict_for_save_checkpoint()
    back = folder / "back" / "iter_0000005" / f"mp_rank_{rank:02d}"
    back.mkdir(parents=True)
    torch.save(content | {"iteration": 5}, back / "model_optim_rng.pt")
    (folder / "back" / "latest_checkpointed_iteration.txt").write_text("5")
    step = folder / "dist" / "iter_0000007"
    step.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    content["args"].ckpt_format = "torch_dist"
    dist_checkpointing.save(dict(model.sharded_state_dict()) | {"args": content["args"]}, str(step))
    (folder / "dist" / "latest_checkpointed_iteration.txt").write_text("7")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
