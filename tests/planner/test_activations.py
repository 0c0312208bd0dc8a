"""Bytes per rank, including activations, against published formulas and sums by hand.

tests/models/test_activation_bytes.py measures the activations of each kind of layer; these tests cover GPU-only cases."""

from collections.abc import Callable

import pytest

from megalite.config.describe import replace
from megalite.models.shapes import parameter_count
from megalite.partition.activations import (
    deferred_bytes,
    layer_activation_bytes,
    recompute_units,
    recompute_workspace_bytes,
    stage_activation_bytes,
)
from megalite.partition.memory import activation_peaks, rank_memory
from megalite.partition.pipeline import plan_stages
from megalite.pipeline.ir.generators import gpipe, one_f_one_b, zb_h1
from tests.planner.cost.machines import from_flags as config_of

GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 3 --vocab-size 512"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TOKENS, H = 32 * 3, 64
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"


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
        ("--cp 2 --cp-comm-type a2a", lambda a, s, h, t: (34 + 5 * a * s / h) / 2),
    ],
)
def test_layer_activations_equal_the_paper(flags: str, formula: Callable[[int, int, int, int], float]) -> None:
    config = config_of(f"{GPT} {DROPOUT} --bf16 {flags}", 2)
    a, s, h, b = 4, 32, 64, 3
    assert layer_activation_bytes(config) == s * b * h * formula(a, s, h, config.parallel.tp)


# Korthikanti et al. 2022, figure 1, GiB on the first pipeline rank, layers only: tensor parallelism without recompute,
# and sequence parallelism with selective recompute.
FIGURE_1 = [
    ("22B", 48, 6144, 64, 1, 1, 4, 59.25, 9.56),
    ("175B", 96, 12288, 96, 8, 3, 1, 66.84, 12.35),
    ("530B", 105, 20480, 128, 35, 3, 1, 114.02, 23.08),
    ("1T", 128, 25600, 160, 64, 1, 1, 131.25, 26.56),
]


@pytest.mark.parametrize(("name", "layers", "h", "heads", "pp", "vpp", "b", "none", "selective"), FIGURE_1)
def test_activations_equal_figure_1(
    name: str, layers: int, h: int, heads: int, pp: int, vpp: int, b: int, none: float, selective: float
) -> None:
    flags = (
        f"--num-layers {layers} --hidden-size {h} --num-attention-heads {heads} --tp 8 --pp {pp} --vpp {vpp} "
        f"--micro-batch-size {b} --seq-length 2048 --bf16 {DROPOUT}"
    )
    in_flight_layers = layers * (1 + (pp - 1) / (pp * vpp) if vpp > 1 else 1)
    for extra, published in (("", none), ("--sequence-parallel --recompute-granularity selective", selective)):
        config = config_of(f"{flags} {extra}", 8 * pp)
        assert layer_activation_bytes(config) * in_flight_layers / 2**30 == pytest.approx(published, abs=0.006)


