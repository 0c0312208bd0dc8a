"""Coming from Megatron-LM: its flags beside ours, those that set something else, those that are accepted, and those that are refused."""

from collections.abc import Mapping
from types import MappingProxyType

from megalite.config.describe import settings
from megalite.config.help import other_flags
from megalite.config.megatron import REFUSED_VALUES
from megalite.config.megatron_flags import REFUSED, known_flags
from megalite.training.writers import TENSORBOARD_TAGS

SAME = "the same"

THEIRS: Mapping[str, str] = MappingProxyType(
    {
        # model
        "num_layers": "required there",
        "hidden_size": "required there",
        "num_attention_heads": "required there",
        "num_query_groups": "enough by itself; `--group-query-attention` may stand beside it",
        "kv_channels": SAME,
        "ffn_hidden_size": SAME,
        "vocab_size": "needed only where no tokenizer says it",
        "make_vocab_size_divisible_by": "theirs is multiplied by tp; ours is not, so that a checkpoint does not depend on "
        "the layout. A padded vocabulary that tp does not divide is an error that names a multiple",
        "max_position_embeddings": "required there; here it is `--seq-length` unless given",
        "position_embedding_type": "learned_absolute, rope and none; theirs also has mrope and relative, and yarn, which is "
        "`rope_scaling: yarn` here",
        "rotary_percent": SAME,
        "rotary_interleaved": SAME,
        "rotary_base": "theirs is a whole number",
        "rope_scaling_factor": SAME,
        "softmax_type": SAME,
        "activation_func_clamp_value": SAME,
        "glu_linear_offset": SAME,
        "normalization": SAME,
        "norm_zero_centered": SAME,
        "qk_norm": SAME,
        "norm_epsilon": SAME,
        "add_qkv_bias": SAME,
        "hidden_dropout": "theirs is 0.1: say it in scripts that relied on it",
        "attention_dropout": "theirs is 0.1",
        "init_method_std": "same; initial weights are drawn by name and do not depend on tp or pp, so they are others "
        "than theirs",
        "num_experts": SAME,
        "moe_router_topk": SAME,
        "moe_ffn_hidden_size": SAME,
        "moe_shared_expert_intermediate_size": SAME,
        "moe_layer_freq": "a number; theirs also takes a pattern",
        "moe_router_pre_softmax": SAME,
        "moe_router_topk_scaling_factor": SAME,
        "moe_aux_loss_coeff": "the loss is taken over each sequence, not over a rank's microbatch",
        "moe_z_loss_coeff": SAME,
        "moe_expert_capacity_factor": "capacity is of each sequence, not of a rank's microbatch",
        "moe_token_drop_policy": SAME,
        # parallel
        "tp": SAME,
        "pp": SAME,
        "vpp": "`--num-layers-per-virtual-pipeline-stage` works too. Layers need not divide evenly",
        "cp": SAME,
        "cp_comm_type": "one for all layers; `all_gather` works too",
        "hierarchical_context_parallel_sizes": SAME,
        "ep": SAME,
        "etp": SAME,
        "sequence_parallel": "off at tp 1, as there, and said",
        "microbatch_group_size_per_virtual_pipeline_stage": "any number from pp up, and any number of microbatches",
        "scatter_gather_tensors_in_pipeline": SAME,
        "pipeline_layout": "the letters E, t, L, m of theirs that we have: E, t and L",
        "ddp_bucket_size": "theirs is max(40 million, 1 million · dp)",
        "dp_instances": "instances are runs of neighbours in the dp·cp group, as there; it works with `fully-sharded` too",
        "overlap_grad_reduce": "theirs is off unless given",
        "overlap_param_gather": "theirs is off unless given",
        "distributed_backend": "auto is nccl on CUDA and gloo on a CPU; theirs is nccl",
        "distributed_timeout_minutes": SAME,
        # data parallel
        "check_replicas_interval": "names the ranks and a tensor that differ",
        # optimizer
        "optimizer": "adam, sgd and muon are both's; lamb and the 1-bit ones are ours",
        "lr": "required there",
        "min_lr": SAME,
        "decoupled_lr": "with `--optimizer adam`",
        "decoupled_min_lr": "`--min-lr` unless given",
        "lr_decay_style": "theirs is linear",
        "lr_decay_iters": SAME,
        "lr_decay_samples": SAME,
        "lr_warmup_iters": SAME,
        "lr_warmup_samples": SAME,
        "lr_warmup_fraction": SAME,
        "lr_warmup_init": "the first step runs above it, and with `--lr-schedule-offset megatron` at it, as theirs",
        "lr_wsd_decay_iters": SAME,
        "lr_wsd_decay_samples": SAME,
        "lr_wsd_decay_style": SAME,
        "weight_decay": SAME,
        "weight_decay_incr_style": SAME,
        "start_weight_decay": SAME,
        "end_weight_decay": SAME,
        "adam_beta1": SAME,
        "adam_beta2": SAME,
        "adam_eps": SAME,
        "clip_grad": "by the norm of the whole model's gradient in both",
        "sgd_momentum": SAME,
        "muon_momentum": "theirs is 0.9",
        "muon_nesterov": "theirs is off unless given",
        "muon_steps": SAME,
        "muon_scale": "theirs is 1",
        "muon_scale_mode": SAME,
        "muon_split_qkv": SAME,
        "qk_clip": "by the logits of the whole batch that tokens see",
        "qk_clip_threshold": SAME,
        "qk_clip_alpha": SAME,
        "exp_avg_dtype": "fp32 and bf16; works without `--use-precision-aware-optimizer`",
        "exp_avg_sq_dtype": "the same; bf16 wants `--stochastic-rounding` for a large adam_beta2",
        # data
        "data_path": "weights are exact decimals; files of either program work in the other",
        "train_data_path": SAME,
        "valid_data_path": SAME,
        "test_data_path": SAME,
        "split": "969,30,1 unless given, in both",
        "mock_data": "needs `--vocab-size`",
        "tokenizer_type": "inferred from the files unless given. GPTSentencePieceTokenizer and Llama2Tokenizer are "
        "SentencePieceTokenizer; BERT's are missing",
        "tokenizer_model": "a file or a folder",
        "vocab_file": SAME,
        "merge_file": SAME,
        "tiktoken_pattern": "v1 and v2, and the well-known ones by name, or a regular expression",
        "data_cache_path": SAME,
        "sft": "jsonl files of messages, or of prompt and response. Examples are packed by best fit; theirs fills each sample up "
        "with padding",
        "eod_mask_loss": SAME,
        "reset_attention_mask": "no mask is made: attention runs over each document by itself",
        "reset_position_ids": SAME,
        # training
        "micro_batch_size": "required there",
        "global_batch_size": SAME,
        "step_batch_size_schedule": "beside it theirs forbids `--global-batch-size`; here it must be the last size",
        "rampup_batch_size": "works; in recent versions of theirs the flag has no effect",
        "train_iters": SAME,
        "train_samples": SAME,
        "seq_length": "required there",
        "seed": "gives other numbers than theirs: weights, dropout and data order are functions of it alone",
        "loss_scale": SAME,
        "initial_loss_scale": "theirs is 2^32",
        "min_loss_scale": SAME,
        "loss_scale_window": SAME,
        "hysteresis": SAME,
        "recompute_granularity": "none, selective, full; `--recompute-activations` is selective in both",
        "recompute_modules": "core_attn, mla_up_proj, mlp_act (`moe_act` is taken too), layernorm, mlp, shared_experts, moe",
        "recompute_method": "theirs must be given with full",
        "recompute_num_layers": SAME,
        "fine_grained_activation_offloading": "goes with `--cpu-offloading-num-layers`, which says in how many layers",
        "offload_modules": "mlp_act (`moe_act` is taken too) is of dense MLPs and shared experts as well; tensors of any size go",
        "eval_interval": "no evaluation unless given; theirs is 1000",
        "eval_iters": "theirs is 100; 0 is no evaluation in both",
        "exit_interval": SAME,
        "exit_duration_in_mins": "status 75; theirs ends with 0",
        "exit_signals": "`--exit-signal` takes one; ours are TERM and USR1 unless given, and always heard",
        "check_for_nan_in_loss_and_grad": "on in both",
        # compute
        "attention_backend": "auto, flash, cudnn (`fused`), efficient, math (`unfused`, `local`)",
        "deterministic": "needs no variables and no other attention; an operation without such a kernel is an error",
        "fp8_recipe": "tensorwise (`delayed` is taken for it) and rowwise; theirs also has mxfp8, blockwise and custom",
        "fp8_wgrad": "theirs is also `--disable-fp8-wgrad`",
        "tp_comm_overlap": "by torch's symmetric memory or point-to-point pieces; theirs needs Transformer Engine",
        # checkpoint
        "save": "or `--run-dir`, under which everything goes",
        "save_interval": SAME,
        "async_save": SAME,
        "load": "a folder with no checkpoint is an error unless `--fresh-if-missing`; a damaged one is passed over",
        "ckpt_step": SAME,
        "finetune": SAME,
        # logging
        "log_interval": "theirs is 100",
        "log_params_norm": "with each log line; theirs in each step",
        "log_num_zeros_in_grad": SAME,
        "tensorboard_dir": "`<run_dir>/tensorboard` unless given",
        "timing_log_level": "0 and 1; 2 of theirs is 1",
        "wandb_project": "turns the writer on, as there",
        "wandb_entity": SAME,
        "wandb_exp_name": SAME,
        "profile": "by torch.profiler alone",
        "profile_step_start": "counted from where this run starts",
        "profile_step_end": "counted from where this run starts",
        "profile_ranks": SAME,
        "record_memory_history": "the snapshot is written when memory runs out",
    }
)
"""Setting that Megatron-LM has under one of its flags -> what is different."""


