"""The pipeline of a config: placement, stages, schedule, program, costs, and the simulated time of a step.

The time of a step of very many microbatches is extrapolated from shorter steps. That is exact only in a steady state, so the
steady state is tested: one rank that is slightly slower than the others sets the pace only after the queues before it are
full, and until then a microbatch takes less time than it will."""

from collections.abc import Callable, Hashable
from functools import lru_cache
from operator import add
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.batch import microbatch_counts
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.numbers import parse_byte_size
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.config.reading import read_input
from megalite.config.run import RunConfig, cache_by_object, cache_by_reading
from megalite.models.shapes import (
    attention_core_flops,
    flops_per_token,
    layer_forward_flops,
    layer_shapes,
    layers_forward_flops,
    map_layers,
)
from megalite.partition.activations import recompute_units, stage_sizes
from megalite.partition.buckets import persistent_bytes, planned_buckets
from megalite.partition.stages import StagePlan, cut_stages, stage_forward_flops
from megalite.pipeline.ir.generators import build_schedule, loop_placement, placement_for, smallest_group, v_placement
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import memory_peaks
from megalite.pipeline.ir.schedule import Kind, Program, Schedule, ScheduleError
from megalite.pipeline.ir.simulate import Costs, Timeline, read_costs, simulate
from megalite.pipeline.ir.validate import ValidationReport, validate, validate_written
from megalite.topology.layout import ParallelLayout


def flop_costs(config: RunConfig, stages: tuple[StagePlan, ...], *, ahead: bool = False) -> Costs:
    """Return the FLOPs per token of each stage's forward, backward, weight gradient and recompute.

    A backward counts as two forwards. Its weight gradients cost as much as the forward's matrix products with weights;
    the attention core multiplies activations only, so both its gradients belong to the input half."""
    forward = tuple(float(stage_forward_flops(config, plan)) for plan in stages)
    model, s = config.model, config.training.seq_length
    each = map_layers(model, range(model.mtp_layers.stop), lambda i: attention_core_flops(model, i, s))
    cores = (sum(each[plan.first_layer : None if plan.has_head else plan.last_layer]) for plan in stages)
    return Costs(
        forward=forward,
        backward=tuple(2.0 * cost for cost in forward),
        weight_grad=tuple(cost - core for cost, core in zip(forward, cores, strict=True)),
        # an R runs the whole stage, including head and loss
        recompute=forward if ahead else tuple(float(_recompute_flops(config, plan)) for plan in stages),
    )


def flops_per_token_with_recompute(config: RunConfig) -> int:
    """Return model FLOPs per token (PaLM convention) plus those of recomputed forwards. With full recompute of GPT's
    shape this is 96·L·h²·(1 + s/6h + V/16Lh), the F of Narayanan et al. 2021."""
    again = flop_costs(config, plan_stages(config), ahead=has_recompute_actions(config)).recompute
    return flops_per_token(config.model, config.training.seq_length) + round(sum(again or ()))


def _recompute_flops(config: RunConfig, plan: StagePlan) -> int:
    """Return the FLOPs per token that a stage's backward recomputes; norms and activations count as 0."""
    model, training = config.model, config.training
    if training.recompute_granularity == "full":
        again = (index for unit in recompute_units(config, plan) for index in unit)
        return sum(layers_forward_flops(model, again, training.seq_length))
    if training.recompute_granularity == "none":
        return 0
    modules = set(training.recompute_modules)
    layers = range(plan.first_layer, plan.last_layer)
    return sum(map_layers(model, layers, lambda index: _module_flops(config, index, modules)))


def _module_flops(config: RunConfig, layer_index: int, modules: set[str]) -> int:
    """Return the FLOPs per token of those modules of a layer that have matrix products."""
    model, seq_length = config.model, config.training.seq_length
    core = attention_core_flops(model, layer_index, seq_length)
    shapes = layer_shapes(model, layer_index)
    projections = sum(2 * shape.size for shape in shapes if shape.multiplies and ".attention." in shape.name)
    feed_forward = layer_forward_flops(model, layer_index, seq_length) - core - projections
    again = core if "core_attn" in modules else 0
    if "mla_up_proj" in modules:
        of_up = (".attention.q.weight", ".attention.q_up.weight", ".attention.kv_up.weight")
        again += sum(2 * shape.size for shape in layer_shapes(model, layer_index) if shape.name.endswith(of_up))
    return again + (feed_forward if ("moe" if model.is_moe_layer(layer_index) else "mlp") in modules else 0)


def placement_of(config: RunConfig) -> tuple[int, ...]:
    """Return the pipeline rank of each virtual stage; it is the same for all microbatch counts of the run."""
    p = config.parallel
    if p.pipeline_schedule_file is not None:
        return _read(config).placement
    if p.schedule_name == "auto":
        return _auto_placement(config) if p.vpp == 2 else loop_placement(p.pp, p.vpp)
    return placement_for(p.schedule_name, p.pp, p.vpp)


