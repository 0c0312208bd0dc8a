"""Measured bytes that layers keep for the backward, compared with published formulas and the planner.

Korthikanti et al. 2022, bytes of a layer in 16 bits with dropout, for sequence s, microbatch b, width h, a heads and
tensor-parallel size t: none sbh(34 + 5as/h); t only sbh(10 + 24/t + 5as/ht); with sequence parallelism everything / t;
selective recompute omits 5as/h; full keeps 2sbh."""

import gc
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from benchmarks.live_bytes import LiveBytes, SavedBytes
from megalite.config.model import INDEX_ROWS, LINEAR_CHUNK
from megalite.config.run import RunConfig
from megalite.kernels.registry import Kernels
from megalite.models.context import AuxiliaryLosses
from megalite.models.gpt import GPTStage
from megalite.partition.activations import recompute_workspace_bytes, stage_activation_bytes
from megalite.partition.memory import activation_peaks
from megalite.partition.pipeline import plan_stages, schedule_of
from megalite.partition.stages import StagePlan
from megalite.pipeline.ir.schedule import live_units
from megalite.training.replica import Precision, build_stages
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import Runner, build, tiny_config, words

WITHIN = 0.02
S, B, H, A = 64, 2, 256, 8
SBH = S * B * H
SCORES = 5 * A * S / H
HIERARCHICAL: dict[str, Any] = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": [2, 2]}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
GPT: dict[str, Any] = {
    "num_layers": 1,
    "hidden_size": H,
    "num_attention_heads": A,
    "seq_length": S,
    "micro_batch_size": B,
    "precision": "bf16",
}
LLAMA: dict[str, Any] = words(
    "normalization=RMSNorm activation=swiglu ffn_hidden_size=512 add_bias_linear=false position_embedding_type=rope"
)
MOE: dict[str, Any] = words(
    "num_experts=4 moe_ffn_hidden_size=256 moe_aux_loss_coeff=0.1 moe_z_loss_coeff=0.1 add_bias_linear=false"
)
LATENT: dict[str, Any] = LLAMA | words(
    "multi_latent_attention q_lora_rank=96 kv_lora_rank=64 qk_head_dim=32 qk_pos_emb_head_dim=16 v_head_dim=32 qk_norm"
)
SPARSE: dict[str, Any] = LATENT | words(
    "experimental_attention_variant=dsa dsa_indexer_n_heads=6 dsa_indexer_head_dim=32 dsa_indexer_topk=20"
)
NEXT: dict[str, Any] = LLAMA | words(
    "num_layers=2 num_query_groups=2 attention_output_gate experimental_attention_variant=gated_delta_net "
    "linear_attention_freq=[2] linear_num_key_heads=4 linear_num_value_heads=8 linear_key_head_dim=32 "
    "linear_value_head_dim=48"
)
MAMBA: dict[str, Any] = NEXT | words(
    "num_layers=3 attention_output_gate=false experimental_attention_variant=mamba2 linear_attention_freq=[1,0,1] "
    "no_mlp_freq=[1,0,0]"
)
TP2, SP = {"tp": 2}, {"sequence_parallel": True}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def full(method: str = "uniform", count: int = 1) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}


def layers_alone(context: RankContext, config: RunConfig) -> tuple[GPTStage, StagePlan]:
    """All layers in one stage without embedding and head, built as in training."""
    plan = StagePlan(
        stage=0, rank=0, first_layer=0, last_layer=config.model.num_layers, has_embedding=False, has_head=False
    )
    topology = context.topology_of(config)
    stage = build_stages(config, [plan], topology, Precision.of(config.training.precision), Kernels())[0]
    return stage.train(), plan


def settled(bytes_now: Callable[[], int], *, alone: bool) -> int:
    """Return the number after gloo's threads have released the tensors of finished collectives; one rank has none."""
    least = bytes_now()
    for _ in range(0 if alone else 20):
        time.sleep(0.005)
        least = min(least, bytes_now())
    return least


