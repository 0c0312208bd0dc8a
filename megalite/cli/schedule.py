"""`megalite schedule`: build or read a pipeline schedule, prove it, simulate it and draw it; compare several.

The first part computes a `Study` of each schedule, the second formats studies, the third is the command."""

import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from megalite.cli.display import table, working
from megalite.cli.output import show, stdout_is_terminal
from megalite.cli.tool_commands import AUTO, NAMES
from megalite.config.byte_size import format_bytes, parse_byte_size
from megalite.config.errors import ConfigError
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.config.reading import read_input, write_text
from megalite.pipeline.ir.actions import ScheduleError
from megalite.pipeline.ir.costs_file import UNITS, CostTable, MemoryTable, read_costs
from megalite.pipeline.ir.generators.auto import build_auto
from megalite.pipeline.ir.generators.one_chunk import loop_placement, v_placement
from megalite.pipeline.ir.generators.registry import build_schedule, default_schedule, forward_only, placement_for
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.perfetto import merge_traces
from megalite.pipeline.ir.render import render_grid, render_lists
from megalite.pipeline.ir.schedule import Program, Schedule, live_units
from megalite.pipeline.ir.simulate import Timeline, simulate
from megalite.pipeline.ir.svg import Panel, draw_svg
from megalite.pipeline.ir.validate import validate, validate_written
from megalite.planner.page import Row, Section, Table, page

_WIDTH = 240  # columns of the grid without a terminal
_DEFAULT_UNIT_SECONDS = 1e-3  # in a trace, one unit of costs without a named unit
_SHOWN_RANKS = 64
_LIVE = "live activations, in microbatches x stages"

MAX_CELLS = 1_000_000
"""Maximum number of (stage, microbatch) pairs; more would take minutes and gigabytes without further insight."""

# ---- study


@dataclass(frozen=True, kw_only=True)
class Request:
    """Options of the command line that apply to each schedule."""

    num_ranks: int
    num_microbatches: int
    num_chunks: int | None  # None: as many as the schedule needs
    group: int | None = None
    warm_up: str | None = None
    recompute_ahead: bool = False
    forward_only: bool = False
    table: CostTable
    limit: float | None = None  # bytes per rank; if the table has no sizes, microbatches of a rank's whole share
    recv_prefetch: int = 1
    send_window: int = 1


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
        """Maximum live activations over ranks, in microbatches of a rank's whole share of the model."""
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


def study_named(name: str, request: Request) -> Study:
    """Build and study the schedule of that name."""
    _check_amount(request)
    if name == AUTO:
        if request.forward_only:
            raise ConfigError("schedule auto has no --forward-only; use --forward-only with another --schedule")
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
    """Study a schedule from a file."""
    _check_amount(request)
    try:
        validate_written(schedule)
        return study(schedule, request)
    except ScheduleError as error:
        raise ScheduleError(f"{error}\ndrawn until it blocks:\n{render_grid(schedule)}") from None


def study(schedule: Schedule, request: Request) -> Study:
    """Lower, prove and simulate a schedule."""
    program = lower(schedule, recv_prefetch=request.recv_prefetch, send_window=request.send_window)
    sizes = request.table.sizes(schedule.placement)
    limited = sizes if sizes is not None or request.limit is None else _shares(schedule.placement)
    report = validate(program, sizes=limited, limit=request.limit)
    costs = request.table.costs(schedule.placement, ahead=bool(schedule.recomputed))
    timeline = simulate(program, costs)
    if not timeline.makespan:
        raise ConfigError(
            f"{request.table.source}: all actions of schedule {schedule.name} cost 0; give at least one a cost above 0"
        )
    peaks = report.peak_bytes if sizes is not None else None
    peak_bytes = None if peaks is None else tuple(peak.size for peak in peaks)
    return Study(schedule, program, timeline, report.sends, report.peak_receives, peak_bytes)


def _check_amount(request: Request) -> None:
    cells = request.num_ranks * (request.num_chunks or 1) * request.num_microbatches
    if cells > MAX_CELLS:
        raise ConfigError(
            f"pp {request.num_ranks} x vpp {request.num_chunks or 1} x microbatches {request.num_microbatches} are "
            f"{cells:,} cells; use at most {MAX_CELLS:,} (schedules are periodic: fewer microbatches show the same)"
        )


def _placements(request: Request) -> Iterator[tuple[int, ...]]:
    """Yield the placements that `auto` tries: loops, and with two stages per rank a V."""
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
    """Return sizes in which one microbatch takes 1 over all stages of a rank, and nothing else takes memory."""
    sizes = replace(CostTable(), memory=MemoryTable(activation=1.0)).sizes(placement)
    assert sizes is not None
    return sizes