@cache_by_object()
def plan_stages(config: RunConfig) -> tuple[StagePlan, ...]:
    """Return the stages of a validated config with a known vocabulary, in order."""
    return cut_stages(config, placement_of(config))


def layout_of(config: RunConfig) -> ParallelLayout:
    """Return the ranks and groups of a validated config."""
    p = config.parallel
    assert p.dp is not None, "validate() resolves dp"
    placement = placement_of(config)
    return ParallelLayout(
        tp=p.tp,
        pp=p.pp,
        cp=p.cp,
        cp_heads=p.cp_heads,
        dp=p.dp,
        ep=p.ep,
        etp=p.etp,
        instances=p.instances,
        order=p.rank_order,
        placement=placement,
    )


def schedule_of(config: RunConfig, num_microbatches: int) -> Schedule:
    """Return the training schedule of a validated config for a step with `num_microbatches`.

    Raises ConfigError, with a value that works: the schedule does not support these sizes, or none fits the memory."""
    p = config.parallel
    if p.pipeline_schedule_file is not None:
        schedule = _read(config)
        if schedule.num_microbatches != num_microbatches:
            raise ConfigError(
                f"pipeline_schedule_file {p.pipeline_schedule_file} is for {schedule.num_microbatches} microbatches, but "
                f"a step of this run has {num_microbatches}; use a global_batch_size with {schedule.num_microbatches} "
                f"microbatches (global batch = microbatches x micro batch size x dp), or a file for {num_microbatches}"
            )
        return schedule
    if p.schedule_name == "auto":
        return _auto(config, placement_of(config), num_microbatches)
    # A notebook may redefine a registered schedule under its name, so only built-in ones are cached.
    build = _named if p.schedule_name in PIPELINE_SCHEDULES.builtin else build_schedule
    return build(
        p.schedule_name,
        num_ranks=p.pp,
        num_chunks=p.vpp,
        num_microbatches=num_microbatches,
        group=p.microbatch_group_size_per_virtual_pipeline_stage,
        warm_up=p.pipeline_warmup,
        recompute_ahead=config.training.recompute_ahead,
    )


# Every function of a step needs its schedule; a large one has a million actions, so few are kept.
_named = lru_cache(maxsize=4)(build_schedule)


def lowered(config: RunConfig, schedule: Schedule) -> Program:
    """Return the schedule with its communication, by the config's settings."""
    p = config.parallel
    return _lower(schedule, recv_prefetch=p.pipeline_recv_prefetch, send_window=p.pipeline_send_window)


_lower = cache_by_object(maxsize=4)(lower)


def proved(config: RunConfig, program: Program, stages: tuple[StagePlan, ...]) -> ValidationReport:
    """Validate a training program, including its memory limit. Raises ConfigError, with the cell and the grid."""
    try:
        return validate(program, sizes=stage_sizes(config, stages), limit=_limit(config))
    except ScheduleError as error:
        raise ConfigError(str(error)) from None


def has_recompute_actions(config: RunConfig) -> bool:
    """Return whether recomputed forwards are actions of the schedule (R) instead of a part of the backward."""
    from_file = config.parallel.pipeline_schedule_file is not None and bool(_read(config).recomputed)
    return from_file or config.training.recompute_ahead


def costs_of(config: RunConfig, stages: tuple[StagePlan, ...]) -> Costs:
    """Return the costs of the file if one is set, else FLOPs; with those of an R if the schedule has any."""
    ahead = has_recompute_actions(config)
    if config.parallel.pipeline_costs is not None:
        return read_costs(Path(config.parallel.pipeline_costs)).costs(tuple(plan.rank for plan in stages), ahead=ahead)
    return flop_costs(config, stages, ahead=ahead)


def _limit(config: RunConfig) -> float | None:
    """Return the limit of activation bytes per rank, if set."""
    text = config.parallel.pipeline_memory_limit
    return None if text is None else parse_byte_size(text)


@cache_by_object()
def _read(config: RunConfig) -> Schedule:
    """Read pipeline_schedule_file and check that its sizes match the config."""
    p = config.parallel
    path = Path(p.pipeline_schedule_file or "")
    try:
        schedule = Schedule.from_csv(read_input(path, "pipeline_schedule_file"), name=path.name)
        validate_written(schedule)
        validate(lowered(config, schedule))
    except ScheduleError as error:
        raise ConfigError(f"pipeline_schedule_file {path}: {error}") from None
    if schedule.num_ranks != p.pp or schedule.num_stages != p.pp * p.vpp:
        chunks, rest = divmod(schedule.num_stages, schedule.num_ranks)
        remedy = (
            "a file with a multiple of its ranks as stages" if rest else f"--pp {schedule.num_ranks} --vpp {chunks}"
        )
        raise ConfigError(
            f"pipeline_schedule_file {path} has {schedule.num_ranks} ranks and {schedule.num_stages} stages, but pp is "
            f"{p.pp} and pp·vpp = {p.pp}·{p.vpp} = {p.pp * p.vpp}; use {remedy}"
        )
    granularity = config.training.recompute_granularity
    if schedule.recomputed and granularity != "none":
        raise ConfigError(
            f"pipeline_schedule_file {path} recomputes with R actions, but recompute_granularity {granularity} would "
            f"recompute again inside them; use --recompute-granularity none, or a file without R"
        )
    if schedule.forward_only:
        raise ConfigError(f"pipeline_schedule_file {path} has only forwards; training needs a B, or I and W, for each")
    return schedule


