"""`Workload`: what the cost formulas know of model, layout and recompute, as numbers or numpy arrays.

Everything broadcasts: a field may be one number or an array over layouts, so that the search prices a million layouts
with the formulas that price one. `workload_of` is the only way from a config to these numbers.

Letters: b micro batch, s sequence, h hidden size, a heads, g key/value heads, d head size, f MLP width, V vocabulary,
E experts, t tensor-parallel size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megalite.config.run import RunConfig
from megalite.partition.activations import ELEMENT_BYTES

Number = Any  # a float, or a numpy array of them over layouts


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """Sizes of one microbatch on one rank's share of a layer. Flags are 0 or 1, so that they can be arrays too."""

    precision: str
    element: float  # bytes of an activation
    batch: Number  # b: sequences of a microbatch
    sequence: Number
    hidden: Number
    heads: Number
    groups: Number
    head_size: Number
    ffn: Number
    gates: Number  # matrices on the way into the MLP's nonlinearity: 2 with a gate
    vocabulary: Number  # padded
    keys: Number  # positions that a query can see, before the causal mask: s, or the window
    rope: Number
    qk_norm: Number
    hidden_dropout: Number
    attention_dropout: Number
    experts: Number  # E of a MoE layer; 0 without
    topk: Number  # experts of a token, after capacity
    expert_ffn: Number
    shared_ffn: Number  # width of the experts that all tokens go through; 0 without
    tp: Number
    cp: Number
    ep: Number
    expert_tp: Number
    dp: Number
    pp: Number
    order_dp_first: Number  # dp varies faster over ranks than pp (1), or slower (0)
    sequence_parallel: Number
    ring: Number  # context parallelism sends keys and values round (1) or exchanges heads (0)
    recompute_full: Number
    recompute_core: Number  # selective recompute of the attention core; the others likewise
    recompute_activation: Number
    recompute_norm: Number
    recompute_mlp: Number
    recompute_moe: Number

    @property
    def tokens(self) -> Number:
        """Of a microbatch on one rank: b·s/cp."""
        return self.batch * self.sequence / self.cp

    @property
    def split(self) -> Number:
        """Ranks over which norms, dropout and residual stream are divided: t with sequence parallelism, else 1."""
        return 1 + (self.tp - 1) * self.sequence_parallel

    @property
    def activation_bytes(self) -> Number:
        """The whole tensor between two layers, b·s/cp·h."""
        return self.tokens * self.hidden * self.element


def workload_of(config: RunConfig) -> Workload:
    """The numbers of one validated config with a known vocabulary."""
    model, p, training = config.model, config.parallel, config.training
    assert p.dp is not None, "validate() resolves dp"
    factor = model.moe_expert_capacity_factor
    modules = set(training.recompute_modules) if training.recompute_granularity == "selective" else set()
    numbers = {
        "element": ELEMENT_BYTES[training.precision],
        "batch": training.micro_batch_size,
        "sequence": training.seq_length,
        "hidden": model.hidden_size,
        "heads": model.num_attention_heads,
        "groups": model.query_groups,
        "head_size": model.head_size,
        "ffn": model.ffn_size,
        "gates": 2 if model.is_gated else 1,
        "vocabulary": model.padded_vocab_size,
        "keys": min(training.seq_length, model.sliding_window or training.seq_length),
        "rope": model.position_embedding_type == "rope",
        "qk_norm": model.qk_norm,
        "hidden_dropout": model.hidden_dropout > 0,
        "attention_dropout": model.attention_dropout > 0,
        "experts": model.num_experts or 0,
        "topk": model.moe_router_topk * (1.0 if factor is None else min(1.0, factor)),
        "expert_ffn": model.expert_ffn_size,
        "shared_ffn": model.moe_shared_expert_intermediate_size or 0,
        "tp": p.tp,
        "cp": p.cp,
        "ep": p.ep,
        "expert_tp": p.expert_tp,
        "dp": p.dp,
        "pp": p.pp,
        "order_dp_first": p.rank_order == "tp-cp-ep-dp-pp",
        "sequence_parallel": p.sequence_parallel,
        "ring": p.cp_comm_type == "p2p",
        "recompute_full": training.recompute_granularity == "full",
        "recompute_core": "core_attn" in modules,
        "recompute_activation": "mlp_act" in modules,
        "recompute_norm": "layernorm" in modules,
        "recompute_mlp": "mlp" in modules,
        "recompute_moe": "moe" in modules,
    }
    return Workload(precision=training.precision, **{name: float(number) for name, number in numbers.items()})


def stacked(workloads: Sequence[Workload]) -> Workload:
    """Several of one precision as one with arrays for fields."""
    first = workloads[0]
    assert all(each.precision == first.precision for each in workloads), "one precision has one peak"
    names = {field.name for field in fields(Workload)} - {"precision", "element"}
    arrays: dict[str, Any] = {name: np.array([getattr(each, name) for each in workloads]) for name in names}
    return replace(first, **arrays)
