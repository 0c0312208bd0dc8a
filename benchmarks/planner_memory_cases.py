"""The models of benchmarks/planner_memory.py: those of the paper's figure, and tiny ones that run."""

from typing import Any

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.published_memory import GPTShape

FIGURE_1: dict[str, tuple[GPTShape, int, tuple[float, float, float]]] = {
    "22B": (
        GPTShape(layers=48, hidden=6144, heads=64, sequence=2048, micro_batch=4, tp=8),
        4,
        (45.56, 59.25, 9.56),
    ),
    "175B": (
        GPTShape(layers=96, hidden=12288, heads=96, sequence=2048, micro_batch=1, tp=8, pp=8, vpp=3),
        64,
        (45.56, 66.84, 12.35),
    ),
    "530B": (
        GPTShape(layers=105, hidden=20480, heads=128, sequence=2048, micro_batch=1, tp=8, pp=35, vpp=3),
        280,
        (31.64, 114.02, 23.08),
    ),
    "1T": (
        GPTShape(layers=128, hidden=25600, heads=160, sequence=2048, micro_batch=1, tp=8, pp=64),
        512,
        (32.96, 131.25, 26.56),
    ),
}
"""Model -> shape, global batch, and GiB on the first rank: parameters and optimizer, activations with tensor parallelism
alone, activations with sequence parallelism and selective recompute."""

TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "seq_length": 128,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "precision": "bf16",
    "device": "cpu",
    "eod_mask_loss": True,
}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "ffn_hidden_size": 512,
    "num_query_groups": 2,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "tie_embeddings": False,
}
MOE: dict[str, Any] = {
    "num_experts": 4,
    "moe_ffn_hidden_size": 256,
    "add_bias_linear": False,
    "moe_aux_loss_coeff": 0.1,
}


def _selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def _full(method: str, count: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": count,
    }


PP2: dict[str, Any] = {"pp": 2, "pipeline_layers": [2, 2]}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "gpt": (1, {}),
    "gpt, dropout": (1, DROPOUT),
    "gpt, dropout, core_attn recomputed": (1, {**DROPOUT, **_selective("core_attn")}),
    "gpt, mlp and core_attn recomputed": (1, _selective("mlp", "core_attn")),
    "gpt, mlp_act recomputed": (1, _selective("mlp_act")),
    "gpt, full recompute by two": (1, _full("uniform", 2)),
    "gpt, full recompute of two": (1, _full("block", 2)),
    "gpt, fp32, sgd": (1, {"precision": "fp32", "optimizer": "sgd"}),
    "gpt, moments in bf16": (
        1,
        {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "stochastic_rounding": True},
    ),
    "llama": (1, LLAMA),
    "llama, mlp recomputed": (1, {**LLAMA, **_selective("mlp")}),
    "experts": (1, MOE),
    "experts, moe recomputed": (1, {**MOE, **_selective("moe")}),
    "gpt, tp 2": (2, {"tp": 2, **DROPOUT}),
    "llama, tp 2, sequence parallel": (2, {**LLAMA, "tp": 2, "sequence_parallel": True}),
    "gpt, tp 2, sequence parallel, core_attn": (
        2,
        {"tp": 2, "sequence_parallel": True, **DROPOUT, **_selective("core_attn")},
    ),
    "gpt, pp 2": (2, PP2),
    "gpt, pp 2, gpipe": (2, {**PP2, "pipeline_schedule": "gpipe"}),
    "gpt, pp 2, vpp 2": (2, {"pp": 2, "vpp": 2, "pipeline_layers": [1, 1, 1, 1]}),
    "gpt, pp 2, full recompute": (2, {**PP2, **_full("uniform", 1)}),
    "llama, cp 2": (2, {**LLAMA, "cp": 2}),
    "gpt, dp 2, zero-1": (2, {"dp_strategy": "distributed-optimizer"}),
    "gpt, dp 2, zero-3": (2, {"dp_strategy": "fully-sharded"}),
}
"""Name -> ranks, and what is not as in TINY."""


def tiny(name: str) -> RunConfig:
    """The validated config of a case."""
    world_size, changes = CASES[name]
    return validate(replace(RunConfig(), **{**TINY, **changes}), world_size)


def published_model(shape: GPTShape, batch: int, plain: bool) -> RunConfig:
    """A model of the figure as a config; `plain`: tensor parallelism alone, else with sequence parallelism and selective
    recompute."""
    changes: dict[str, Any] = {
        "num_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "seq_length": shape.sequence,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": batch,
        "vocab_size": 51200,
        "precision": "bf16",
        "tp": shape.tp,
        "pp": shape.pp,
        "vpp": shape.vpp,
        "pipeline_layers": [shape.layers // (shape.pp * shape.vpp)] * (shape.pp * shape.vpp),
        **DROPOUT,
        **({} if plain else {"sequence_parallel": True, **_selective("core_attn")}),
    }
    return validate(replace(RunConfig(), **changes), shape.tp * shape.pp)