def their_flag(name: str) -> str:
    """How Megatron-LM spells the flag of a setting: its long name where ours is short."""
    flags = settings()[name].flags
    return flags[0] if len(flags) == 1 or name in _CANONICAL else flags[1]


_CANONICAL = ("microbatch_group_size_per_virtual_pipeline_stage", "norm_epsilon", "save_interval")
"""Settings whose own name is Megatron-LM's, although they have another spelling."""


def settings_table() -> str:
    """Every setting that both have, in the order of our sections: first those that are alike, then one line for each other."""
    same: dict[str, list[str]] = {}
    lines = []
    for name, setting in settings().items():
        if name not in THEIRS:
            continue
        flag, default = their_flag(name), _default(setting.default)
        shown = f"`{flag}`" if flag == setting.flags[0] else f"`{flag}` = `{setting.flags[0]}`"
        shown += f" ({default})" if default else ""
        if THEIRS[name] in ("", SAME):
            same.setdefault(setting.section, []).append(shown)
        else:
            lines.append(f"- {shown}: {THEIRS[name]}")
    alike = [f"- **{section.replace('_', ' ')}**: {', '.join(flags)}" for section, flags in same.items()]
    return "\n".join(["The same in both:\n", *alike, "\nWith a difference:\n", *lines]) + "\n"


