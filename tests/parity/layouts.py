"""The stated list of layouts whose numbers must be those of one rank."""

from typing import Any

from tests.support.tiny import LLAMA

GPT: dict[str, Any] = {}
"""Learned positions, LayerNorm, GELU, biases, tied embeddings."""

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt": GPT,
    "llama": LLAMA,
    "gpt-untied": {"tie_embeddings": False},
    "llama-tied": {**LLAMA, "tie_embeddings": True},
    "gpt-dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "llama-dropout": {**LLAMA, "hidden_dropout": 0.1},
    "gpt-7-layers": {"num_layers": 7},
    "llama-8-layers": {**LLAMA, "num_layers": 8},
}

Z1: dict[str, Any] = {"dp_strategy": "distributed-optimizer"}
SP: dict[str, Any] = {"sequence_parallel": True}
SELECTIVE: dict[str, Any] = {"recompute_granularity": "selective"}
FULL: dict[str, Any] = {"recompute_granularity": "full"}
LATE: dict[str, Any] = {"overlap_grad_reduce": False}


def _row(
    family: str, tp: int = 1, pp: int = 1, vpp: int = 1, dp: int = 1, **more: Any
) -> tuple[str, dict[str, Any]]:
    return family, {"tp": tp, "pp": pp, "vpp": vpp, "dp": dp, **more}


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    # data parallel alone
    _row("gpt", dp=2),
    _row("gpt", dp=4, **Z1),
    _row("gpt", dp=8),
    _row("llama", dp=2, **Z1),
    _row("llama", dp=4, **LATE),
    _row("llama", dp=8, **Z1, **LATE),
    _row("gpt-dropout", dp=2, micro_batch_size=2),
    _row("llama-dropout", dp=4, **Z1, micro_batch_size=2),
    # tensor parallel alone
    _row("gpt", tp=2),
    _row("gpt", tp=2, **SP),
    _row("gpt", tp=4),
    _row("gpt", tp=4, **SP),
    _row("llama", tp=2, **SP),
    _row("llama", tp=4),
    _row("llama-tied", tp=4, **SP, micro_batch_size=2),
    _row("gpt-dropout", tp=2),
    _row("gpt-dropout", tp=4, **SP),
    _row("llama-dropout", tp=2, **SP, **FULL),
    # pipeline alone
    _row("gpt", pp=2),
    _row("gpt", pp=2, pipeline_schedule="gpipe"),
    _row("gpt", pp=4),
    _row("gpt", pp=4, pipeline_schedule="gpipe"),
    _row("llama", pp=2, vpp=2),
    _row("gpt", pp=2, vpp=2),
    _row("gpt", pp=2, vpp=2, microbatch_group_size_per_virtual_pipeline_stage=4),
    _row("gpt-7-layers", pp=3),
    _row("gpt-7-layers", pp=2, vpp=3),
    _row("gpt-7-layers", pp=2, vpp=2, pipeline_layers=[1, 3, 1, 2]),
    _row("gpt-7-layers", pp=7),
    _row("gpt-7-layers", pp=2, vpp=2, pipeline_layers=[3, 2, 2, 0], dp=2, **Z1),
    _row("llama", tp=2, pp=2, pipeline_layers=[4, 0], **SP),
    _row("llama-8-layers", pp=8),
    _row("llama-8-layers", pp=4, vpp=2),
    _row("llama-8-layers", pp=2, vpp=4),
    _row("gpt-dropout", pp=2, vpp=2, **SELECTIVE),
    _row("gpt-dropout", pp=4, **FULL),
    _row("llama-tied", pp=2, pipeline_schedule="gpipe"),
    _row("gpt-untied", pp=4),
    # tensor and data
    _row("gpt", tp=2, dp=2),
    _row("gpt", tp=2, dp=2, **SP, **Z1),
    _row("gpt", tp=2, dp=4, **Z1),
    _row("gpt", tp=4, dp=2, **SP),
    _row("llama", tp=2, dp=2, **Z1, **SELECTIVE),
    _row("llama", tp=2, dp=4, **SP, **Z1, **LATE),
    _row("llama", tp=4, dp=2, **Z1, **FULL),
    _row("gpt-dropout", tp=2, dp=2, **SP, **Z1, **FULL),
    # tensor and pipeline
    _row("gpt", tp=2, pp=2),
    _row("gpt", tp=2, pp=2, **SP),
    _row("gpt", tp=2, pp=2, vpp=2, **SP),
    _row("gpt", tp=2, pp=4),
    _row("gpt", tp=4, pp=2, **SP, pipeline_schedule="gpipe"),
    _row("llama", tp=2, pp=2, vpp=2),
    _row("llama", tp=4, pp=2, **SP),
    _row("llama-8-layers", tp=2, pp=4, vpp=2, **SP),
    _row("gpt-dropout", tp=2, pp=2, vpp=2, **SP, **SELECTIVE),
    _row("llama-tied", tp=2, pp=2, rank_order="tp-cp-ep-pp-dp"),
    # pipeline and data
    _row("gpt", pp=2, dp=2),
    _row("gpt", pp=2, dp=2, **Z1),
    _row("gpt", pp=2, vpp=2, dp=2, **Z1),
    _row("gpt", pp=2, vpp=2, dp=4, **Z1),
    _row("gpt", pp=4, dp=2, **Z1, pipeline_schedule="gpipe"),
    _row("gpt", pp=2, dp=2, **Z1, rank_order="tp-cp-ep-pp-dp"),
    _row("gpt-untied", pp=2, vpp=2, dp=2),
    _row("gpt-7-layers", pp=3, dp=2, **Z1),
    _row("llama", pp=2, dp=4, **Z1),
    _row("llama", pp=4, dp=2, **LATE),
    _row("llama-dropout", pp=2, vpp=2, dp=2, **Z1, **FULL, micro_batch_size=2),
    # all three
    _row("gpt", tp=2, pp=2, dp=2),
    _row("gpt", tp=2, pp=2, dp=2, **SP),
    _row("gpt", tp=2, pp=2, dp=2, **SP, **Z1),
    _row("gpt", tp=2, pp=2, vpp=2, dp=2, **SP, **Z1),
    _row("gpt", tp=2, pp=2, vpp=2, dp=2, **SP, **Z1, **FULL),
    _row("gpt", tp=2, pp=2, vpp=2, dp=2, **SP, rank_order="tp-cp-ep-pp-dp"),
    _row("gpt-untied", tp=2, pp=2, dp=2, **Z1, pipeline_schedule="gpipe"),
    _row("gpt-dropout", tp=2, pp=2, vpp=2, dp=2, **SP, **Z1),
    _row("llama", tp=2, pp=2, dp=2, **SP, **Z1),
    _row("llama", tp=2, pp=2, vpp=2, dp=2, **Z1),
    _row("llama-tied", tp=2, pp=2, vpp=2, dp=2, **SP, **Z1, **SELECTIVE),
]
