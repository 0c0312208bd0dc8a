"""One pipeline schedule for `megalite schedule`: built or read, proved, and run on a clock."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from megalite.cli.tool_commands import AUTO
from megalite.config.errors import ConfigError
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.pipeline.ir.actions import ScheduleError
from megalite.pipeline.ir.costs_file import CostTable, MemoryTable
from megalite.pipeline.ir.generators.auto import build_auto
from megalite.pipeline.ir.generators.one_chunk import loop_placement, v_placement
from megalite.pipeline.ir.generators.registry import build_schedule, forward_only, placement_for
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.render import render_grid
from megalite.pipeline.ir.schedule import Program, Schedule, live_units
from megalite.pipeline.ir.simulate import Timeline, simulate
from megalite.pipeline.ir.validate import validate, validate_written

MOST_CELLS = 1_000_000
"""(stage, microbatch) pairs; more would take minutes and gigabytes, and show nothing that fewer do not."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line asks of each schedule."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int | None  # None: what the schedule needs
    group: int | None = None
    warm_up: str | None = None
    recompute_ahead: bool = False
    forward_only: bool = False
    table: CostTable
    limit: float | None = None  # bytes; without sizes in the table, microbatches' activations of a rank's whole share
    recv_prefetch: int = 1
    send_window: int = 1


@dataclass(frozen=True)
class Study:
    """A schedule that has been proved, on its clock."""

    schedule: Schedule
    program: Program
    timeline: Timeline
    sends: tuple[int, ...]
    peak_receives: tuple[int, ...]
    peak_bytes: tuple[float, ...] | None  # per rank; None if the costs say nothing of memory

    @cached_property
    def peak_deferred(self) -> tuple[int, ...]:
        """Per rank, the most (stage, microbatch) pairs of which the I has run and the W has not."""
        if self.schedule.forward_only:
            return (0,) * self.schedule.num_ranks
        return tuple(max((units.deferred for units in live_units(row)), default=0) for row in self.schedule.actions)

    @property
    def ideal(self) -> float:
        """The time that the busiest rank computes: no order of its actions takes less."""
        return max(self.timeline.busy)

    @cached_property
    def peak_shares(self) -> float:
        """The most live activations on any rank, in microbatches of its whole share of the model."""
        peaks = enumerate(self.timeline.peak_activations)
        return max(peak / max(1, len(self.schedule.stages_of(rank))) for rank, peak in peaks)

    def as_data(self, *, lowered: bool = False) -> dict[str, Any]:
        """Everything, for JSON. Times are in the unit of the costs."""
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


def study_named(name: str, request: Request) -> Study:
    """Builds the schedule of that name and studies it."""
    _check_amount(request)
    if name == AUTO:
        if request.forward_only:
            raise ConfigError(
                "there is nothing to build for forwards alone; use --forward-only with another --schedule"
            )
        return _best(_placements(request), lambda placement: _study_auto(placement, request))
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


def study_file(schedule: Schedule, request: Request) -> Study:
    """Studies a schedule that somebody wrote."""
    _check_amount(request)
    try:
        validate_written(schedule)
        return study(schedule, request)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\ndrawn as far as it gets:\n{render_grid(schedule)}") from None


def study(schedule: Schedule, request: Request) -> Study:
    """Lowers, proves and simulates."""
    program = lower(schedule, recv_prefetch=request.recv_prefetch, send_window=request.send_window)
    sizes = request.table.sizes(schedule.placement)
    counted = sizes if sizes is not None or request.limit is None else _shares(schedule.placement)
    report = validate(program, sizes=counted, limit=request.limit)
    costs = request.table.costs(schedule.placement, ahead=bool(schedule.recomputed))
    timeline = simulate(program, costs)
    if not timeline.makespan:
        raise ConfigError(
            f"{request.table.source}: all that schedule {schedule.name} does takes no time; give its actions a cost above 0"
        )
    peaks = report.peak_bytes if sizes is not None else None
    peak_bytes = None if peaks is None else tuple(peak.size for peak in peaks)
    return Study(schedule, program, timeline, report.sends, report.peak_receives, peak_bytes)


def _check_amount(request: Request) -> None:
    cells = request.num_ranks * (request.num_chunks or 1) * request.num_microbatches
    if cells > MOST_CELLS:
        raise ConfigError(
            f"pp {request.num_ranks} x vpp {request.num_chunks or 1} x microbatches {request.num_microbatches} are "
            f"{cells:,} cells; use at most {MOST_CELLS:,} (schedules are periodic: fewer microbatches show the same)"
        )


def _placements(request: Request) -> Iterator[tuple[int, ...]]:
    """Where `auto` may put the stages: loops, and with two stages per rank a V as well."""
    for num_chunks in (1, 2) if request.num_chunks is None else (request.num_chunks,):
        yield loop_placement(request.num_ranks, num_chunks)
        if num_chunks == 2:
            yield v_placement(request.num_ranks)


def _study_auto(placement: tuple[int, ...], request: Request) -> Study:
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
    return study(schedule, request)


def _shares(placement: tuple[int, ...]) -> Sizes:
    """A microbatch's activations of a rank's whole share are 1, and nothing else takes memory."""
    sizes = replace(CostTable(), memory=MemoryTable(activation=1.0)).sizes(placement)
    assert sizes is not None
    return sizes


def _best(placements: Iterator[tuple[int, ...]], build: Callable[[tuple[int, ...]], Study]) -> Study:
    """The quickest of those that can be built; with equal times the first, which has fewer messages."""
    found: list[Study] = []
    errors: list[ConfigError] = []
    for placement in placements:
        try:
            found.append(build(placement))
        except ConfigError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda each: each.timeline.makespan * (1 + 1e-9 * found.index(each)))


def compare(names: Sequence[str], request: Request, own: Schedule | None = None) -> tuple[list[Study], dict[str, str]]:
    """Studies of all the named schedules that can be had, `own` first; and for the others the reason.

    Chunks are those of interleaved and looped-bfs, the group is interleaved's, the warm-up 1f1b's; auto tries one and
    two chunks and the V."""
    studies: list[Study] = []
    refused: dict[str, str] = {}
    wanted = [] if own is None else [(own.name, partial(study, own, request))]
    for name in names:
        its = replace(
            request,
            num_chunks=request.num_chunks if PIPELINE_SCHEDULES.facts(name).chunks == "several" else None,
            group=request.group if name == "interleaved" else None,
            warm_up=request.warm_up if name == "1f1b" else None,
        )
        wanted.append((name, partial(study_named, name, its)))
    for name, build in wanted:
        try:
            studies.append(build())
        except ConfigError as error:
            refused[name] = str(error).splitlines()[0].removeprefix(f"schedule {name}: ")
    if not studies:
        reasons = "\n".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"none of these schedules is possible\n{reasons}")
    return studies, refused