def kept(context: RankContext, world_size: int, settings: dict[str, Any]) -> dict[str, float]:
    """Return bytes kept by a forward, as live storages and as tensors saved by autograd, and the planned bytes."""
    config, alone = tiny_config(world_size, **{**GPT, **settings}), world_size == 1
    stage, plan = layers_alone(context, config)
    samples = config.training.micro_batch_size
    losses = AuxiliaryLosses(1.0 / samples, 1.0 / (samples * S), 1.0, torch.device("cpu"))
    forward_context = stage.context(tuple(range(samples)), auxiliary=losses)
    shape = stage.activation_shape(samples)
    with SavedBytes([*stage.parameters(), *forward_context.tables]) as saved:
        x = torch.ones(shape, dtype=torch.bfloat16).requires_grad_()
        y = stage(x, forward_context)
    held = saved.now
    del x, y
    assert settled(lambda: saved.now, alone=alone) == 0
    gc.disable()  # later objects are in the young generation: collecting only that is cheap
    with LiveBytes() as live:
        x = torch.randn(shape, dtype=torch.bfloat16).requires_grad_()
        y = stage(x, forward_context)
        alive = settled(lambda: live.now - y.untyped_storage().nbytes(), alone=alone)
        gc.collect(0)
        gc.enable()
        assert live.now - y.untyped_storage().nbytes() == alive, "only the garbage collector freed something"
        y.backward(torch.ones_like(y))
    return {"alive": alive, "held": held, "planned": stage_activation_bytes(config, plan)}


def measured(world_size: int, settings: dict[str, Any]) -> dict[str, float]:
    """Rank 0's `kept`, after all ranks agreed."""
    if world_size == 1:
        return kept(RankContext(0, {}), 1, settings)
    ranks = run_ranks(world_size, kept, world_size, settings)
    for rank in ranks:
        assert rank["planned"] == ranks[0]["planned"]
    return max(ranks, key=lambda rank: rank["alive"])


