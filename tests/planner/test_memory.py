"""Memory against published formulas and against adding up by hand."""

from collections.abc import Callable

import pytest

from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import parameter_count
from megalite.pipeline.ir.actions import Action
from megalite.planner.memory import (
    in_flight_at_peak,
    layer_activation_bytes,
    rank_memory,
    stage_activation_bytes,
    state_bytes_per_parameter,
)
from megalite.planner.stages import plan_stages

GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 3 --vocab-size 512"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"


def config_of(flags: str, world_size: int) -> RunConfig:
    return validate(parse_arguments(flags.split()).config, world_size)


@pytest.mark.parametrize(
    ("flags", "formula"),
    [
        ("", lambda a, s, h, t: 34 + 5 * a * s / h),
        ("--tp 2", lambda a, s, h, t: 10 + 24 / t + 5 * a * s / (h * t)),
        ("--tp 2 --sequence-parallel", lambda a, s, h, t: (34 + 5 * a * s / h) / t),
        ("--tp 2 --recompute-granularity selective", lambda a, s, h, t: 10 + 24 / t),
        ("--tp 2 --sequence-parallel --recompute-granularity selective", lambda a, s, h, t: 34 / t),
        ("--tp 2 --recompute-granularity full", lambda a, s, h, t: 2),
        ("--tp 2 --sequence-parallel --recompute-granularity full", lambda a, s, h, t: 2 / t),
        ("--cp 2", lambda a, s, h, t: (34 + 5 * a * s / h) / 2),
    ],
)
def test_layer_activations_are_the_papers(flags: str, formula: Callable[[int, int, int, int], float]) -> None:
    config = config_of(f"{GPT} {DROPOUT} --bf16 {flags}", 2)
    a, s, h, b = 4, 32, 64, 3
    assert layer_activation_bytes(config) == s * b * h * formula(a, s, h, config.parallel.tp)


# Korthikanti et al. 2022, figure 1, GiB on the first pipeline rank: layers alone, no recomputation with tensor
# parallelism, and sequence parallelism with selective recomputation.
FIGURE_1 = [
    ("22B", 48, 6144, 64, 1, 1, 4, 59.25, 9.56),
    ("175B", 96, 12288, 96, 8, 3, 1, 66.84, 12.35),
    ("530B", 105, 20480, 128, 35, 3, 1, 114.02, 23.08),
    ("1T", 128, 25600, 160, 64, 1, 1, 131.25, 26.56),
]


@pytest.mark.parametrize(("name", "layers", "h", "heads", "pp", "vpp", "b", "none", "selective"), FIGURE_1)
def test_activations_of_figure_1(
    name: str, layers: int, h: int, heads: int, pp: int, vpp: int, b: int, none: float, selective: float
) -> None:
    flags = (
        f"--num-layers {layers} --hidden-size {h} --num-attention-heads {heads} --tp 8 --pp {pp} --vpp {vpp} "
        f"--micro-batch-size {b} --seq-length 2048 --bf16 {DROPOUT}"
    )
    in_flight_layers = layers * (1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1)
    for extra, published in (
        ("", none),
        ("--sequence-parallel --recompute-granularity selective", selective),
    ):
        config = config_of(f"{flags} {extra}", 8 * pp)
        assert layer_activation_bytes(config) * in_flight_layers / 2**30 == pytest.approx(
            published, abs=0.006
        )


def test_fused_attention_keeps_no_scores_and_no_dropout_no_masks() -> None:
    s_b_h = 32 * 3 * 64
    assert layer_activation_bytes(config_of(f"{GPT} --bf16", 1)) == 32 * s_b_h
    assert layer_activation_bytes(config_of(f"{GPT} --fp32", 1)) == 64 * s_b_h
    # Grouped queries and a gated MLP: q 1h, k and v h/2 each, attention out 1h, three times the width of the MLP.
    flags = f"{GPT} --bf16 --num-query-groups 2 --activation swiglu --ffn-hidden-size 64"
    assert layer_activation_bytes(config_of(flags, 1)) == 2 * s_b_h * (4 + 3 + 3)


