"""Eight layouts that use every way of splitting a model, and models for which all of them are valid."""

from typing import Any

from tests.support.tiny import LLAMA, Z1, words

Settings = dict[str, Any]

COMMON: Settings = words(
    "num_layers=4 hidden_size=32 num_attention_heads=8 num_query_groups=4 ffn_hidden_size=48 num_experts=4 "
    "moe_first_dense_layers=1 moe_layer_freq=2 moe_ffn_hidden_size=16 moe_shared_expert_intermediate_size=8 "
    "seq_length=24 global_batch_size=12 hidden_dropout=0.1"
)
"""Two dense layers and two with experts; a batch size divisible by 1, 2, 3 and 4 data-parallel ranks."""

LLAMA_MOE: Settings = {**LLAMA, **COMMON, "moe_add_bias_linear": True, "softmax_type": "learnable"}
"""RMSNorm, fused gate, biases only in experts, attention sinks, separate output head."""

GPT_MOE: Settings = COMMON
"""LayerNorm, biases, learned positions, tied embeddings."""

SP: Settings = {"sequence_parallel": True}
VEE: Settings = {"vpp": 2, "pipeline_schedule": "zb-v"}


def _layout(ranks: int, *, micro: int, bucket: int = 3000, **settings: Any) -> tuple[int, Settings]:
    return ranks, {"micro_batch_size": micro, "ddp_bucket_size": bucket, **settings}


LAYOUTS: dict[str, tuple[int, Settings]] = {
    "one": _layout(1, micro=12),
    "pp2-vpp2": _layout(2, micro=6, bucket=1, pp=2, vpp=2),
    "dp3-zero": _layout(3, micro=4, bucket=1, **Z1),
    "zbv-dp2-zero": _layout(4, micro=3, bucket=2000, pp=2, **VEE, **Z1),
    "cp2-dp2-ep4": _layout(4, micro=6, cp=2, ep=4),
    "dp4-ep2-zero": _layout(4, micro=3, bucket=700, ep=2, **Z1),
    "tp4-sp-ep2-etp2": _layout(4, micro=12, bucket=1500, tp=4, ep=2, etp=2, **SP),
    "tp2-sp-cp2-ep2-etp1-zero": _layout(4, micro=12, tp=2, cp=2, ep=2, etp=1, **SP, **Z1),
}
"""Name -> (ranks, settings). With 3 ranks the distributed optimizer splits parameters within a row."""
