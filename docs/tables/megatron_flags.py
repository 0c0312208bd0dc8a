"""Write the tables of docs/from_megatron.md: flags that differ from Megatron-LM's, and flags that set others."""

from collections.abc import Mapping
from types import MappingProxyType

from config_page import default_of

from megalite.config.describe import settings
from megalite.config.megatron import DERIVED, FROM_VALUE, VALUES

THEIRS: Mapping[str, str] = MappingProxyType(
    {
        # model
        "make_vocab_size_divisible_by": "theirs is multiplied by tp",
        "max_position_embeddings": "`--seq-length` unless given",
        "position_embedding_type": "without mrope and relative; yarn is `rope_scaling: yarn`",
        "multi_latent_attention": "has RoPE only with `--position-embedding-type rope`; theirs always",
        "hidden_dropout": "theirs is 0.1",
        "attention_dropout": "theirs is 0.1",
        "init_method_std": "other initial weights, the same on any layout",
        "moe_aux_loss_coeff": "over each sequence; as in Megatron-LM with `--moe-router-load-balancing-type aux_loss`",
        "moe_router_sinkhorn": "over each sequence, not each rank's microbatch",
        "moe_router_force_load_balancing": "by position, evenly; theirs by random logits",
        "moe_expert_capacity_factor": "over each sequence, not each rank's microbatch",
        # parallel
        "cp_comm_type": "the same for all layers",
        "pipeline_layout": "m comes right before L, and is optional",
        "ddp_bucket_size": "theirs is max(40 million, 1 million · dp)",
        "overlap_grad_reduce": "theirs is off unless given",
        "overlap_param_gather": "theirs is off unless given",
        "fp8_param_gather": "each rank keeps its part of the weights in bf16",
        # optimizer
        "optimizer": "adam, sgd, muon, and soap as in the paper, unlike theirs; `dist_muon` is muon with `--dp-strategy "
        "distributed-optimizer`",
        "lr_decay_style": "theirs is linear",
        "lr_warmup_init": "as in Megatron-LM with `--lr-schedule-offset megatron`; else the first step exceeds it",
        "muon_momentum": "theirs is 0.9",
        "muon_nesterov": "theirs is off unless given",
        "muon_scale": "theirs is 1",
        # data
        "tokenizer_type": "inferred from the files unless given; without BERT's",
        "sft": "packs by best fit; theirs pads",
        "num_workers": "threads; theirs is 2 processes",
        # training
        "step_batch_size_schedule": "`--global-batch-size`, forbidden there, must be the last size",
        "rampup_batch_size": "works; recent versions of Megatron-LM ignore it",
        "seed": "gives other random numbers",
        "initial_loss_scale": "theirs is 2^32",
        "recompute_modules": "mlp_act also covers dense MLPs and shared experts",
        "fine_grained_activation_offloading": "goes with `--cpu-offloading-num-layers`",
        "offload_modules": "as `--recompute-modules`; offloads tensors of any size",
        "eval_interval": "none without `--valid-data-path`; theirs is 1000",
        "eval_iters": "theirs is 100",
        "full_validation": "the mean over all tokens; theirs over microbatches of one sample, some repeated",
        "exit_duration_in_mins": "status 75; theirs is 0",
        "iterations_to_skip": "counted from 1; theirs from 0 before megatron-core 0.17",
        "exit_signals": "always active; theirs takes one, and only if given",
        # compute
        "fp8_recipe": "without mxfp8; `blockwise` is e4m3 throughout",
        # checkpoint
        "load": "a folder with no checkpoint is an error unless `--fresh-if-missing`; a damaged one is passed over",
        # logging
        "log_interval": "theirs is 100",
        "log_params_norm": "with each log line; theirs in each step",
        "profile_step_start": "counted from where this run starts",
        "profile_step_end": "counted from where this run starts",
        "record_memory_history": "the snapshot is written when memory runs out",
    }
)
"""Setting that differs from Megatron-LM's -> the difference."""


def their_flag(name: str) -> str:
    """Return Megatron-LM's flag of a setting: the long name if ours is short."""
    flags = settings()[name].flags
    return flags[0] if len(flags) == 1 else flags[1]


