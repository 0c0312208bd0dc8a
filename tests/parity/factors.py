"""The factors of the parity matrix: one table of values and their settings."""

from typing import Any

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace
from megalite.config.errors import ConfigError, Problems
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.pipeline import layout_of, schedule_of
from tests.support.tiny import LATENT, LLAMA, TINY, rows_of

Settings = dict[str, Any]

MAX_WORLD = 8

GPT: Settings = {"num_attention_heads": 8}  # Learned positions, LayerNorm, GELU, biases, tied embeddings

EXPERTS: Settings = {**LLAMA, "num_experts": 4, "moe_router_topk": 2}

FAMILIES = rows_of(
    """
gpt: GPT
llama: LLAMA rope_scaling=llama3 rope_scaling_factor=4.0 rope_original_max_positions=8
mistral: LLAMA num_query_groups=2 sliding_window=5 rope_scaling=dynamic rope_scaling_factor=4.0
  rope_original_max_positions=8 attn_temperature_beta=0.3
qwen: LLAMA num_query_groups=1 qk_norm add_qkv_bias kv_channels=6 tie_embeddings
gemma: LLAMA rope_scaling=yarn rope_scaling_factor=4.0 rope_original_max_positions=8 rope_beta_fast=1.5
  rope_beta_slow=0.3 rope_mscale=2.0 rope_mscale_all_dim=0.5 num_query_groups=8 activation=geglu_tanh
  norm_zero_centered scale_embeddings tie_embeddings
gemma2: LLAMA activation=geglu_tanh norm_zero_centered scale_embeddings tie_embeddings sliding_window=5
  window_attn_skip_freq=[2] softmax_scale=0.4 post_norms attn_logit_softcapping=2.0 final_logit_softcapping=3.0
gemma3: LLAMA activation=geglu_tanh norm_zero_centered scale_embeddings tie_embeddings sliding_window=5
  window_attn_skip_freq=[3] softmax_scale=0.4 post_norms qk_norm mtp_num_layers=2 mtp_loss_scaling_factor=0.5
  rotary_base=1000000.0 rotary_base_local=1000.0 rope_scaling=linear rope_scaling_factor=8.0
olmo2: LLAMA num_query_groups=8 qk_norm qk_norm_all_heads pre_norms=false post_norms no_rope_freq=[4]
mixtral: EXPERTS softmax_type=off-by-one
deepseek: EXPERTS num_experts=8 moe_router_topk=3 moe_router_pre_softmax moe_ffn_hidden_size=24
  moe_shared_expert_intermediate_size=16 moe_first_dense_layers=1 moe_router_topk_scaling_factor=2.0 num_query_groups=8
  rotary_percent=0.5 rotary_interleaved
deepseek-v3: EXPERTS LATENT num_query_groups=8 rope_scaling=yarn rope_scaling_factor=4.0 rope_original_max_positions=8
  attn_temperature_beta=0.3 rope_mscale=1.0 rope_mscale_all_dim=1.0 mtp_num_layers=1 num_experts=8 moe_router_topk=4
  moe_router_score_function=sigmoid moe_router_enable_expert_bias moe_router_bias_update_rate=0.02
  moe_router_num_groups=4 moe_router_group_topk=2 moe_router_topk_scaling_factor=1.5 moe_ffn_hidden_size=24
  moe_shared_expert_intermediate_size=16 moe_first_dense_layers=1
qwen2-moe: EXPERTS moe_router_pre_softmax moe_shared_expert_intermediate_size=16 moe_shared_expert_gate
  moe_first_dense_layers=1 add_qkv_bias
gpt-oss: EXPERTS softmax_type=learnable add_bias_linear moe_add_bias_linear activation=quick_geglu
  activation_func_clamp_value=0.3 glu_linear_offset=1.0 rope_scaling=yarn rope_scaling_factor=4.0
  rope_original_max_positions=8 rope_truncate=false sliding_window=5 window_attn_skip_freq=[2]
switch: GPT num_experts=4 moe_router_topk=1 moe_router_pre_softmax moe_layer_freq=2 moe_ffn_hidden_size=32
  tie_embeddings=false
""",
    {"GPT": GPT, "LLAMA": LLAMA, "LATENT": LATENT, "EXPERTS": EXPERTS},
)

