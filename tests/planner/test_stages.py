"""The cut into stages, and the bubble computed from it."""

import pytest

import megalite.partition.pipeline as planner_costs
from megalite.config.errors import ConfigError
from megalite.config.flags import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.models.shapes import head_forward_flops, layer_forward_flops, stage_shapes
from megalite.partition.activations import stage_sizes
from megalite.partition.memory import rank_memory
from megalite.partition.pipeline import lowered, plan_stages, schedule_of
from megalite.partition.stages import shapes_of_rank, stage_forward_flops
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate
from megalite.planner import clock

GPT = "--hidden-size 64 --seq-length 32 --vocab-size 128"


def config_of(flags: str, world_size: int) -> RunConfig:
    return validate(parse_arguments(flags.split()).config, world_size)


def test_stages_cover_the_layers_in_order() -> None:
    config = config_of(f"{GPT} --num-layers 9 --pp 2 --vpp 2", 2)
    stages = plan_stages(config)
    assert [plan.rank for plan in stages] == [0, 1, 0, 1]
    assert [plan.has_embedding for plan in stages] == [True, False, False, False]
    assert [plan.has_head for plan in stages] == [False, False, False, True]
    assert [layer for plan in stages for layer in range(plan.first_layer, plan.last_layer)] == list(range(9))


def test_pipeline_layers_are_taken_as_they_are() -> None:
    config = config_of(f"{GPT} --num-layers 4 --pp 2 --pipeline-layers 3,1", 2)
    assert [plan.num_layers for plan in plan_stages(config)] == [3, 1]


def test_a_heavy_head_gets_fewer_layers() -> None:
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


def test_a_rank_with_both_ends_holds_the_tied_embedding_once() -> None:
    config = config_of(f"{GPT} --num-layers 2", 1)
    shapes = shapes_of_rank(config, list(plan_stages(config)))
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert shapes == stage_shapes(config.model, 0, 2, True, True)


def even(pp: int, vpp: int, schedule: str = "1f1b") -> RunConfig:
    """A config whose stages all cost the same, but for a head that is next to nothing."""
    flags = (
        f"--hidden-size 1024 --seq-length 32 --vocab-size 8 --make-vocab-size-divisible-by 8 --num-layers {pp * vpp}"
    )
    return config_of(f"{flags} --pp {pp} --vpp {vpp} --pipeline-schedule {schedule}", pp)


@pytest.mark.parametrize(
    ("pp", "vpp", "schedule"),
    [(4, 1, "1f1b"), (4, 1, "gpipe"), (4, 2, "interleaved"), (4, 2, "looped-bfs"), (1, 1, "1f1b")],
)
def test_bubble_of_the_published_formula(pp: int, vpp: int, schedule: str) -> None:
    config = even(pp, vpp, schedule)
    idle = (pp - 1) / vpp
    assert clock.bubble_fraction(config, plan_stages(config), 8) == pytest.approx(idle / (8 + idle), abs=1e-3)


@pytest.mark.parametrize(
    ("flags", "microbatches"),
    [
        ("--pp 4 --num-layers 9", 41),
        ("--pp 2 --num-layers 4 --pipeline-layers 1,3 --pipeline-schedule gpipe", 30),
        ("--pp 4 --vpp 2 --num-layers 12", 44),
        ("--pp 4 --vpp 2 --num-layers 11 --microbatch-group-size 6", 42),
        ("--pp 4 --vpp 3 --num-layers 24 --vocab-size 4096", 40),
        ("--pp 2 --vpp 2 --num-layers 7 --pipeline-schedule looped-bfs --recompute-granularity full", 33),
    ],
)
def test_long_steps_are_extended_exactly(flags: str, microbatches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = "--hidden-size 64 --seq-length 32" + ("" if "vocab" in flags else " --vocab-size 512")
    config = config_of(f"{size} {flags} --global-batch-size {microbatches}", 4 if "--pp 4" in flags else 2)
    stages = plan_stages(config)
    whole = clock.bubble_fraction(config, stages, microbatches)
    monkeypatch.setattr(clock, "SIMULATED_ACTIONS", 1)
    assert clock.bubble_fraction(config, stages, microbatches) == pytest.approx(whole, rel=1e-9)


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
def test_a_backward_costs_two_forwards_and_what_it_recomputes(
    flags: str, again: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(f"{GPT} --num-layers 5 --pp 2 --pipeline-layers 3,2 --global-batch-size 4 {flags}", 2)
    simulated = []

    def noting(program: Program, costs: Costs) -> Timeline:
        simulated.append(costs)
        return simulate(program, costs)

    monkeypatch.setattr(clock, "simulate", noting)
    clock.bubble_fraction(config, plan_stages(config), 4)
    (costs,) = simulated
    assert costs.forward == (3 * LAYER, 2 * LAYER + 2 * 128 * 64)
    assert costs.backward == tuple(2 * cost for cost in costs.forward)
    assert costs.recompute == again
    # The attention core has no weights: both halves of its backward are input gradients.
    assert costs.weight_grad == (3 * (LAYER - CORE), 2 * (LAYER - CORE) + 2 * 128 * 64)


def test_experts_are_recomputed_where_there_are_any() -> None:
    flags = f"{GPT} --num-layers 2 --num-experts 4 --moe-layer-freq 2 --disable-bias-linear --recompute-granularity selective"
    for module, layer in (("moe", 0), ("mlp", 1)):
        config = config_of(f"{flags} --recompute-modules {module}", 1)
        rows = [planner_costs._module_flops(config, index, {module}) for index in range(2)]
        expected = [0, 0]
        expected[layer] = layer_forward_flops(config.model, layer, 32) - 2 * 4 * 64**2 - CORE
        assert rows == expected


def test_microbatches_that_the_schedule_refuses() -> None:
    with pytest.raises(ConfigError, match="dualpipe-v"):
        schedule_of(even(4, 2, "dualpipe-v"), 5)


def held(config: RunConfig, count: int) -> list[float]:
    """Bytes per rank: what is kept from step to step, and the peak of a step's activations and messages."""
    stages = plan_stages(config)
    peaks = memory_peaks(lowered(config, schedule_of(config, count)), stage_sizes(config, stages))
    return [
        peak.size + memory.parameter_bytes + memory.gradient_bytes + memory.optimizer_bytes
        for plan, peak in zip(stages, peaks, strict=True)
        for memory in [rank_memory(config, [plan], 0)]
    ]


@pytest.mark.parametrize(
    "more", ["", "--precision bf16", "--pipeline-layers 1,2,2,7", "--recompute-granularity full --recompute-ahead"]
)
def test_the_default_is_faster_than_1f1b_in_its_memory(more: str) -> None:
    given = f"{GPT} --num-layers 12 --pp 4 --global-batch-size 16 {more}"
    default, plain, free = (config_of(f"{given} {name}", 4) for name in ("", *ONE_OF))
    most = max(held(plain, 16))
    assert max(held(default, 16)) <= most + 1
    makespans = [
        clock.Clock(one, 4, 16).run(planner_costs.costs_of(one, plan_stages(one))).seconds
        for one in (default, plain, free)
    ]
    assert makespans[2] <= makespans[0] * (1 + 1e-9)
    assert makespans[0] < 0.99 * makespans[1]
    if more.startswith("--pipeline"):  # the last rank has most, and would hold what its W wait for as well
        assert max(held(free, 16)) > most


ONE_OF = ("--pipeline-schedule 1f1b", "--pipeline-schedule auto")


def test_a_memory_limit_takes_the_place_of_that_of_1f1b() -> None:
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