def settings_table() -> str:
    """Return a line for each difference between settings that both have."""
    lines: dict[str, list[str]] = {}
    for name, difference in THEIRS.items():
        flag, default = their_flag(name), default_of(settings()[name].default)
        shown = f"`{flag}`" if flag == settings()[name].flags[0] else f"`{flag}` = `{settings()[name].flags[0]}`"
        lines.setdefault(difference, []).append(shown + (f" ({default})" if default else ""))
    return "".join(f"- {', '.join(flags)}: {difference}\n" for difference, flags in lines.items())


DERIVED_MEANING = {
    "--num-layers-per-virtual-pipeline-stage": "`vpp` = `num_layers` / `pp` / N, exactly",
    "--decoder-first-pipeline-num-layers": "`pipeline_layers` with N layers on the first pipeline rank",
    "--decoder-last-pipeline-num-layers": "`pipeline_layers` with N layers on the last pipeline rank",
    **dict.fromkeys(
        ("--hybrid-layer-pattern", "--hybrid-override-pattern"),
        "`num_layers` with a mixer and its MLP as one layer, `experimental_attention_variant`, `linear_attention_freq`, `no_mlp_freq`; "
        "by `|` `pipeline_layers` and `vpp`; Megatron-LM's sizes of Mamba-2",
    ),
    "--group-query-attention": "needs `num_query_groups`, which alone is enough",
    "--use-distributed-optimizer": "`dp_strategy: distributed-optimizer`, unless another flag shards parameters too",
    "--account-for-embedding-in-pipeline-split": "`pipeline_layers` with one layer less on the first stage",
    "--account-for-loss-in-pipeline-split": "`pipeline_layers` with one layer less on the last stage",
    "--eval-global-batch-size": "nothing if equal to `global_batch_size`, else refused",
    "--no-position-embedding": "nothing, with `position_embedding_type` rope or none",
    "--moe-layer-freq": "with a list such as `([0]*3+[1]*9)`: `moe_first_dense_layers` and `moe_layer_freq`",
    "--moe-router-load-balancing-type": "`moe_aux_loss_sequences` is `micro_batch_size` with `aux_loss`, 1 with `seq_aux_loss`; `none`: "
    "`moe_aux_loss_coeff: 0`; `sinkhorn`: `moe_router_sinkhorn` with sigmoid scores for one expert per token, else "
    "`moe_router_pre_softmax`",
    "--rope-type": "with rope, `--rotary-scaling-factor` sets nothing",
    "--use-rope-scaling": "`rope_scaling: llama3`, without `multi_latent_attention`",
    "--rotary-scaling-factor": "with `multi_latent_attention`: `rope_scaling: yarn`, `rope_scaling_factor`, "
    "`rope_original_max_positions: 4096`",
}

VALUE_MEANING = {
    "--data-args-path": "`data_path`, read from a text file",
    "--per-split-data-args-path": "`train_data_path`, `valid_data_path` and `test_data_path`, read from a JSON file",
    "--save-retain-interval": "`keep_latest: 1` and `keep_every` of that many steps",
    "--window-size": "`sliding_window` = left number + 1, for the query's position",
    "--rotary-seq-len-interpolation-factor": "`rope_scaling: linear` with `rope_scaling_factor`",
    "--padded-vocab-size": "`vocab_size`, and `make_vocab_size_divisible_by: 1`",
    "--pad-vocab-size-to": "`vocab_size`, and `make_vocab_size_divisible_by: 1`",
}


def other_flags() -> list[str]:
    """Return lines `flag`, `flag`: settings, for Megatron-LM's flags with an effect that depends on their value."""
    lines = [f"`{flag}`: {DERIVED_MEANING[flag]}" for flag in DERIVED]
    lines += [f"`{flag}`: {VALUE_MEANING[flag]}" for flag in FROM_VALUE]
    for name, words in VALUES.items():
        lines += [f"`{settings()[name].flags[0]} {word}`: `{name}: {ours}`" for word, ours in words.items()]
    given: dict[str, list[str]] = {}
    for flag, _, means in (line.partition(": ") for line in lines):
        given.setdefault(means, []).append(flag)
    return [f"{', '.join(flags)}: {means}" for means, flags in given.items()]


def other_flags_table() -> str:
    """Return the table of flags that set other settings."""
    return "".join(f"- {line}\n" for line in other_flags())
