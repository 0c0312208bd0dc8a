"""Study pipeline schedules: build them by name, prove and simulate them, and compare several."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.pipeline.ir.auto import build_auto
from megalite.pipeline.ir.draw import render_grid
from megalite.pipeline.ir.generators import build_schedule, forward_only, loop_placement, placement_for, v_placement
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import Program, Schedule, ScheduleError, live_units
from megalite.pipeline.ir.simulate import CostTable, MemoryTable, Timeline, simulate
from megalite.pipeline.ir.validate import validate, validate_written

MAX_CELLS = 1_000_000
"""Maximum number of (stage, microbatch) pairs; more would take minutes and gigabytes without further insight."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """Costs, memory limit and communication under which schedules are studied."""

    table: CostTable = field(default_factory=CostTable)
    limit: float | None = None  # bytes per rank; if the table has no sizes, microbatches of the rank's whole share
    recv_prefetch: int = 1
    send_window: int = 1


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest(Conditions):
    """Sizes and options of the schedules to build."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int | None = None  # None: as many as the schedule needs
    group: int | None = None
    warm_up: str | None = None
    recompute_ahead: bool = False
    forward_only: bool = False


@dataclass(frozen=True)
class Study:
    """A proved and simulated schedule."""

    schedule: Schedule
    program: Program
    timeline: Timeline
    sends: tuple[int, ...]
    peak_receives: tuple[int, ...]
    peak_bytes: tuple[float, ...] | None  # per rank; None if the costs have no sizes

    @cached_property
    def peak_deferred(self) -> tuple[int, ...]:
        """Per rank, the maximum number of (stage, microbatch) pairs with a finished I and a pending W."""
        if self.schedule.forward_only:
            return (0,) * self.schedule.num_ranks
        return tuple(max((units.deferred for units in live_units(row)), default=0) for row in self.schedule.actions)

    @property
    def ideal(self) -> float:
        """Compute time of the busiest rank, a lower bound of the makespan."""
        return max(self.timeline.busy)

    @cached_property
    def peak_shares(self) -> float:
        """Maximum live activations over ranks, in microbatches of the rank's whole share of the model."""
        peaks = enumerate(self.timeline.peak_activations)
        return max(peak / max(1, len(self.schedule.stages_of(rank))) for rank, peak in peaks)

    def as_data(self, *, lowered: bool = False) -> dict[str, Any]:
        """Return all results for JSON. Times are in the unit of the costs."""
        schedule, timeline = self.schedule, self.timeline
        ranks = [
            {
                "rank": rank,
                "stages": list(schedule.stages_of(rank)),
                "busy": timeline.busy[rank],
                "idle_fraction": timeline.idle[rank] / timeline.makespan,
                "peak_activations": timeline.peak_activations[rank],
                "peak_deferred": self.peak_deferred[rank],
                "peak_receives": self.peak_receives[rank],
                "peak_bytes": None if self.peak_bytes is None else self.peak_bytes[rank],
                "sends": self.sends[rank],
                "actions": [str(action) for action in schedule.actions[rank]],
                **({"program": [str(action) for action in self.program.actions[rank]]} if lowered else {}),
            }
            for rank in range(schedule.num_ranks)
        ]
        return {
            "name": schedule.name,
            "num_ranks": schedule.num_ranks,
            "num_stages": schedule.num_stages,
            "num_microbatches": schedule.num_microbatches,
            "forward_only": schedule.forward_only,
            "placement": list(schedule.placement),
            "makespan": timeline.makespan,
            "ideal": self.ideal,
            "bubble_fraction": timeline.bubble_fraction,
            "span_bubble_fraction": timeline.span_bubble_fraction,
            "peak_shares": self.peak_shares,
            "ranks": ranks,
            "events": [
                {"rank": rank, "action": str(action), "start": start, "end": end}
                for rank, action, start, end in timeline.events
            ],
        }


def study(schedule: Schedule, conditions: Conditions) -> Study:
    """Lower, prove and simulate a schedule."""
    program = lower(schedule, recv_prefetch=conditions.recv_prefetch, send_window=conditions.send_window)
    table, sizes = conditions.table, conditions.table.sizes(schedule.placement)
    limited = sizes if sizes is not None or conditions.limit is None else _shares(schedule.placement)
    report = validate(program, sizes=limited, limit=conditions.limit)
    timeline = simulate(program, table.costs(schedule.placement, ahead=bool(schedule.recomputed)))
    if not timeline.makespan:
        raise ConfigError(
            f"{table.source}: all actions of schedule {schedule.name} cost 0; give at least one a cost above 0"
        )
    peaks = report.peak_bytes if sizes is not None else None
    peak_bytes = None if peaks is None else tuple(peak.size for peak in peaks)
    return Study(schedule, program, timeline, report.sends, report.peak_receives, peak_bytes)


