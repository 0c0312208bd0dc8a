"""The cut into stages, their costs and recompute, and the resulting bubble."""

import pytest

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.models.shapes import head_forward_flops, layer_forward_flops, stage_shapes
from megalite.partition import memory, pipeline
from megalite.partition.activations import stage_sizes
from megalite.partition.memory import rank_memory
from megalite.partition.pipeline import _recompute_flops, costs_of, lowered, plan_stages, schedule_of
from megalite.partition.stages import shapes_of_rank, stage_forward_flops
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate
from megalite.planner.cost import step
from tests.planner.cost.machines import BASE, STACK
from tests.planner.cost.machines import from_flags as config_of

GPT = "--hidden-size 64 --seq-length 32 --vocab-size 128"


def test_stage_with_a_heavy_head_has_fewer_layers() -> None:
    light = config_of(f"{GPT} --num-layers 8 --pp 2", 2)
    heavy = config_of("--hidden-size 64 --seq-length 32 --vocab-size 4096 --num-layers 8 --pp 2", 2)
    assert [plan.num_layers for plan in plan_stages(light)] == [4, 4]
    first, last = plan_stages(heavy)
    assert first.num_layers > last.num_layers
    layer, head = layer_forward_flops(heavy.model, 0, 32), head_forward_flops(heavy.model)
    assert stage_forward_flops(heavy, first) == first.num_layers * layer
    assert stage_forward_flops(heavy, last) == last.num_layers * layer + head
    # No other cut has a faster slowest stage.
    slowest = max(stage_forward_flops(heavy, plan) for plan in (first, last))
    assert slowest == min(max(cut * layer, (8 - cut) * layer + head) for cut in range(1, 8))


def test_stages_cover_the_layers_in_order() -> None:
    config = config_of(f"{GPT} --num-layers 9 --pp 2 --vpp 2", 2)
    stages = plan_stages(config)
    assert [(plan.rank, plan.has_embedding, plan.has_head) for plan in stages] == [
        *((0, True, False), (1, False, False), (0, False, False), (1, False, True))
    ]
    assert [layer for plan in stages for layer in range(plan.first_layer, plan.last_layer)] == list(range(9))
    by_hand = config_of(f"{GPT} --num-layers 4 --pp 2 --pipeline-layers 3,1", 2)
    assert [plan.num_layers for plan in plan_stages(by_hand)] == [3, 1]
    alone = config_of(f"{GPT} --num-layers 2", 1)  # with the tied embedding once
    assert shapes_of_rank(alone, list(plan_stages(alone))) == stage_shapes(alone.model, 0, 2, True, True)


def even(pp: int, vpp: int, schedule: str = "1f1b") -> RunConfig:
    """A config with equal stage costs, except for a negligible head."""
    flags = (
        f"--hidden-size 1024 --seq-length 32 --vocab-size 8 --make-vocab-size-divisible-by 8 --num-layers {pp * vpp}"
    )
    return config_of(f"{flags} --pp {pp} --vpp {vpp} --pipeline-schedule {schedule}", pp)