@pytest.mark.parametrize(
    ("settings", "formula"),
    [
        ({}, lambda t: 34 + SCORES),
        (TP2, lambda t: 10 + 24 / t + SCORES / t),
        ({**TP2, **SP}, lambda t: (34 + SCORES) / t),
        ({**TP2, **SP, **selective("core_attn")}, lambda t: 34 / t),
        ({**TP2, **selective("core_attn")}, lambda t: 10 + 24 / t),
        (full(), lambda t: 2),
        ({**TP2, **SP, **full()}, lambda t: 2 / t),
        (selective("mlp_act"), lambda t: 34 + SCORES - 8),
        (selective("layernorm"), lambda t: 34 + SCORES - 4),
        (selective("mlp"), lambda t: 34 + SCORES - 16),
        (selective("core_attn", "mlp", "layernorm"), lambda t: 34 - 16 - 4),
        ({**TP2, **SP, **selective("layernorm", "mlp_act")}, lambda t: (22 + SCORES) / t),
        ({"num_layers": 5, **full("uniform", 2)}, lambda t: 2 * 3),
        ({"num_layers": 5, **full("block", 2)}, lambda t: 2 * 2 + 3 * (34 + SCORES)),
    ],
    ids=lambda value: "" if callable(value) else str(value),
)
def test_bytes_of_a_layer_equal_the_formula(settings: dict[str, Any], formula: Callable[[int], float]) -> None:
    t = settings.get("tp", 1)
    found = measured(t, {**DROPOUT, **settings})
    assert found["alive"] == pytest.approx(SBH * formula(t), rel=WITHIN)
    assert found["planned"] == pytest.approx(found["alive"], rel=WITHIN)
    if "layernorm" not in settings.get("recompute_modules", []):
        # Code that omits tensors has its own hooks, which hide them from these.
        assert found["held"] == found["alive"], "live and saved tensors differ"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**LLAMA, "num_query_groups": 2, "sliding_window": 32, "window_attn_skip_freq": [2]},
        {**LLAMA, "num_query_groups": 2, "attn_logit_softcapping": 5.0, "softmax_scale": 0.2, "post_norms": True},
        {**LLAMA, "num_query_groups": 2, "softmax_type": "learnable"},
        {**LLAMA, **DROPOUT, "softmax_type": "off-by-one", **TP2},
        {**LLAMA, "post_norms": True, "hidden_dropout": 0.1, "residual_multiplier": 0.3, **TP2, **SP},
        {**LLAMA, "post_norms": True, "pre_norms": False, "qk_norm": True, "qk_norm_all_heads": True},
        {**LLAMA, "num_query_groups": 2, "qk_norm": True, "residual_multiplier": 0.3, "tp": 4},
        {**LLAMA, "num_query_groups": 2, "cp": 4, "cp_comm_type": "a2a"},
        {**LLAMA, **selective("mlp_act", "layernorm"), "activation": "geglu", "norm_zero_centered": True},
        {**LATENT, "q_lora_rank": None, "qk_norm": False, "v_head_dim": 48},
        {**LATENT, **TP2, **SP, **selective("mla_up_proj", "layernorm")},
        {**SPARSE, "q_lora_rank": None, "v_head_dim": 48, "num_layers": 2},
        {**SPARSE, **TP2, **SP, **selective("core_attn", "layernorm")},
        {**SPARSE, **TP2, "cp": 2, "cp_comm_type": "allgather"},
        {**SPARSE, "cp": 2, "cp_comm_type": "allgather", **selective("mla_up_proj")},
        {**LLAMA, "cp": 2, "cp_comm_type": "allgather"},
        {**LATENT, "cp": 4, **HIERARCHICAL, **selective("mla_up_proj", "core_attn")},
        {**LLAMA, "num_query_groups": 1, "cp": 4, **HIERARCHICAL, **DROPOUT},
        {**LLAMA, "qk_norm": True, "cp": 2, **DROPOUT, **selective("core_attn")},
        {**NEXT, "qk_norm": True},
        {**NEXT, **TP2, **SP, "post_norms": True, "hidden_dropout": 0.1},
        {**NEXT, "cp": 2, "cp_comm_type": "a2a", **selective("core_attn", "layernorm")},
        {**MAMBA, **TP2, **SP, **selective("mlp", "layernorm")},
        {**MOE, "activation": "swiglu", "moe_router_topk": 1, "moe_router_pre_softmax": True},
        {**MOE, **selective("moe")},
        {**MOE, **selective("mlp_act", "layernorm"), "moe_shared_expert_intermediate_size": 512},
        {**MOE, **TP2, **SP, "activation": "swiglu", "moe_shared_expert_intermediate_size": 512},
        {**MOE, **TP2, **selective("shared_experts"), "moe_shared_expert_intermediate_size": 512},
        {**MOE, **TP2, **SP, "moe_expert_capacity_factor": 0.7, "moe_pad_expert_input_to_capacity": True},
    ],
    ids=str,
)
def test_bytes_of_other_layers_equal_the_plan(settings: dict[str, Any]) -> None:
    found = measured(settings.get("tp", 1) * settings.get("cp", 1), settings)
    assert found["planned"] == pytest.approx(found["alive"], rel=WITHIN)


@pytest.mark.parametrize(
    "settings",
    [{"dp": 2, "ep": 2}, {**TP2, **SP, "etp": 2}, {**TP2, "etp": 1, "ep": 2, "activation": "swiglu"}],
    ids=str,
)
def test_bytes_of_experts_on_several_ranks_equal_the_plan(settings: dict[str, Any]) -> None:
    # The rows of one rank depend on the routing; over all ranks their number is fixed.
    ranks = run_ranks(2, kept, 2, {**MOE, **settings})
    alive = sum(rank["alive"] for rank in ranks) / 2
    assert ranks[0]["planned"] == pytest.approx(alive, rel=WITHIN)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("variant", ["gated_delta_net", "mamba2"])