def _best(placements: Iterator[tuple[int, ...]], build: Callable[[tuple[int, ...]], Study]) -> Study:
    """Return the fastest study. Of equal times the first wins, which sends fewer messages."""
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


# ---- text and pictures


def format_study(study: Study, *, unit: str, width: int, lowered: bool) -> str:
    """Return the grid, the summary, and with `lowered` the actions of the program."""
    columns = {}
    if any(study.peak_deferred):
        columns["for W"] = [str(peak) for peak in study.peak_deferred]
    if study.peak_bytes is not None:
        columns["memory"] = [format_bytes(round(peak)) for peak in study.peak_bytes]
    grid = render_grid(study.timeline, width=width, max_ranks=_SHOWN_RANKS, wrap=True, columns=columns)
    if "for W" in columns:
        grid += "; for W: those that still wait for their W"
    parts = [grid, f"{summary(study, unit)}\nsends per step, by rank: {' '.join(map(str, study.sends))}"]
    if lowered:
        actions = study.program.actions
        longest = max(sum(len(str(action)) + 1 for action in row) for row in actions)
        parts.append("program:\n" + render_lists(actions, {}, width=longest + 40, max_ranks=study.schedule.num_ranks))
    return "\n\n".join(parts)


def summary(study: Study, unit: str) -> str:
    """Return makespan and bubble in one line."""
    timeline = study.timeline
    name = f" {unit}" if unit else ""
    return (
        f"makespan {timeline.makespan:.6g}{name} ({timeline.makespan / study.ideal:.3f} of the ideal {study.ideal:.6g}), "
        f"bubble {timeline.bubble_fraction:.1%}, without a barrier between steps {timeline.span_bubble_fraction:.1%}"
    )


def peak_texts(study: Study) -> tuple[str, ...]:
    """Return the peak memory per rank: bytes if the costs have sizes, else live activations."""
    if study.peak_bytes is not None:
        return tuple(format_bytes(round(peak)) for peak in study.peak_bytes)
    return tuple(map(str, study.timeline.peak_activations))


def meaning_of_peaks(studies: Sequence[Study]) -> str:
    """Return what the numbers of `peak_texts` mean. All studies share their costs."""
    return _LIVE if studies[0].peak_bytes is None else "memory of one step's activations and messages"


_MEANING = (
    "no barrier: the bubble if the next step may start at once; of the fullest rank: peak, microbatches with live",
    "activations, and for W, those that still wait for their W, in whole shares per rank; its sends per step",
)


def comparison(studies: Sequence[Study], unit: str) -> list[list[str]]:
    """Return a heading and a row per schedule."""
    bytes_known = any(study.peak_bytes is not None for study in studies)
    heading = ["schedule", "vpp", f"makespan{f' ({unit})' if unit else ''}", "of ideal", "bubble", "no barrier"]
    heading += ["peak", "for W", *(["memory"] if bytes_known else []), "sends"]
    rows = [heading]
    for study in studies:
        timeline = study.timeline
        chunks = study.schedule.num_chunks
        row = [study.schedule.name, str(chunks), f"{timeline.makespan:.6g}"]
        row += [f"{timeline.makespan / study.ideal:.3f}", f"{timeline.bubble_fraction:.1%}"]
        row += [f"{timeline.span_bubble_fraction:.1%}", f"{study.peak_shares:.4g}"]
        row.append(f"{max(study.peak_deferred) / chunks:.4g}")
        if study.peak_bytes is not None:
            row.append(format_bytes(round(max(study.peak_bytes))))
        rows.append([*row, str(max(study.sends))])
    return rows


def format_comparison(studies: Sequence[Study], refused: Mapping[str, str], *, unit: str) -> str:
    """Return a table of schedules, and the reason for each impossible one."""
    rows = comparison(studies, unit)
    lines = [*table(rows, right=range(1, len(rows[0]))), "", *_MEANING]
    if refused:
        lines += ["", *(f"{name}: not possible: {reason}" for name, reason in refused.items())]
    return "\n".join(lines)


def _drawn(studies: Sequence[Study], unit: str) -> str:
    panels = [Panel(study.timeline, peak_texts(study), summary(study, unit)) for study in studies]
    return draw_svg(panels, unit=unit, peak=meaning_of_peaks(studies))


def html_page(studies: Sequence[Study], refused: Mapping[str, str], unit: str) -> str:
    """Return a page with the comparison, the impossible schedules and a drawing of each schedule."""
    head, *rows = comparison(studies, unit)
    missing = [f"{name}: not possible: {reason}" for name, reason in refused.items()]
    first = studies[0].schedule
    return page(
        f"Pipeline schedules, {first.num_ranks} ranks, {first.num_microbatches} microbatches",
        [
            Section(texts=[" ".join(_MEANING), *missing], table=Table(head, [Row(row) for row in rows], left=(0,))),
            Section(figures=[(_drawn(studies, unit), "")]),
        ],
    )