@cache_by_reading
def _auto(config: RunConfig, placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    p, stages = config.parallel, cut_stages(config, placement)
    limited = p.pipeline_schedule is not None or p.pipeline_memory_limit is not None
    return _built(
        placement,
        num_microbatches,
        costs_of(config, stages),
        sizes=stage_sizes(config, stages),
        limit=_limit(config) if limited else _room_of_1f1b(config, stages, num_microbatches),
        recv_prefetch=p.pipeline_recv_prefetch,
        send_window=p.pipeline_send_window,
        recompute_ahead=config.training.recompute_ahead,
    )


@lru_cache(maxsize=32)
def _built(*args: Hashable, **kwargs: Hashable) -> Schedule:
    # Configs with equal arguments share the result of the search.
    return PIPELINE_SCHEDULES.get("auto")(*args, effort="quick", **kwargs)


def _room_of_1f1b(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> tuple[float, ...]:
    """Return the activation limit of each rank at which no rank needs more memory than the fullest rank with 1f1b."""
    plain = _named(
        "1f1b",
        num_ranks=len(stages),
        num_chunks=1,
        num_microbatches=num_microbatches,
        recompute_ahead=config.training.recompute_ahead,
    )
    peaks = memory_peaks(lowered(config, plain), stage_sizes(config, stages))
    states = [persistent_bytes(config, [plan], planned_buckets(config, plan, stages)) for plan in stages]
    always = [each.parameter + each.gradient + each.optimizer for each in states]
    most = max(map(add, always, (peak.size for peak in peaks)))
    return tuple(most - each for each in always)


@cache_by_reading
def _auto_placement(config: RunConfig) -> tuple[int, ...]:
    """Return the placement for vpp 2, a loop or a V: the one with the shorter step at the largest batch."""
    p = config.parallel
    loop = loop_placement(p.pp, p.vpp)
    count = microbatch_counts(config)[-1]
    found: dict[tuple[int, ...], float] = {}
    refused: list[ConfigError] = []
    for placement in (v_placement(p.pp), loop):
        try:
            schedule = _auto(config, placement, count)
        except ConfigError as error:
            refused.append(error)
        else:
            costs = costs_of(config, cut_stages(config, placement))
            found[placement] = simulate(lowered(config, schedule), costs).makespan
    if not found:
        raise refused[0]
    return min(found, key=found.__getitem__)


SIMULATED_ACTIONS = 6_000  # forwards and backwards up to which a step is simulated whole
MOST_ACTIONS = 100_000  # simulated at most if no steady state is found (about two seconds)
_WHOLE = ("auto", "file")  # built or read schedules need not be periodic
_NEVER_STEADY = ("looped-bfs",)  # each phase runs all microbatches of one chunk, so nothing repeats
_EQUAL = 1e-9  # tolerance for rounding, as a fraction of a step


class Run(NamedTuple):
    timeline: Timeline
    scale: float  # microbatches of the step divided by those simulated
    shift: float  # seconds that the step takes beyond the simulation
    cycle: int  # microbatches per period of the steady state; 0 if the step is simulated whole

    @property
    def seconds(self) -> float:
        return self.timeline.makespan + self.shift

    @property
    def bubble(self) -> float:
        return max(0.0, 1.0 - self.scale * max(self.timeline.busy) / self.seconds)  # rounding may make it negative


def bubble_fraction(config: RunConfig, stages: tuple[StagePlan, ...], num_microbatches: int) -> float:
    """Return the idle fraction of the busiest pipeline rank in one step, by FLOPs (or the costs file) without messages. A
    backward counts as two forwards plus what it recomputes."""
    return Clock(config, len(stages), num_microbatches).run(costs_of(config, stages)).bubble


class Clock:
    """Times a config's step with a number of microbatches; simulated programs are cached for further costs."""

    def __init__(self, config: RunConfig, num_stages: int, num_microbatches: int) -> None:
        p = config.parallel
        self._period, self._each = 1, 2 * num_stages
        if p.schedule_name == "interleaved":
            configured = p.microbatch_group_size_per_virtual_pipeline_stage
            self._period = configured or smallest_group(p.pp, num_microbatches)
            # A smaller number of microbatches would change the default.
            config = replace(config, microbatch_group_size_per_virtual_pipeline_stage=self._period)
        self._config, self._num_microbatches = config, num_microbatches
        self._programs: dict[int, Program] = {}

    def program(self, num_microbatches: int) -> Program:
        if num_microbatches not in self._programs:
            schedule = schedule_of(self._config, num_microbatches)
            self._programs[num_microbatches] = lowered(self._config, schedule)
        return self._programs[num_microbatches]

    def run(self, costs: Costs) -> Run:
        """Simulate the whole step, or extrapolate from two steps, one cycle apart, with equal ends."""
        p, wanted = self._config.parallel, self._num_microbatches
        # In-flight microbatches grow with pp; four times as many reach a steady state after the ramp-up.
        count = max(4 * max(p.pp, self._period), SIMULATED_ACTIONS // self._each)
        most = max(count, MOST_ACTIONS // self._each)
        if p.schedule_name in _NEVER_STEADY:
            count = most
        while count < wanted and p.schedule_name not in _WHOLE:
            timeline = self._simulate(self._aligned(count, self._period), costs)
            if count == most:
                # No steady state: assume that ranks that are always busy stay busy in the added microbatches.
                shorter = self._simulate(timeline.schedule.num_microbatches - self._period, costs)
                return self._extended(timeline, shorter, at_least=max(timeline.busy))
            cycle = _cycle(timeline, self._period)
            start = self._aligned(count, cycle)
            if start != timeline.schedule.num_microbatches:
                timeline = self._simulate(start, costs)
            shorter = self._simulate(start - cycle, costs)
            if _end_alike(timeline, shorter):
                return self._extended(timeline, shorter)
            count = min(2 * count, most)
        return Run(self._simulate(wanted, costs), 1.0, 0.0, 0)

    def extended(self, run: Run, seconds: Callable[[Program], float]) -> float:
        """Return the seconds of the step by another clock, extrapolated as `run` was."""
        count = run.timeline.schedule.num_microbatches
        taken = seconds(self.program(count))
        if not run.cycle:
            return taken
        each = (taken - seconds(self.program(count - run.cycle))) / run.cycle
        return taken + each * (self._num_microbatches - count)

    def _aligned(self, count: int, cycle: int) -> int:
        """Return the largest number up to `count` that differs from the step's by whole cycles."""
        return count - (count - self._num_microbatches) % cycle

    def _simulate(self, count: int, costs: Costs) -> Timeline:
        return _simulated(self.program(count), costs)

    def _extended(self, timeline: Timeline, shorter: Timeline, *, at_least: float = 0.0) -> Run:
        count, wanted = timeline.schedule.num_microbatches, self._num_microbatches
        cycle = count - shorter.schedule.num_microbatches
        each = max((timeline.makespan - shorter.makespan) / cycle, at_least / count)
        return Run(timeline, wanted / count, each * (wanted - count), cycle)


@cache_by_object(maxsize=8)
def _simulated(program: Program, costs: Costs) -> Timeline:
    # Configs with equal pipelines share their programs.
    return simulate(program, costs)


def _cycle(timeline: Timeline, period: int) -> int:
    """Return the number of microbatches, a multiple of `period`, after which the last stage's forwards repeat in the
    middle of the step: a guess, `period` if nothing repeats."""
    schedule = timeline.schedule
    wanted = (Kind.F, schedule.num_stages - 1)
    starts = np.array([event.start for event in timeline.events if event.action[:2] == wanted])
    # In a V schedule, the last stage's forwards come faster after those of the first stage have finished.
    starts = starts[len(starts) // 2 : len(starts) - 2 * schedule.num_ranks]
    for cycle in range(period, len(starts) // 2 + 1, period):
        if np.ptp(starts[cycle:] - starts[:-cycle]) <= _EQUAL * timeline.makespan:
            return cycle
    return period


def _end_alike(longer: Timeline, shorter: Timeline) -> bool:
    """Test whether the last half of each rank's actions starts later by the same time. Steps with further cycles begin
    in the same way; if all inputs of the end moved by one time, the end moves by that time for each further cycle."""
    moved = [
        later[-(len(sooner) // 2) :] - sooner[-(len(sooner) // 2) :]
        for later, sooner in zip(_starts(longer), _starts(shorter), strict=True)
    ]
    return bool(np.ptp(np.concatenate(moved)) <= _EQUAL * longer.makespan)


def _starts(timeline: Timeline) -> list[npt.NDArray[np.float64]]:
    rows: list[list[float]] = [[] for _ in range(timeline.schedule.num_ranks)]
    for event in timeline.events:
        rows[event.rank].append(event.start)
    return [np.array(row) for row in rows]