@pytest.mark.parametrize(
    ("pp", "vpp", "schedule"),
    [(4, 1, "1f1b"), (4, 1, "gpipe"), (4, 2, "interleaved"), (4, 2, "looped-bfs"), (1, 1, "1f1b")],
)
def test_bubble_equals_the_published_formula(pp: int, vpp: int, schedule: str) -> None:
    config = even(pp, vpp, schedule)
    idle = (pp - 1) / vpp
    assert pipeline.bubble_fraction(config, plan_stages(config), 8) == pytest.approx(idle / (8 + idle), abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "microbatches"),
    [
        ("--pp 4 --num-layers 9 --pipeline-schedule 1f1b", 41),
        ("--pp 4 --vpp 2 --num-layers 11 --microbatch-group-size 6", 42),
        ("--pp 2 --vpp 2 --num-layers 7 --pipeline-schedule looped-bfs --recompute-granularity full", 33),
    ],
)
def test_long_steps_are_extrapolated_exactly(flags: str, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(
        f"--hidden-size 64 --seq-length 32 --vocab-size 512 {flags} --global-batch-size {microbatches}",
        4 if "--pp 4" in flags else 2,
    )
    stages = plan_stages(config)
    whole = pipeline.bubble_fraction(config, stages, microbatches)
    monkeypatch.setattr(pipeline, "SIMULATED_ACTIONS", 1)
    run = pipeline.Clock(config, len(stages), microbatches).run(costs_of(config, stages))
    assert run.bubble == pytest.approx(whole, rel=1e-9)
    assert (run.cycle > 0) == ("looped-bfs" not in flags)  # which has no steady state


LAYER, CORE, MLP = 2 * 12 * 64**2 + 4 * 32 * 64, 4 * 32 * 64, 2 * 8 * 64**2


@pytest.mark.parametrize(
    ("flags", "again"),
    [
        ("", (0, 0)),
        ("--recompute-granularity full", (3 * LAYER, 2 * LAYER)),
        ("--recompute-granularity full --recompute-num-layers 2", (3 * LAYER, 2 * LAYER)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", (2 * LAYER, 2 * LAYER)),
        ("--recompute-granularity selective", (3 * CORE, 2 * CORE)),
        ("--recompute-granularity selective --recompute-modules mlp_act layernorm", (0, 0)),
        ("--recompute-granularity selective --recompute-modules mlp core_attn", (3 * (MLP + CORE), 2 * (MLP + CORE))),
    ],
)
def test_backward_costs_two_forwards_plus_recompute(
    flags: str, again: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(f"{GPT} --num-layers 5 --pp 2 --pipeline-layers 3,2 --global-batch-size 4 {flags}", 2)
    simulated = []

    def noting(program: Program, costs: Costs) -> Timeline:
        simulated.append(costs)
        return simulate(program, costs)

    monkeypatch.setattr(pipeline, "simulate", noting)
    pipeline.bubble_fraction(config, plan_stages(config), 4)
    (costs,) = simulated
    assert costs.forward == (3 * LAYER, 2 * LAYER + 2 * 128 * 64)
    assert costs.backward == tuple(2 * cost for cost in costs.forward)
    assert costs.recompute == again
    # The attention core has no weights: both halves of its backward are input gradients.
    assert costs.weight_grad == (3 * (LAYER - CORE), 2 * (LAYER - CORE) + 2 * 128 * 64)


LLAMA = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 512 --vocab-size 128 "
    "--ffn-hidden-size 96 --swiglu --disable-bias-linear --position-embedding-type rope"
)
EXPERTS = f"{LLAMA} --num-experts 8 --moe-ffn-hidden-size 32 --moe-shared-expert-intermediate-size 32"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
PROJECTIONS = 2 * 2 * (3 * 64 * 64 + 64 * 64)  # query, key, value and output of both layers, for a token


def again(line: str) -> int:
    config = config_of(line, 1)
    (plan,) = plan_stages(config)
    return _recompute_flops(config, plan)


@pytest.mark.parametrize("window", ["", " --sliding-window 32"])
@pytest.mark.parametrize(("model", "feed_forward"), [(LLAMA, "mlp"), (EXPERTS, "moe")])
def test_parts_of_a_layer_sum_to_the_layer(model: str, feed_forward: str, window: str) -> None:
    line = model + window
    config = config_of(line, 1)
    layers = sum(layer_forward_flops(config.model, index, 512) for index in range(2))
    core, inner = (again(f"{line} {SELECTIVE} {module}") for module in ("core_attn", feed_forward))
    assert core == 2 * 4 * (32 if window else 512) * 64
    assert core + inner + PROJECTIONS == layers == again(f"{line} --recompute-granularity full")
    assert again(f"{line} {SELECTIVE} core_attn {feed_forward}") == core + inner
    assert again(line) == again(f"{line} {SELECTIVE} layernorm mlp_act") == 0


def test_invalid_number_of_microbatches_is_an_error() -> None:
    with pytest.raises(ConfigError, match="dualpipe-v"):
        schedule_of(even(4, 2, "dualpipe-v"), 5)


@pytest.mark.parametrize("more", ["--fp8 --fp8-param-gather", "--lr-multipliers layers.6.*=2.0"])
def test_stages_of_one_kind_have_equal_costs(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the inner stages of two layers has the model's last layer, which these settings treat differently."""
    layout = "--num-layers 7 --pp 5 --dp 2 --pipeline-layout Et|tt|tt|tt|L --dp-strategy distributed-optimizer"
    config = config_of(f"{GPT} {layout} --no-overlap-param-gather --precision bf16 {more}", 10)

    def planned() -> tuple[list[memory.RankMemory], float]:
        return memory.planned_memory(config), step.predict(config, BASE, STACK).parts["parameters"]

    together = planned()
    for module in (memory, step):
        monkeypatch.setattr(module, "kind_of_stage", lambda config, plan: plan)
    assert planned() == together


def held(config: RunConfig, count: int) -> list[float]:
    """Bytes per rank: permanent state, and the peak of a step's activations and messages."""
    stages = plan_stages(config)
    peaks = memory_peaks(lowered(config, schedule_of(config, count)), stage_sizes(config, stages))
    return [
        peak.size + of_rank.parameter_bytes + of_rank.gradient_bytes + of_rank.optimizer_bytes
        for plan, peak in zip(stages, peaks, strict=True)
        for of_rank in [rank_memory(config, [plan])]
    ]


@pytest.mark.parametrize(
    "more", ["", "--precision bf16", "--pipeline-layers 1,2,2,7", "--recompute-granularity full --recompute-ahead"]
)
def test_default_is_faster_than_1f1b_in_the_same_memory(more: str) -> None:
    given = f"{GPT} --num-layers 12 --pp 4 --global-batch-size 16 {more}"
    names = ("", "--pipeline-schedule 1f1b", "--pipeline-schedule auto")
    default, plain, free = (config_of(f"{given} {name}", 4) for name in names)
    most = max(held(plain, 16))
    assert max(held(default, 16)) <= most + 1
    makespans = [
        pipeline.Clock(one, 4, 16).run(costs_of(one, plan_stages(one))).seconds for one in (default, plain, free)
    ]
    assert makespans[2] <= makespans[0] * (1 + 1e-9)
    assert makespans[0] < 0.99 * makespans[1]
    if more.startswith("--pipeline"):  # the last rank has most, and would also store inputs for its W
        assert max(held(free, 16)) > most


def test_memory_limit_replaces_that_of_1f1b() -> None:
    given = f"{GPT} --num-layers 12 --pp 4 --global-batch-size 16 --pipeline-layers 1,2,2,7"
    roomy = config_of(f"{given} --pipeline-memory-limit 1GiB", 4)
    assert held(roomy, 16) == held(config_of(f"{given} --pipeline-schedule auto", 4), 16)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("--pp 2", "auto"),
        ("--pp 2 --tp 2", "1f1b"),
        ("--pp 2 --vpp 2", "interleaved"),
        ("--pp 2 --pipeline-warmup pb", "1f1b"),
        ("", "1f1b"),
    ],
)
def test_default_schedules(more: str, name: str) -> None:
    assert config_of(f"{GPT} --num-layers 4 {more}", 4).parallel.schedule_name == name