@pytest.mark.parametrize(("flags", "copies"), [("--bf16", 0), ("--bf16 --device cpu", 2), ("--fp32", 2)])
def test_grouped_keys_are_repeated_without_a_kernel(flags: str, copies: int) -> None:
    """Two groups of two heads each: keys and values as wide as the queries instead of half as wide."""
    config = config_of(f"{GPT} {flags} --num-query-groups 2", 1)
    kept = {groups: layer_activation_bytes(replace(config, num_query_groups=groups)) for groups in (2, 4)}
    assert kept[4] - kept[2] == (2 - copies) * TOKENS * (H // 2) * (2 if "bf16" in flags else 4)


def test_expert_layers_keep_rows_within_the_capacity() -> None:
    flags = f"{GPT} --bf16 --num-experts 4 --disable-bias-linear"
    whole, half = (
        layer_activation_bytes(config_of(f"{flags} {more}", 1)) for more in ("", "--moe-expert-capacity-factor 0.5")
    )
    # Rows in, input and output of the nonlinearity, rows out, and an index for each.
    assert whole - half == TOKENS * (2 * H + 2 * 2 * 4 * H + 2 * H + 8)
    config = config_of(f"{flags} --moe-layer-freq 2", 1)
    experts, dense = (layer_activation_bytes(config, index) for index in (0, 1))
    assert experts > dense == layer_activation_bytes(config_of(f"{GPT} --bf16", 1))
    (plan,) = plan_stages(config)
    assert stage_activation_bytes(config, plan) == 2 * experts + 2 * dense + TOKENS * (2 * 2 * H + 2 * 512)


@pytest.mark.parametrize(
    ("flags", "units", "kept_whole"),
    [
        ("uniform", [[0], [1], [2], [3]], 0),
        ("uniform --recompute-num-layers 3", [[0, 1, 2], [3]], 0),
        ("block --recompute-num-layers 3", [[0], [1], [2]], 1),
    ],
)
def test_full_recompute_keeps_the_inputs_of_units(flags: str, units: list[list[int]], kept_whole: int) -> None:
    config = config_of(f"{GPT} --bf16 {DROPOUT} {FULL} {flags}", 1)
    (plan,) = plan_stages(config)
    assert [list(unit) for unit in recompute_units(config, plan)] == units
    layer, unit_input = (34 + 10) * TOKENS * H, 2 * TOKENS * H
    ends = TOKENS * (H + 2 * 2 * H + 2 * 512)
    assert stage_activation_bytes(config, plan) == len(units) * unit_input + kept_whole * layer + ends
    workspace = max(len(unit) for unit in units) * layer - unit_input
    assert recompute_workspace_bytes(config, plan) == workspace
    assert rank_memory(config, [plan]).workspace_bytes == workspace


def test_selective_recompute_needs_room_for_one_module() -> None:
    config = config_of(f"{GPT} --bf16 {DROPOUT} {SELECTIVE} layernorm mlp", 1)
    (plan,) = plan_stages(config)
    assert recompute_workspace_bytes(config, plan) == 16 * H * TOKENS
    (plan,) = plan_stages(config_of(f"{GPT} --bf16", 1))
    assert recompute_workspace_bytes(config_of(f"{GPT} --bf16", 1), plan) == 0


@pytest.mark.parametrize(("precision", "total"), [("bf16", 18), ("fp16", 18), ("fp32", 16), ("fp64", 32)])
@pytest.mark.parametrize("sharded", [False, True])
def test_state_of_one_rank(precision: str, total: int, sharded: bool) -> None:
    strategy = "--use-distributed-optimizer" if sharded else ""
    config = config_of(f"{GPT} --precision {precision} {strategy}", 4)
    memory = rank_memory(config, plan_stages(config))
    count = parameter_count(config.model)
    optimizer = {"bf16": 12, "fp16": 12, "fp32": 8, "fp64": 16}[precision]
    assert memory.parameters == count
    expected = (total - optimizer + optimizer / (4 if sharded else 1)) * count
    assert memory.total_bytes == pytest.approx(expected, abs=1)
    assert memory.workspace_bytes == 0


def test_parameters_of_ranks_sum_to_the_model() -> None:
    config = config_of(f"{GPT} --pp 2 --tp 2 --activation swiglu --normalization RMSNorm --disable-bias-linear", 4)
    stages = plan_stages(config)
    on_ranks = sum(2 * rank_memory(config, [plan]).parameters for plan in stages)
    # Both tensor-parallel ranks have norms and positions, both ends of the pipeline the tied embedding.
    norms = (2 * 4 + 1) * 64
    assert on_ranks == parameter_count(config.model) + norms + 32 * 64 + 512 * 64


def test_experts_are_split_over_ep_and_expert_data_parallel_ranks() -> None:
    flags = f"{GPT} --num-experts 4 --use-distributed-optimizer --bf16 --disable-bias-linear"
    one, four = config_of(flags, 4), config_of(f"{flags} --ep 4", 4)
    before, after = (rank_memory(config, plan_stages(config)) for config in (one, four))
    expert = 4 * 2 * 4 * 64 * 256
    assert before.parameters - after.parameters == expert * 3 // 4
    # Divided by dp 4 before, by ep 4 after: the same optimizer state.
    assert before.optimizer_bytes == after.optimizer_bytes


def test_peak_of_a_schedule_with_split_backwards() -> None:
    config = config_of(f"{GPT} --pp 2 --global-batch-size 18", 2)
    stages = plan_stages(config)
    first, last = (stage_activation_bytes(config, plan) for plan in stages)
    assert activation_peaks(config, stages, one_f_one_b(2, 6)) == [2 * first, last]
    assert activation_peaks(config, stages, gpipe(2, 6)) == [6 * first, 6 * last]
    waiting = deferred_bytes(config, stages[1])
    # Rank 1 of ZB-H1: the graph of one microbatch, and the previous one's input that waits for its W.
    assert activation_peaks(config, stages, zb_h1(2, 6))[1] == last + waiting
