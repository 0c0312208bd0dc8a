"""How each size of a model comes down: small, still divisible by the layout, its proportions in sight.

Each function looks at one group of settings and returns those that it changes; nothing below its limit is changed.
"""

import math
from typing import Any

from megalite.config.run import RunConfig, stage_layers

Changes = dict[str, Any]
"""Setting -> new value."""

MAX_LAYERS, MAX_HEADS, MAX_HIDDEN, MAX_FFN, MAX_VOCAB = 12, 16, 128, 256, 256
MAX_EXPERTS, MAX_EXPERT_FFN, MAX_SEQ = 8, 64, 64


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def layer_changes(config: RunConfig) -> Changes:
    """Two layers a stage (one if there are many stages), uneven if they were uneven; dense and expert layers both."""
    model, p = config.model, config.parallel
    if model.num_layers <= MAX_LAYERS:
        return {}
    changes: Changes = {}
    stages = p.pp * p.vpp
    cut = stage_layers(config)
    if cut is not None:
        counts = sorted({count for count in cut if count})
        small = [min(counts.index(count) + 1, 3) if count else 0 for count in cut]
        changes |= {"pipeline_layers": small, "pipeline_layout": None}
        layers = sum(small)
    else:
        layers = stages * (2 if 2 * stages <= MAX_LAYERS else 1) + bool(model.num_layers % stages)
    if model.num_experts:
        changes["moe_layer_freq"] = min(model.moe_layer_freq, 2)
        changes["moe_first_dense_layers"] = min(model.moe_first_dense_layers, 1, layers - 1)
        if cut is None:
            layers = max(layers, changes["moe_first_dense_layers"] + 2)
    changes["num_layers"] = layers
    changes["recompute_num_layers"] = min(config.training.recompute_num_layers, max(1, layers // stages))
    return changes


def attention_changes(config: RunConfig) -> Changes:
    """Heads that the layout divides, queries sharing keys where they did, heads as wide as the model or not."""
    model, p = config.model, config.parallel
    heads, groups = model.num_attention_heads, model.query_groups
    if heads <= MAX_HEADS and model.hidden_size <= MAX_HIDDEN:
        return {}
    changes: Changes = {}
    if heads > MAX_HEADS:
        share = p.tp * (p.cp if p.cp_comm_type == "a2a" else 1)
        sharing = min(heads // groups, 2)
        small_groups = 1 if groups == 1 else _up(2 if sharing > 1 else 4, share)
        heads = small_groups * sharing if groups > 1 else _up(4, share)
        changes["num_attention_heads"] = heads
        if model.num_query_groups is not None:
            changes["num_query_groups"] = small_groups
    # Heads of 8, together as wide as the model, or wider or narrower where they were.
    together = model.head_size * model.num_attention_heads
    per_head = 6 if together > model.hidden_size else 12 if together < model.hidden_size else 8
    changes["hidden_size"] = heads * per_head
    if model.kv_channels is not None:
        changes["kv_channels"] = 8
    return changes


def width_changes(config: RunConfig) -> Changes:
    """MLP and vocabulary: small, uneven to powers of two."""
    model, p = config.model, config.parallel
    changes: Changes = {}
    if model.ffn_size > MAX_FFN or model.ffn_size < 1:
        changes["ffn_hidden_size"] = _up(48, 2 * math.lcm(p.tp, p.expert_tp))
    if model.vocab_size is None or model.vocab_size > MAX_VOCAB:
        changes["vocab_size"] = 93
        changes["make_vocab_size_divisible_by"] = math.lcm(8, p.tp)
    return changes


def expert_changes(config: RunConfig) -> Changes:
    """Few narrow experts, several of them chosen if several were, some of the tokens still over the capacity."""
    model, p = config.model, config.parallel
    if model.num_experts is None:
        return {}
    changes: Changes = {}
    experts, topk = model.num_experts, model.moe_router_topk
    if experts > MAX_EXPERTS:
        experts = _up(MAX_EXPERTS, p.ep)
        topk = min(topk, 3)
        changes |= {"num_experts": experts, "moe_router_topk": topk}
    if model.moe_ffn_hidden_size is not None and model.moe_ffn_hidden_size > MAX_EXPERT_FFN:
        changes["moe_ffn_hidden_size"] = _up(24, 2 * p.expert_tp)
    shared = model.moe_shared_expert_intermediate_size
    if shared is not None and shared > MAX_EXPERT_FFN:
        changes["moe_shared_expert_intermediate_size"] = _up(16, 2 * p.tp)
    capacity = model.moe_expert_capacity_factor
    if capacity is not None and capacity >= experts / topk:
        changes["moe_expert_capacity_factor"] = (1 + experts / topk) / 2
    return changes


def sequence_changes(config: RunConfig) -> Changes:
    """A sequence that cp and tp can cut; window and position limits in proportion to it."""
    model, p, s = config.model, config.parallel, config.training.seq_length
    if s <= MAX_SEQ:
        return {}
    over_tp = p.tp * p.cp if p.sequence_parallel or model.num_experts else 1
    small = _up(24, math.lcm(2 * p.cp if p.cp > 1 else 1, over_tp))
    changes: Changes = {"seq_length": small}
    if model.sliding_window is not None:
        changes["sliding_window"] = max(2, round(model.sliding_window * small / s))
    if model.max_position_embeddings is not None:
        changes["max_position_embeddings"] = max(small, round(model.max_position_embeddings * small / s))
    if model.rope_scaling == "llama3":
        changes["rope_original_max_positions"] = small // 2
    return changes
