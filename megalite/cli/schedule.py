"""`megalite schedule`: build or read a pipeline schedule, prove it, simulate it and draw it; compare several."""

import json
import re
import shutil
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from megalite.cli.display import table, working
from megalite.cli.output import is_terminal, show
from megalite.config.errors import ConfigError
from megalite.config.numbers import format_bytes, parse_byte_size
from megalite.config.parallel import PIPELINE_SCHEDULES
from megalite.config.reading import read_input, write_text
from megalite.pipeline.ir.draw import Panel, draw_svg, merge_traces, render_grid
from megalite.pipeline.ir.generators import default_schedule
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import UNITS, CostTable, read_costs
from megalite.pipeline.ir.study import ScheduleRequest, Study, compare, study_named, study_written
from megalite.pipeline.ir.table import render_lists
from megalite.planner.page import Row, Section, Table, page

_WIDTH = 240  # columns of the grid without a terminal
_DEFAULT_UNIT_SECONDS = 1e-3  # in a trace, one unit of costs without a named unit
_SHOWN_RANKS = 64


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
    """Draw the schedules with the peak per rank: bytes if the costs, which all share, have sizes."""
    panels, meaning = [], "live activations, in microbatches x stages"
    for study in studies:
        peaks = tuple(map(str, study.timeline.peak_activations))
        if study.peak_bytes is not None:
            peaks = tuple(format_bytes(round(peak)) for peak in study.peak_bytes)
            meaning = "memory of one step's activations and messages"
        panels.append(Panel(study.timeline, peaks, summary(study, unit)))
    return draw_svg(panels, unit=unit, peak=meaning)


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
    builds = flags.schedule == "auto" or (compared is not None and (not compared or "auto" in compared))
    with working("building auto: seconds, up to minutes for many ranks and microbatches") if builds else nullcontext():
        answer = _answer(flags)
    show(answer)
    return 0


def _check_flags(flags: Namespace) -> None:
    """Require --pp and --microbatches, and refuse flags without effect."""
    for flag in ("--pp", "--microbatches") if flags.csv is None else ():
        if getattr(flags, flag[2:]) is None:
            raise ConfigError(f"{flag} is missing; write e.g. megalite schedule --pp 4 --microbatches 8")
    names = (_name(flags),) if flags.compare is None else flags.compare or PIPELINE_SCHEDULES.builtin
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
        studies, refused = compare(flags.compare or PIPELINE_SCHEDULES.builtin, request, own)
    elif own is not None:
        studies = [study_written(own, request)]
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
        width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else _WIDTH
        text = format_study(studies[0], unit=unit, width=width, lowered=flags.lowered)
    return "\n".join([text, *(f"wrote {path}" for path in written)])


def _request(flags: Namespace, table: CostTable, own: Schedule | None) -> ScheduleRequest:
    same = ("group", "warm_up", "recompute_ahead", "forward_only", "recv_prefetch", "send_window")
    return ScheduleRequest(
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
