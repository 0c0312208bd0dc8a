"""Bytes of activations against published formulas and against adding up by hand.

tests/models/test_activation_bytes.py measures the model against the same functions.
"""

from collections.abc import Callable

import pytest

from megalite.config.describe import replace
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.partition.activations import (
    layer_activation_bytes,
    recompute_units,
    recompute_workspace_bytes,
    stage_activation_bytes,
)
from megalite.partition.memory import rank_memory
from megalite.partition.pipeline import plan_stages

GPT = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 3 --vocab-size 512"
DROPOUT = "--hidden-dropout 0.1 --attention-dropout 0.1"
TOKENS, H, HEADS = 32 * 3, 64, 4
LOGSUMEXP = 4 * HEADS * TOKENS
SELECTIVE = "--recompute-granularity selective --recompute-modules"
FULL = "--recompute-granularity full --recompute-method"


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
        ("--cp 2 --cp-comm-type a2a", lambda a, s, h, t: (34 + 5 * a * s / h) / 2),
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
    for extra, published in (("", none), ("--sequence-parallel --recompute-granularity selective", selective)):
        config = config_of(f"{flags} {extra}", 8 * pp)
        assert layer_activation_bytes(config) * in_flight_layers / 2**30 == pytest.approx(published, abs=0.006)


def test_fused_attention_keeps_its_logsumexp_and_no_dropout_no_masks() -> None:
    assert layer_activation_bytes(config_of(f"{GPT} --bf16", 1)) == 32 * TOKENS * H + LOGSUMEXP
    assert layer_activation_bytes(config_of(f"{GPT} --fp32", 1)) == 64 * TOKENS * H + LOGSUMEXP
    # Grouped queries and a gated MLP: q 1h, k and v h/2 each, attention out 1h, three times the width of the MLP.
    flags = f"{GPT} --bf16 --num-query-groups 2 --activation geglu --ffn-hidden-size 64"
    assert layer_activation_bytes(config_of(flags, 1)) == 2 * TOKENS * H * (4 + 3 + 3) + LOGSUMEXP


@pytest.mark.parametrize(
    ("modules", "freed"),
    # In units of s·b·h, in which the scores are 5·4·32/64.
    [("core_attn", 10), ("mlp_act", 8), ("mlp", 16), ("layernorm", 4), ("core_attn mlp layernorm", 30)],
)
def test_selected_modules_free_their_part(modules: str, freed: int) -> None:
    whole = layer_activation_bytes(config_of(f"{GPT} --bf16 {DROPOUT}", 1))
    config = config_of(f"{GPT} --bf16 {DROPOUT} {SELECTIVE} {modules}", 1)
    assert whole - layer_activation_bytes(config) == freed * TOKENS * H


def test_heads_exchanged_over_cp_are_kept_twice() -> None:
    ring, exchanged = (
        layer_activation_bytes(config_of(f"{GPT} --bf16 --cp 2 --cp-comm-type {kind}", 2)) for kind in ("p2p", "a2a")
    )
    assert exchanged - ring == 2 * H * TOKENS // 2
    # With dropout the ring needs every rank's keys and values where the scores are: the others' and its own.
    ring, exchanged = (
        layer_activation_bytes(config_of(f"{GPT} {DROPOUT} --bf16 --cp 2 --cp-comm-type {kind}", 2))
        for kind in ("p2p", "a2a")
    )
    assert ring - exchanged == 2 * (2 * H) * TOKENS


@pytest.mark.parametrize(
    ("flags", "copies"),
    [
        ("--bf16", 0),
        ("--bf16 --device cpu", 2),
        ("--fp32", 2),
        ("--fp32 --cp 2", 0),
        ("--fp32 --cp 2 --cp-comm-type a2a", 2),
        ("--fp32 --sliding-window 16 --position-embedding-type rope", 0),
        ("--fp32 --reset-attention-mask", 0),
        (f"--fp32 {SELECTIVE} core_attn", 0),
    ],
)
def test_grouped_keys_are_repeated_where_no_kernel_takes_them(flags: str, copies: int) -> None:
    """Two groups of two heads each: keys and values as wide as the queries instead of half as wide."""
    config = config_of(f"{GPT} {flags} --num-query-groups 2", 2)
    element = 2 if "bf16" in flags else 4
    kept = {groups: layer_activation_bytes(replace(config, num_query_groups=groups)) for groups in (2, 4)}
    tokens = TOKENS // config.parallel.cp
    assert kept[4] - kept[2] == (2 - copies) * tokens * (H // 2) * element


def test_query_and_key_norms_keep_what_they_were_given() -> None:
    plain, normed = (layer_activation_bytes(config_of(f"{GPT} --bf16 {flag}", 1)) for flag in ("", "--qk-layernorm"))
    assert normed - plain == 2 * 2 * H * TOKENS + 2 * 4 * 8 * TOKENS  # with two numbers for each of eight heads


def test_experts_keep_topk_copies() -> None:
    flags = f"{GPT} --bf16 --num-experts 4 --disable-bias-linear --moe-router-topk"
    two, three = (layer_activation_bytes(config_of(f"{flags} {topk}", 1)) for topk in (2, 3))
    # Rows in, the nonlinearity's input and output, rows out; a weight, an expert and a place of each.
    assert three - two == TOKENS * (2 * H + 2 * 2 * 4 * H + 2 * H + 4 + 8 + 8)
    half = layer_activation_bytes(config_of(f"{flags} 2 --moe-expert-capacity-factor 0.5", 1))
    assert two - half == TOKENS * (2 * H + 2 * 2 * 4 * H + 2 * H + 8)
    inside = layer_activation_bytes(config_of(f"{flags} 2 {SELECTIVE} moe", 1))
    dense = layer_activation_bytes(config_of(f"{GPT} --bf16 {SELECTIVE} mlp", 1))
    assert inside == dense


def test_layers_with_and_without_experts_differ() -> None:
    flags = f"{GPT} --bf16 --num-experts 4 --disable-bias-linear --moe-layer-freq 2"
    config = config_of(flags, 1)
    experts, dense = (layer_activation_bytes(config, index) for index in (0, 1))
    assert experts > dense == layer_activation_bytes(config_of(f"{GPT} --bf16", 1))
    (plan,) = plan_stages(config)
    ends = TOKENS * (2 * 2 * H + 2 * 512)
    assert stage_activation_bytes(config, plan) == 2 * experts + 2 * dense + ends


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
    assert rank_memory(config, [plan], 0).workspace_bytes == workspace


def test_selective_recompute_needs_room_for_one_module() -> None:
    config = config_of(f"{GPT} --bf16 {DROPOUT} {SELECTIVE} layernorm mlp", 1)
    (plan,) = plan_stages(config)
    assert recompute_workspace_bytes(config, plan) == 16 * H * TOKENS
    (plan,) = plan_stages(config_of(f"{GPT} --bf16", 1))
    assert recompute_workspace_bytes(config_of(f"{GPT} --bf16", 1), plan) == 0


def test_ends_of_the_pipeline() -> None:
    config = config_of(f"{GPT} --bf16 --pp 2 --tp 2 --hidden-dropout 0.1", 4)
    first, last = plan_stages(config)
    layer, tokens = layer_activation_bytes(config), 32 * 3
    assert stage_activation_bytes(config, first) == first.num_layers * layer + tokens * 64
    assert stage_activation_bytes(config, last) == last.num_layers * layer + tokens * 64 * 4 + tokens * 2 * 512 // 2
