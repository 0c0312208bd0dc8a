"""Tiny models and configs, shared by tests of many layouts."""

import copy
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.parity.trajectory import Part, Runner, Trajectory, UnevenSamples, assemble, local_parts, whole
from megalite.training.replica import Replica, build_replica
from tests.support.ranks import RankContext
from tests.support.same import require_same

__all__ = [
    "BIASED",
    "LATENT",
    "LLAMA",
    "MAMBA",
    "MOE",
    "NEXT",
    "SPARSE",
    "TINY",
    "Z1",
    "Part",
    "Runner",
    "UnevenSamples",
    "assemble",
    "assert_same_numbers",
    "build",
    "local_parts",
    "rows_of",
    "tiny_config",
    "whole",
    "words",
]


def words(text: str, groups: Mapping[str, dict[str, Any]] = MappingProxyType({})) -> dict[str, Any]:
    """Parse settings: a word is a group, a setting to enable, or `setting=value`; later words override earlier ones."""
    found: dict[str, Any] = {}
    for word in text.split():
        setting, equals, value = word.partition("=")
        read: Any = value if equals else True
        with suppress(ValueError):  # not JSON: a name
            read = json.loads(value if equals else "true")
        found.update(groups.get(word, {setting: read}))
    return found


TINY: dict[str, Any] = words(
    "num_layers=4 hidden_size=32 num_attention_heads=4 vocab_size=93 make_vocab_size_divisible_by=8 "
    "seq_length=16 micro_batch_size=1 global_batch_size=8 train_iters=20 lr=1e-2 lr_warmup_iters=2 "
    "clip_grad=0.5 weight_decay=0.1 precision=fp64 device=cpu init_method_std=0.1 eod_mask_loss "
    "ddp_bucket_size=3000"
)

Z1: dict[str, Any] = {"dp_strategy": "distributed-optimizer"}
LLAMA: dict[str, Any] = words(
    "position_embedding_type=rope normalization=RMSNorm activation=swiglu num_query_groups=4 "
    "num_attention_heads=8 ffn_hidden_size=48 add_bias_linear=false tie_embeddings=false"
)

LATENT: dict[str, Any] = {name: value for name, value in LLAMA.items() if name != "num_query_groups"} | words(
    "multi_latent_attention q_lora_rank=12 kv_lora_rank=10 qk_head_dim=6 qk_pos_emb_head_dim=4 v_head_dim=7 qk_norm"
)
"""Attention of DeepSeek-V3."""

SPARSE: dict[str, Any] = LATENT | words(
    "experimental_attention_variant=dsa dsa_indexer_n_heads=3 dsa_indexer_head_dim=6 dsa_indexer_topk=5 "
    "dsa_indexer_loss_coeff=0.3"
)
"""Attention of DeepSeek-V3.2."""

NEXT: dict[str, Any] = LLAMA | words(
    "attention_output_gate experimental_attention_variant=gated_delta_net linear_attention_freq=[2] linear_conv_kernel_dim=3 "
    "linear_num_key_heads=4 linear_num_value_heads=8 linear_key_head_dim=4 linear_value_head_dim=6"
)
"""Attention of Qwen3-Next."""

MAMBA: dict[str, Any] = NEXT | words(
    "attention_output_gate=false experimental_attention_variant=mamba2 num_layers=4 linear_attention_freq=[1,0,1,1] "
    "no_mlp_freq=[0,0,1,0] activation=squared_relu position_embedding_type=none"
)
"""Layers of Nemotron-H: some have no MLP."""

BIASED: dict[str, Any] = words(
    "moe_router_score_function=sigmoid moe_router_enable_expert_bias moe_router_bias_update_rate=0.02"
)
"""Router settings over `MOE`: experts balanced by a bias."""

MOE: dict[str, Any] = LLAMA | words(
    "num_experts=4 moe_ffn_hidden_size=16 moe_first_dense_layers=1 moe_aux_loss_coeff=0.01"
)


def rows_of(text: str, groups: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Parse a table of settings: each line is `name: words`; an indented line continues the previous one."""
    rows: dict[str, dict[str, Any]] = {}
    for line in re.sub(r"\n\s+", " ", text.strip()).splitlines():
        name, _, settings = line.partition(": ")
        assert name not in rows, name
        rows[name] = copy.deepcopy(words(settings, groups))  # transformers changes its configs' inner dicts
    return rows


def tiny_config(world_size: int = 1, **changes: Any) -> RunConfig:
    """A validated config of the tiny model."""
    return validate(replace(RunConfig(), **{**TINY, **changes}), world_size)


def build(context: RankContext, config: RunConfig) -> Replica:
    """Build the replica of one rank of the pool for a validated config."""
    return build_replica(config, context.topology_of(config))


def assert_same_numbers(ours: Trajectory, reference: Trajectory) -> None:
    """Compare losses, norms, the gradients of every step and the final weights to 1e-9 relative."""
    require_same(ours, reference, 1e-9)