def other_flags_table() -> str:
    """Flags that stand for settings of another name or form."""
    return "\n".join(["| Megatron-LM | here |", "|---|---|", *other_flags()]) + "\n"


def accepted_table(*kinds: str) -> str:
    """Flags of some classes, by what is said of them; with values where only these are of the class."""
    reasons: dict[str, list[str]] = {}
    for known in known_flags().values():
        if known.kind in kinds:
            only = "" if known.values in (None, "*", ".*") else f" {known.values}"
            reasons.setdefault(known.why, []).append(f"`{known.flag}{only}`")
    return "".join(f"- {why}: {', '.join(flags)}\n" for why, flags in reasons.items())


def refused_table() -> str:
    """Flags and words that are errors here, by what to use or why it cannot be had."""
    reasons: dict[str, list[str]] = {}
    for known in known_flags().values():
        if known.kind == REFUSED:
            reasons.setdefault(known.why, []).append(f"`{known.flag}`")
    for name, words in REFUSED_VALUES.items():
        for word, why in words.items():
            reasons.setdefault(why, []).append(f"`{settings()[name].flags[0]} {word}`")
    return "".join(f"- {', '.join(flags)}: {why}\n" for why, flags in reasons.items())


def tags_table() -> str:
    """TensorBoard's tags, with their names in metrics.jsonl."""
    return ", ".join(f"`{tag}` (`{name}`)" for name, tag in TENSORBOARD_TAGS.items()) + "\n"


def _default(value: object) -> str:
    """As docs/config.md has it."""
    if value is None or value == []:
        return ""
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
    return f"`{' '.join(map(str, value)) if isinstance(value, list) else text}`"