def test_experts_keep_topk_copies() -> None:
    one, two = (
        layer_activation_bytes(config_of(f"{GPT} --bf16 --num-experts 4 --moe-router-topk {topk}", 1))
        for topk in (1, 2)
    )
    assert two - one == 32 * 3 * (2 * 2 * 64 + 2 * 2 * 256)


def test_ends_of_the_pipeline() -> None:
    config = config_of(f"{GPT} --bf16 --pp 2 --tp 2 --hidden-dropout 0.1", 4)
    first, last = plan_stages(config)
    layer, tokens = layer_activation_bytes(config), 32 * 3
    assert stage_activation_bytes(config, first) == first.num_layers * layer + tokens * 64
    assert (
        stage_activation_bytes(config, last)
        == last.num_layers * layer + tokens * 64 * 4 + tokens * 4 * 512 // 2
    )


@pytest.mark.parametrize(("precision", "total"), [("bf16", 18), ("fp16", 18), ("fp32", 16), ("fp64", 32)])
@pytest.mark.parametrize("sharded", [False, True])
def test_state_of_one_rank(precision: str, total: int, sharded: bool) -> None:
    strategy = "--use-distributed-optimizer" if sharded else ""
    config = config_of(f"{GPT} --precision {precision} {strategy}", 4)
    stages = plan_stages(config)
    memory = rank_memory(config, stages, {0: 2})
    count = parameter_count(config.model)
    optimizer = state_bytes_per_parameter(precision)[2]
    assert memory.parameters == count
    assert sum(state_bytes_per_parameter(precision)) == total
    expected = (total - optimizer + optimizer / (4 if sharded else 1)) * count
    assert memory.total_bytes - memory.activation_bytes == pytest.approx(expected, abs=1)
    assert memory.activation_bytes == 2 * stage_activation_bytes(config, stages[0])
    assert memory.workspace_bytes == 0


def test_parameters_of_ranks_add_up() -> None:
    config = config_of(
        f"{GPT} --pp 2 --tp 2 --activation swiglu --normalization RMSNorm --disable-bias-linear", 4
    )
    stages = plan_stages(config)
    on_ranks = sum(2 * rank_memory(config, [plan], {plan.stage: 0}).parameters for plan in stages)
    # Both tensor-parallel ranks hold norms and positions, both ends of the pipeline the tied embedding.
    norms = (2 * 4 + 1) * 64
    assert on_ranks == parameter_count(config.model) + norms + 32 * 64 + 512 * 64


def test_experts_are_split_over_ep_and_their_own_data_parallel_size() -> None:
    flags = f"{GPT} --num-experts 4 --use-distributed-optimizer --bf16 --disable-bias-linear"
    one, four = config_of(flags, 4), config_of(f"{flags} --ep 4", 4)
    before, after = (rank_memory(config, plan_stages(config), {0: 0}) for config in (one, four))
    expert = 4 * 2 * 4 * 64 * 256
    assert before.parameters - after.parameters == expert * 3 // 4
    # Divided by dp 4 before, by ep 4 after: the same optimizer state.
    assert before.optimizer_bytes == after.optimizer_bytes


def test_full_recompute_needs_room_for_one_layer() -> None:
    config = config_of(f"{GPT} --bf16 --recompute-granularity full", 1)
    memory = rank_memory(config, plan_stages(config), {0: 1})
    assert memory.workspace_bytes == layer_activation_bytes(config, "none") == 32 * 32 * 3 * 64


def test_peak_by_weight_not_by_count() -> None:
    # Two microbatches of the heavy stage 0 outweigh three of stage 1.
    row = [
        Action.parse(text) for text in ["0F0", "0F1", "1F0", "0B0", "0B1", "1F1", "1F2", "1B0", "1B1", "1B2"]
    ]
    assert in_flight_at_peak(row, {0: 10, 1: 1}) == {0: 2, 1: 1}
    assert in_flight_at_peak(row, {0: 1, 1: 10}) == {0: 0, 1: 3}