# ---- command


def run(flags: Namespace) -> int:
    _check_flags(flags)
    compared = flags.compare
    builds = flags.schedule == AUTO or (compared is not None and (not compared or AUTO in compared))
    with working("building auto: seconds, up to minutes for many ranks and microbatches") if builds else nullcontext():
        answer = _answer(flags)
    show(answer)
    return 0


def _check_flags(flags: Namespace) -> None:
    """Require --pp and --microbatches, and refuse flags without effect."""
    for flag in ("--pp", "--microbatches") if flags.csv is None else ():
        if getattr(flags, flag[2:]) is None:
            raise ConfigError(f"{flag} is missing; write e.g. megalite schedule --pp 4 --microbatches 8")
    names = (_name(flags),) if flags.compare is None else flags.compare or NAMES
    for flag, value, name in (("--group", flags.group, "interleaved"), ("--warm-up", flags.warm_up, "1f1b")):
        if value is not None and (name not in names or flags.forward_only):
            raise ConfigError(f"{flag} {value} has no effect without schedule {name} for training; remove it")


def _name(flags: Namespace) -> str:
    return flags.schedule or default_schedule(flags.vpp or 1)


def _answer(flags: Namespace) -> str:
    table = CostTable() if flags.costs is None else read_costs(flags.costs)
    own = None if flags.csv is None else Schedule.from_csv(read_input(flags.csv, "schedule file"), name=flags.csv.name)
    request = _request(flags, table, own)
    unit = table.unit or ""
    refused: dict[str, str] = {}
    if flags.compare is not None:
        if own is not None and own.forward_only:
            raise ConfigError(f"{flags.csv} has no backwards; --compare compares schedules for training")
        studies, refused = compare(flags.compare or NAMES, request, own)
    elif own is not None:
        studies = [study_file(own, request)]
    else:
        studies = [study_named(_name(flags), request)]
    written = _write(flags, studies, refused, unit)
    if flags.json:
        data = [study.as_data(lowered=flags.lowered) for study in studies]
        if flags.compare is not None:
            return json.dumps({"unit": table.unit, "schedules": data, "refused": refused, "written": written})
        return json.dumps({"unit": table.unit, **data[0], "written": written})
    if flags.compare is not None:
        text = format_comparison(studies, refused, unit=unit)
    else:
        width = shutil.get_terminal_size().columns if stdout_is_terminal() else _WIDTH
        text = format_study(studies[0], unit=unit, width=width, lowered=flags.lowered)
    return "\n".join([text, *(f"wrote {path}" for path in written)])


def _request(flags: Namespace, table: CostTable, own: Schedule | None) -> Request:
    same = ("group", "warm_up", "recompute_ahead", "forward_only", "recv_prefetch", "send_window")
    return Request(
        num_ranks=flags.pp if own is None else own.num_ranks,
        num_microbatches=flags.microbatches if own is None else own.num_microbatches,
        num_chunks=own.num_chunks if own is not None and own.num_chunks > 1 else flags.vpp,
        table=table,
        limit=None if flags.memory_limit is None else _limit(flags.memory_limit, table),
        **{name: getattr(flags, name) for name in same},
    )


def _limit(text: str, table: CostTable) -> float:
    """Parse --memory-limit: bytes, or microbatches if the table has no sizes."""
    size = parse_byte_size(text)
    if size is not None and table.memory is None:
        raise ConfigError(
            f"--memory-limit {text} is in bytes, but no sizes are set ({table.source}); give microbatches such as 4"
        )
    if size is None and re.fullmatch(r"\d+(\.\d*)?(e\d{1,2})?", text.strip(), re.ASCII):
        size = float(text)
    if not size:
        raise ConfigError(f"--memory-limit is {text}; use bytes such as 12GiB or 800MB, or microbatches such as 4")
    return size


def _write(flags: Namespace, studies: Sequence[Study], refused: Mapping[str, str], unit: str) -> list[str]:
    texts: dict[Path, str] = {}
    if flags.write_csv is not None:
        texts[flags.write_csv] = studies[0].schedule.to_csv()
    if flags.svg is not None:
        texts[flags.svg] = _drawn(studies, unit)
    if flags.html is not None:
        texts[flags.html] = html_page(studies, refused, unit)
    if flags.trace is not None:
        scale = UNITS[unit] if unit else _DEFAULT_UNIT_SECONDS
        sources = {
            study.schedule.name: [
                event._replace(start=event.start * scale, end=event.end * scale) for event in study.timeline.events
            ]
            for study in studies
        }
        texts[flags.trace] = json.dumps(merge_traces(sources))
    for path, text in texts.items():
        write_text(path, text)
    return [str(path) for path in texts]