LOSSES: Settings = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
SELECTIVE: Settings = {"recompute_granularity": "selective"}
FULL: Settings = {"recompute_granularity": "full"}
HOST: Settings = {"cpu_offloading_num_layers": 1}
Z1: Settings = {"dp_strategy": "distributed-optimizer"}
Z3: Settings = {"dp_strategy": "fully-sharded"}
DOCUMENTS: Settings = {"eod_mask_loss": True, "reset_attention_mask": True}

FACTORS: dict[str, dict[str, Settings]] = {
    "tp": {"1": {}, "2": {"tp": 2}, "4": {"tp": 4}},
    "sp": {"off": {}, "on": {"sequence_parallel": True}},
    "cp": {"1": {}, "2": {"cp": 2}, "4": {"cp": 4}},
    "cp_comm": {
        "p2p": {},
        "a2a": {"cp_comm_type": "a2a"},
        "allgather": {"cp_comm_type": "allgather"},
        "a2a+p2p": {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]},
    },
    "ep": {"1": {}, "2": {"ep": 2}, "4": {"ep": 4}},
    "etp": {"tp": {}, "1": {"etp": 1}, "2": {"etp": 2}},
    "pp": {"1": {}, "2": {"pp": 2}, "4": {"pp": 4}},
    "vpp": {"1": {}, "2": {"vpp": 2}},
    "dp": {"1": {}, "2": {"dp": 2}, "4": {"dp": 4}},
    "strategy": {
        "all-reduce": {},
        "late": {"overlap_grad_reduce": False},
        "zero1": Z1,
        "zero2-late-host": {
            **Z1,
            "shard_gradients": True,
            "overlap_param_gather": False,
            "optimizer_cpu_offload": True,
        },
        "hybrid3-late": {**Z3, "dp_instances": 2, "overlap_param_gather": False},
        "fused": {"dp_strategy": "fused-all-reduce", "fusion_threshold_mb": 0.02},
        "zero3": Z3,
        "server": {"dp_strategy": "sharded-parameter-server", "server_chunk_mb": 0.01},
    },
    "recompute": {
        "none": {},
        "attention": SELECTIVE,
        "several-host": {**SELECTIVE, "recompute_modules": ["core_attn", "layernorm", "mlp_act"], **HOST},
        "mlp-host-modules": {
            **SELECTIVE,
            "recompute_modules": ["layernorm", "mlp"],
            "fine_grained_activation_offloading": True,
            "offload_modules": ["attn_norm", "core_attn", "attn_proj"],
        },
        "moe": {**SELECTIVE, "recompute_modules": ["core_attn", "moe"]},
        "latents": {**SELECTIVE, "recompute_modules": ["mla_up_proj", "shared_experts"]},
        "full": FULL,
        "full-2-host": {**FULL, "recompute_num_layers": 2, **HOST},
        "block": {**FULL, "recompute_method": "block"},
        "ahead": {**FULL, "recompute_ahead": True},
        "host": HOST,
    },
    "schedule": {
        "default": {},
        "grouped": {"microbatch_group_size_per_virtual_pipeline_stage": 4},
        "pb": {"pipeline_warmup": "pb", "pipeline_recv_prefetch": 3, "pipeline_send_window": 2},
        **{
            name: {"pipeline_schedule": name}
            for name in ("gpipe", "looped-bfs", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "auto")
        },
    },
    "optimizer": {
        "adam": {},
        "muon": {"optimizer": "muon"},
        "soap": {"optimizer": "soap", "soap_frequency": 1},
        "schedule-free": {"optimizer": "schedule-free-adamw", "lr_decay_style": "constant"},
        "average": {"ema_decay": 0.5, "eval_ema": True},
        "rates": {"lr_multipliers": ["*.out.weight=0.3", "layers.0.*=2"]},
        "mup": {"use_mup": True, "mup_base_hidden_size": 16},
        "clipped": {"qk_clip": True, "qk_clip_threshold": 0.05},
    },
    "messages": {"parts": {}, "whole": {"scatter_gather_tensors_in_pipeline": False}},
    "order": {"dp-pp": {}, "pp-dp": {"rank_order": "tp-cp-ep-pp-dp"}},
    "layers": {"4": {}, "2": {"num_layers": 2}, "5": {"num_layers": 5}, "8": {"num_layers": 8}},
    "micro": {"1": {}, "2": {"micro_batch_size": 2}},
    "batch": {"8": {}, "4": {"global_batch_size": 4}, "16": {"global_batch_size": 16}},
    "mask": {
        "none": {"eod_mask_loss": False},
        "eod": {},
        "documents": {**DOCUMENTS, "reset_position_ids": True},
        "longer": {**DOCUMENTS, "seq_length_warmup": [8, 2]},
        "balanced": {**DOCUMENTS, "reset_position_ids": True, "context_parallel_load_balancer": "area"},
    },
    "family": FAMILIES,
    "dropout": {
        "none": {},
        "hidden": {"hidden_dropout": 0.1},
        "both": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    },
    "moe": {
        "plain": {},
        "losses": LOSSES,
        "capacity": {**LOSSES, "moe_expert_capacity_factor": 1.0},
        "padded-position": {
            "moe_expert_capacity_factor": 1.0,
            "moe_token_drop_policy": "position",
            "moe_pad_expert_input_to_capacity": True,
        },
    },
}
"""Factor -> value -> settings over `TINY`. The first value of each is the plain one."""