def test_bytes_that_linear_attention_recomputes_equal_the_plan(variant: str, precision: str) -> None:
    changes = {"linear_attention_freq": [1, 1], "attention_output_gate": False, "seq_length": 4 * LINEAR_CHUNK}
    changes |= {"experimental_attention_variant": variant, "precision": precision}
    config = tiny_config(1, **{**GPT, **NEXT, **changes})
    stage, plan = layers_alone(RankContext(0, {}), config)
    layer: Any = cast(Any, stage.layers["0"]).attention
    packed = torch.ones(4 * LINEAR_CHUNK, B, 4, sum(layer.channels), dtype=stage.factory.dtype).requires_grad_()
    with SavedBytes([packed, *stage.parameters()]) as saved:
        result = layer._core(packed, stage.context())
    assert recompute_workspace_bytes(config, plan) == pytest.approx(saved.now, rel=WITHIN) and result.shape[2] == 8


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_that_sparse_attention_recomputes_equal_the_plan(precision: str) -> None:
    config = tiny_config(1, **{**GPT, **SPARSE, "seq_length": 2 * INDEX_ROWS, "precision": precision})
    stage, plan = layers_alone(RankContext(0, {}), config)
    layer: Any = cast(Any, stage.layers["0"]).attention
    shapes = (B, A, INDEX_ROWS, 48), (B, INDEX_ROWS, 6, 32), (B, INDEX_ROWS, 6)
    shapes = *shapes, (B, A, 2 * INDEX_ROWS, 48), (B, A, 2 * INDEX_ROWS, 48), (B, 2 * INDEX_ROWS, 32)
    given = [torch.ones(*shape, dtype=stage.factory.dtype).requires_grad_() for shape in shapes]
    losses = AuxiliaryLosses(1.0, 1.0, 1.0, torch.device("cpu"))
    context = stage.context(auxiliary=losses)
    with SavedBytes([*given, *stage.parameters()]) as saved:
        result = layer._rows(*given[:3], context.positions[INDEX_ROWS:], *given[3:], context)
    assert recompute_workspace_bytes(config, plan) == pytest.approx(saved.now, rel=WITHIN) and result.shape[3] == 32


def peak(context: RankContext, world_size: int, settings: dict[str, Any]) -> dict[str, float]:
    """Return the maximum that autograd holds in a training step, and the maximum alive at the end of a forward."""
    config = tiny_config(world_size, **settings)
    runner = Runner(build(context, config))
    stages = runner.replica.stages.values()
    runner.step()
    at_ends: list[int] = []
    live = LiveBytes()

    def note(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        at_ends.append(live.now - output.untyped_storage().nbytes())

    tables = [table for stage in stages for table in stage.context((0, 1)).rope or ()]
    with SavedBytes([parameter for stage in stages for parameter in stage.parameters()] + tables) as saved:
        runner.step()
    handles = [stage.register_forward_hook(note) for stage in stages]
    with live:
        runner.step()
    for handle in handles:
        handle.remove()
    rank = runner.replica.topology.pp.rank
    counts = config.training.global_batch_size or 0
    schedule = schedule_of(config, counts // config.training.micro_batch_size)
    planned = activation_peaks(config, plan_stages(config), schedule)[rank]
    in_flight = max(units.activations for units in live_units(schedule.actions[rank]))
    message = next(iter(stages)).activation_shape(config.training.micro_batch_size)
    return {
        "held": saved.peak,
        "alive": max(at_ends),
        "planned": planned,
        "in_flight": in_flight,
        "message": 2 * message[0] * message[1] * message[2],
    }


PIPELINE: dict[str, Any] = DROPOUT | words(
    "num_layers=4 hidden_size=256 num_attention_heads=8 precision=bf16 micro_batch_size=2 global_batch_size=6 pp=2 "
    "pipeline_schedule=1f1b pipeline_layers=[2,2]"
)


@pytest.mark.parametrize(
    ("settings", "in_flight"),
    [
        (selective("core_attn", "layernorm"), [2, 1]),
        (full("block", 1), [2, 1]),
        ({**LLAMA, "mtp_num_layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}, [2, 1]),
        (
            {**LLAMA, "mtp_num_layers": 2, "logits_scaling": 4.0, "hidden_dropout": 0.0, "attention_dropout": 0.0},
            [2, 1],
        ),
        ({**LLAMA, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "logits_scaling": 4.0}, [2, 1]),
    ],
    ids=str,
)
def test_peak_of_a_step_equals_the_plan(settings: dict[str, Any], in_flight: list[int]) -> None:
    ranks = run_ranks(2, peak, 2, {**PIPELINE, **settings})
    assert [rank["in_flight"] for rank in ranks] == in_flight
    for rank in ranks:
        if "layernorm" not in settings.get("recompute_modules", []):
            assert rank["held"] == pytest.approx(rank["planned"], rel=WITHIN)
        # Live storages include messages in flight: at most one per microbatch, plus two.
        assert rank["planned"] * (1 - WITHIN) <= rank["alive"]
        assert rank["alive"] <= rank["planned"] * (1 + WITHIN) + (rank["in_flight"] + 2) * rank["message"]