def study_written(schedule: Schedule, conditions: Conditions) -> Study:
    """Study a schedule from a file; errors show its cells."""
    _check_amount(schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches)
    try:
        validate_written(schedule)
        return study(schedule, conditions)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\ndrawn until it blocks:\n{render_grid(schedule)}") from None


def study_named(name: str, request: ScheduleRequest) -> Study:
    """Build and study the schedule of that name."""
    _check_amount(request.num_ranks, request.num_chunks or 1, request.num_microbatches)
    if name == "auto":
        return _study_auto(request)
    num_chunks = request.num_chunks or (1 if PIPELINE_SCHEDULES.facts(name).chunks == "one" else 2)
    if request.forward_only:
        placement = placement_for(name, request.num_ranks, num_chunks)
        return study(forward_only(placement, request.num_microbatches), request)
    schedule = build_schedule(
        name,
        num_ranks=request.num_ranks,
        num_chunks=num_chunks,
        num_microbatches=request.num_microbatches,
        group=request.group,
        warm_up=request.warm_up or "pa",
        recompute_ahead=request.recompute_ahead,
    )
    return study(schedule, request)


def _check_amount(num_ranks: int, num_chunks: int, num_microbatches: int) -> None:
    cells = num_ranks * num_chunks * num_microbatches
    if cells > MAX_CELLS:
        raise ConfigError(
            f"pp {num_ranks} x vpp {num_chunks} x microbatches {num_microbatches} are {cells:,} cells; use at most "
            f"{MAX_CELLS:,} (schedules are periodic: fewer microbatches show the same)"
        )


def _study_auto(request: ScheduleRequest) -> Study:
    """Return the fastest study over placements. Of equal times the first wins, which sends fewer messages."""
    if request.forward_only:
        raise ConfigError("schedule auto has no --forward-only; use --forward-only with another --schedule")
    found: list[Study] = []
    errors: list[ConfigError] = []
    for placement in _placements(request):
        try:
            schedule = build_auto(
                placement,
                request.num_microbatches,
                request.table.costs(placement, ahead=request.recompute_ahead),
                sizes=request.table.sizes(placement) or _shares(placement),
                limit=request.limit,
                recv_prefetch=request.recv_prefetch,
                send_window=request.send_window,
                recompute_ahead=request.recompute_ahead,
            )
            found.append(study(schedule, request))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda each: each.timeline.makespan * (1 + 1e-9 * found.index(each)))


def _placements(request: ScheduleRequest) -> Iterator[tuple[int, ...]]:
    """Yield the placements that `auto` tries: loops, and with two stages per rank a V."""
    for num_chunks in (1, 2) if request.num_chunks is None else (request.num_chunks,):
        yield loop_placement(request.num_ranks, num_chunks)
        if num_chunks == 2:
            yield v_placement(request.num_ranks)


def _shares(placement: tuple[int, ...]) -> Sizes:
    """Return sizes in which one microbatch takes 1 over all stages of each rank, and nothing else takes memory."""
    sizes = CostTable(memory=MemoryTable(activation=1.0)).sizes(placement)
    assert sizes is not None
    return sizes


def compare(
    names: Sequence[str], request: ScheduleRequest, own: Schedule | None = None
) -> tuple[list[Study], dict[str, str]]:
    """Return studies of the possible schedules, `own` first, and the reason for each impossible one.

    The number of chunks applies to interleaved and looped-bfs, the group to interleaved, the warm-up to 1f1b. auto
    tries one chunk, two chunks and the V."""
    studies: list[Study] = []
    refused: dict[str, str] = {}
    builders = [] if own is None else [(own.name, partial(study, own, request))]
    for name in names:
        adapted = replace(
            request,
            num_chunks=request.num_chunks if PIPELINE_SCHEDULES.facts(name).chunks == "several" else None,
            group=request.group if name == "interleaved" else None,
            warm_up=request.warm_up if name == "1f1b" else None,
        )
        builders.append((name, partial(study_named, name, adapted)))
    for name, build in builders:
        try:
            studies.append(build())
        except ConfigError as error:
            refused[name] = str(error).splitlines()[0].removeprefix(f"schedule {name}: ")
    if not studies:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"none of these schedules is possible\n{reasons}")
    return studies, refused