AXES = ("tp", "cp", "pp", "dp")

MOE = ("mixtral", "deepseek", "deepseek-v3", "qwen2-moe", "gpt-oss", "switch")

COMPANY: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {
    ("sp", "on"): ("tp", ("2", "4")),
    **{("cp_comm", name): ("cp", ("2", "4")) for name in ("a2a", "allgather")},
    ("cp_comm", "a2a+p2p"): ("cp", ("4",)),
    ("mask", "balanced"): ("cp", ("2", "4")),
    ("vpp", "2"): ("pp", ("2", "4")),
    **{("schedule", name): ("vpp", ("2",)) for name in ("grouped", "looped-bfs", "zb-v", "dualpipe-v")},
    **{("schedule", name): ("pp", ("2", "4")) for name in ("pb", "gpipe", "zb-h1", "zb-h2", "auto")},
    ("recompute", "ahead"): ("pp", ("2", "4")),
    ("messages", "whole"): ("pp", ("2", "4")),
    **{(factor, value): ("family", MOE) for factor in ("ep", "etp", "moe") for value in list(FACTORS[factor])[1:]},
    ("recompute", "moe"): ("family", MOE),
    ("recompute", "latents"): ("family", ("deepseek-v3",)),
    ("strategy", "hybrid3-late"): ("dp", ("4",)),
}
"""Values that have no effect alone -> the factor that needs one of some values. It only guides the random draw: the
validator decides which layouts are legal."""

Row = dict[str, str]  # Factor -> value


def settings_of(row: Row) -> Settings:
    return {name: value for factor in FACTORS for name, value in FACTORS[factor][row[factor]].items()}


def world_of(settings: Settings) -> int:
    world = 1
    for axis in AXES:
        world *= settings.get(axis, 1)
    return world


def refusal(settings: Settings) -> str | None:
    """Return why a layout is not legal, or None; all settings beyond `TINY` count as set by the user. The default
    schedule replaces `auto`, of which the search is slow and always succeeds."""
    world = world_of(settings)
    if world > MAX_WORLD:
        return f"world {world}"
    try:
        problems = Problems()
        config = replace(RunConfig(), **{**TINY, **settings})
        config = validate(config, world, explicit=frozenset(settings), problems=problems)
        problems.raise_all()
        if problems.idle:  # equals a layout without the idle setting
            return next(iter(problems.idle.values()))
        if config.parallel.schedule_name == "auto":
            config = replace(config, pipeline_schedule="interleaved" if config.parallel.vpp > 1 else "1f1b")
        layout_of(config)
        for count in microbatch_counts(config):
            schedule_of(config, count)
    except ConfigError as error:
        return str(error)
    return None
