"""Draw schedules and timelines: a grid of time slots as text, a picture as SVG, and a trace for ui.perfetto.dev."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, log10
from typing import Any, NamedTuple

from megalite.pipeline.ir.lower import NEVER, unit_starts
from megalite.pipeline.ir.memory import activation_peaks
from megalite.pipeline.ir.schedule import MEANINGS, Action, Kind, Schedule, dependencies
from megalite.pipeline.ir.simulate import Event, Timeline
from megalite.pipeline.ir.table import CUT, Table

_IDLE = "."
_MOST_SLOTS = 4000
"""Limit on the slots of a timeline: shorter slots are of no use, and each slot costs a list cell per rank."""
_MOST_LINES = 60  # limit on the lines of a wrapped grid, unless a single panel has more


class _Grid(NamedTuple):
    rows: list[list[str]]
    bubbles: list[float]
    remarks: list[str]
    slot: str
    hidden: int = 0  # number of actions shorter than a slot


def render_grid(
    source: Schedule | Timeline,
    *,
    width: int = 240,
    max_ranks: int = 16,
    wrap: bool = False,
    columns: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Draw a row per rank and a column per time slot. Each row ends with its bubble (idle share) and peak activations.

    A `Schedule` is drawn in unit time: one slot per action, messages take no time. The slot of a `Timeline` is its
    shortest action. Cells read `F2` with one stage per rank and `5F2` (stage 5) with several. If the grid exceeds
    `width` characters or `max_ranks` rows, its middle is left out, with a note.

    `wrap`: Continue at `width` in a new panel below, up to about a screen, before leaving anything out. `columns`:
    Further columns at the end of the rows: heading -> a text per rank."""
    schedule = source if isinstance(source, Schedule) else source.schedule
    grid = _of_schedule(source) if isinstance(source, Schedule) else _of_timeline(source)
    heading, ends = _row_ends(schedule, grid, columns or {})
    num_slots = len(grid.rows[0])
    label = len(f"rank {schedule.num_ranks - 1}")
    cell = 1 + max([len(str(num_slots - 1)), *(len(slot) for row in grid.rows for slot in row)])
    room = max(2, (width - label - len(heading)) // cell)
    ranks, cut_ranks = _middle_cut(schedule.num_ranks, max_ranks)
    most_panels = max(1, _MOST_LINES // (len(ranks) + 1)) if wrap else 1
    slots, cut_slots = _middle_cut(num_slots, room * most_panels)

    stages = f"{schedule.num_stages} stages" if schedule.num_chunks > 1 else "one stage each"
    lines = [
        f"schedule {schedule.name}: {schedule.num_ranks} ranks, {stages}, {schedule.num_microbatches} microbatches; "
        f"one slot = {grid.slot}"
    ]
    panels = [slots[first : first + room] for first in range(0, len(slots), room)] or [[]]
    for number, panel in enumerate(panels):
        last = number == len(panels) - 1
        numbers = "".join((CUT if slot is None else str(slot)).rjust(cell) for slot in panel)
        lines.append(f"{'':<{label}}{numbers}{heading if last else ''}".rstrip())
        for rank in ranks:
            if rank is None:
                lines.append(CUT)
                continue
            row = grid.rows[rank]
            drawn = "".join((CUT if slot is None else row[slot]).rjust(cell) for slot in panel)
            lines.append(f"{f'rank {rank}':<{label}}{drawn}{ends[rank] if last else ''}".rstrip())
    lines.append(_grid_legend(schedule))
    for what, cut in (("slots", cut_slots), ("ranks", cut_ranks)):
        if cut:
            lines.append(f"{CUT} {what} {cut[0]} to {cut[-1]} are left out")
    if grid.hidden:
        lines.append(f"{grid.hidden} actions are too short to be seen")
    return "\n".join(lines)


def _row_ends(schedule: Schedule, grid: _Grid, columns: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    """Return the heading and each rank's text to the right of the slots."""
    peaks = activation_peaks(Table.of(schedule.actions, schedule), send_window=1)
    heading = "  bubble  peak"
    ends = [f"  {bubble:>6.1%}{peak:>6}" for bubble, peak in zip(grid.bubbles, peaks, strict=True)]
    for name, texts in columns.items():
        size = 2 + max(len(name), *map(len, texts))
        heading += name.rjust(size)
        ends = [end + text.rjust(size) for end, text in zip(ends, texts, strict=True)]
    return heading, [end + remark for end, remark in zip(ends, grid.remarks, strict=True)]


def _grid_legend(schedule: Schedule) -> str:
    several = schedule.num_chunks > 1
    example = "5F2 forward of microbatch 2 through stage 5" if several else "F2 forward of microbatch 2"
    others = {action.kind for row in schedule.actions for action in row} - {Kind.F}
    meanings = "".join(f", {kind} its {meaning}" for kind, meaning in MEANINGS.items() if kind in others)
    return f"{example}{meanings}, {_IDLE} idle; peak: live activations, in microbatches x stages"


def _rows(schedule: Schedule, count: int, cells: Iterable[tuple[int, Action, int, int]]) -> list[list[str]]:
    """Draw `count` slots per rank; each (rank, action, first slot, end) becomes its name and dashes."""
    rows = [[_IDLE] * count for _ in schedule.actions]
    several = schedule.num_chunks > 1
    for rank, action, first, stop in cells:
        text = str(action) if several else f"{action.kind}{action.microbatch}"
        rows[rank][first:stop] = [text, *["-" * len(text)] * (stop - first - 1)][: stop - first]
    return rows


def _of_schedule(schedule: Schedule) -> _Grid:
    # If other backwards are split into halves of one slot each, a full backward takes two.
    backward = 2 if schedule.split else 1
    starts = unit_starts(Table.of(schedule.actions, schedule), backward=backward)
    actions = [(rank, action) for rank, row in enumerate(schedule.actions) for action in row]
    cells = [
        (rank, action, start, start + (backward if action.kind is Kind.B else 1))
        for (rank, action), start in zip(actions, starts, strict=True)
        if start != NEVER
    ]
    num_slots = max((stop for *_, stop in cells), default=0)
    rows = _rows(schedule, num_slots, cells)
    remarks = [""] * len(rows)
    for (rank, action), start in zip(actions, starts, strict=True):
        if start == NEVER and not remarks[rank]:
            remarks[rank] = f"  stuck at {action}"
    bubbles = [row.count(_IDLE) / max(num_slots, 1) for row in rows]
    return _Grid(rows, bubbles, remarks, "any one action" + (" (a whole backward: two)" if backward == 2 else ""))


def _of_timeline(timeline: Timeline) -> _Grid:
    shortest = min((event.end - event.start for event in timeline.events if event.end > event.start), default=1.0)
    unit = max(shortest, timeline.makespan / _MOST_SLOTS)

    def slot(time: float) -> int:
        # Half up: two times at least a unit apart then never share a slot, except for rounding of the times themselves.
        return floor(time / unit + 0.5 + 1e-9)

    cells = [(event.rank, event.action, slot(event.start), slot(event.end)) for event in timeline.events]
    rows = _rows(timeline.schedule, slot(timeline.makespan), cells)
    hidden = sum(first == stop for _, _, first, stop in cells)
    bubbles = [idle / timeline.makespan if timeline.makespan else 0.0 for idle in timeline.idle]
    in_slots = (time / unit for event in timeline.events for time in (event.start, event.end))
    rounded = ", to which times are rounded" if any(abs(t - round(t)) > 1e-6 for t in in_slots) else ""
    return _Grid(rows, bubbles, [""] * len(rows), f"{unit:g}{rounded}", hidden)


def _middle_cut(count: int, room: int) -> tuple[list[int | None], range]:
    """Return the indices to show (at least two), with None at a cut in the middle, and the indices left out."""
    if count <= room:
        return list(range(count)), range(0)
    shown = max(room - 1, 2)
    head = (shown + 1) // 2
    cut = range(head, count - (shown - head))
    return [*range(head), None, *range(cut.stop, count)], cut


_COLOURS: Mapping[Kind, tuple[str, str]] = {
    Kind.F: ("#c6dcf5", "#6fa5de"),
    Kind.B: ("#fad0a0", "#ef9d4b"),
    Kind.I: ("#fdecb0", "#f2cb4a"),
    Kind.W: ("#c4e6c2", "#79c077"),
    Kind.R: ("#e0d0f1", "#b08bd8"),
}
"""Fill of the first and last stage per rank; stages between are mixed. Dark text is readable on all of them."""
_STYLE = """
  text { font: 12px system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; fill: #1f2328; }
  .number { font-size: 11px; text-anchor: middle; }
  .end { text-anchor: end; }
  .title { font-size: 14px; font-weight: 600; }
  .quiet { fill: #57606a; }
  .idle { fill: #e6e9ed; }
  .axis { stroke: #8c959f; stroke-width: 1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .number { fill: #1f2328; }
    .quiet { fill: #9da7b3; }
    .idle { fill: #30363d; }
    .axis { stroke: #6e7681; }
  }
"""

_MARGIN, _ROW, _BAR = 16.0, 30.0, 26.0
_LETTER = 6.8  # approximate width of a digit
_NARROW, _WIDE = 640.0, 1800.0
"""Minimum and maximum width of the time axis."""


@dataclass(frozen=True)
class Panel:
    timeline: Timeline
    peaks: tuple[str, ...]  # per rank, the text at the right edge: its peak memory
    summary: str  # a line under the name


def draw_svg(panels: Sequence[Panel], *, unit: str = "", peak: str) -> str:
    """Draw schedules below each other on one time scale.

    Numbers in the boxes are microbatches, left out if they do not fit; the tooltip of a box names its action. Equal
    panels give equal bytes. `peak` describes the numbers at the right edge."""
    assert panels
    longest = max(panel.timeline.makespan for panel in panels)
    scale = _scale(panels, longest)
    left = _MARGIN + _LETTER * max(len(f"rank {panel.timeline.schedule.num_ranks - 1}") + 1 for panel in panels)
    # Right edges of the two columns to the right of the bars.
    idle = left + longest * scale + 56
    peaks = idle + 16 + _LETTER * max(len("peak"), *(len(text) for panel in panels for text in panel.peaks))
    right = peaks + _MARGIN
    body: list[str] = []
    y = _MARGIN
    for panel in panels:
        body.extend(_panel(panel, left, y, scale, idle, peaks))
        y += 56 + panel.timeline.schedule.num_ranks * _ROW
        body.extend(_axis(left, y, longest, scale, unit))
        y += 48
    chunks = max(panel.timeline.schedule.num_chunks for panel in panels)
    used = {event.action.kind for panel in panels for event in panel.timeline.events}
    kinds = [kind for kind in MEANINGS if kind in used]
    legend, y = _legend(kinds, chunks, y, right, peak)
    body.extend(legend)
    names = ", ".join(panel.timeline.schedule.name for panel in panels)
    fills = "".join(
        f"  .{kind}{chunk} {{ fill: {_fill(kind, chunk, chunks)}; }}\n" for kind in kinds for chunk in range(chunks)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(right)}" height="{_n(y)}" '
        f'viewBox="0 0 {_n(right)} {_n(y)}" role="img">\n'
        f"<title>{escape(f'Pipeline schedules on a clock: {names}', quote=False)}</title>\n"
        f"<style>{_STYLE}{fills}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _scale(panels: Sequence[Panel], longest: float) -> float:
    """Return the pixels per unit of time: wide enough for most numbers, within limits."""
    lengths = sorted(
        event.end - event.start for panel in panels for event in panel.timeline.events if event.end > event.start
    )
    short = lengths[len(lengths) // 10]
    return min(max(17 * longest / short, _NARROW), _WIDE) / longest


def _panel(panel: Panel, left: float, y: float, scale: float, idle: float, peaks: float) -> Iterator[str]:
    timeline = panel.timeline
    schedule = timeline.schedule
    stages = f", {schedule.num_stages} stages" if schedule.num_chunks > 1 else ""
    title = f"{schedule.name}: {schedule.num_ranks} ranks{stages}, {schedule.num_microbatches} microbatches"
    yield _text(_MARGIN, y + 14, title, "title")
    yield _text(_MARGIN, y + 34, panel.summary, "quiet")
    yield _text(idle, y + 34, "idle", "quiet end")
    yield _text(peaks, y + 34, "peak", "quiet end")
    top = y + 44
    for rank in range(schedule.num_ranks):
        row = top + rank * _ROW
        share = timeline.idle[rank] / timeline.makespan
        yield _text(_MARGIN, row + 17, f"rank {rank}")
        yield _box("idle", left, row, timeline.makespan * scale, _BAR)
        yield _text(idle, row + 17, f"{share:.1%}", "end")
        yield _text(peaks, row + 17, panel.peaks[rank], "end")
    for event in timeline.events:
        chunk = schedule.placement[: event.action.stage].count(event.rank)
        yield from _action(event, chunk, left, top + event.rank * _ROW, scale)


def _action(event: Event, chunk: int, left: float, y: float, scale: float) -> Iterator[str]:
    x, width = left + event.start * scale, (event.end - event.start) * scale
    # A small gap between neighbours, unless the box is very narrow.
    gap = 0.5 if width > 3 else 0.0
    about = f"{event.action}: {event.start:.6g} to {event.end:.6g}"
    yield _box(f"{event.action.kind}{chunk}", x + gap, y, width - 2 * gap, _BAR, about)
    number = str(event.action.microbatch)
    if _LETTER * len(number) + 2 <= width:
        yield _text(x + width / 2, y + 17, number, "number")


def _axis(left: float, y: float, longest: float, scale: float, unit: str) -> Iterator[str]:
    end = left + longest * scale
    yield f'<path class="axis" d="M{_n(left)} {_n(y)}H{_n(end)}"/>'
    yield _text(_MARGIN, y + 18, f"time, {unit}" if unit else "time", "quiet")
    step = _round_step(longest / 8)
    for tick in range(floor(longest / step + 1e-9) + 1):
        x = left + tick * step * scale
        yield f'<path class="axis" d="M{_n(x)} {_n(y)}v4"/>'
        if x > left or not unit:
            yield _text(x, y + 18, f"{tick * step:.6g}", "quiet", anchor="middle")


def _round_step(least: float) -> float:
    """Return the smallest number of the form 1, 2 or 5 times a power of ten that is at least `least`."""
    power = 10.0 ** floor(log10(least))
    return next(factor * power for factor in (1.0, 2.0, 5.0, 10.0) if factor * power >= least * (1 - 1e-9))


def _legend(kinds: Sequence[Kind], chunks: int, y: float, right: float, peak: str) -> tuple[list[str], float]:
    """Return the elements of the legend, wrapped at the right edge, and its lower edge."""
    drawn: list[str] = []
    shown = min(chunks, 4)
    x = _MARGIN
    for kind in (*kinds, None):
        name = "idle" if kind is None else f"{kind} {MEANINGS[kind]}"
        shades = [index * (chunks - 1) // max(shown - 1, 1) for index in range(shown)]
        styles = ["idle"] if kind is None else [f"{kind}{chunk}" for chunk in shades]
        size = 17 * len(styles) + 4 + _LETTER * len(name) + 12
        if x > _MARGIN and x + size > right:
            x, y = _MARGIN, y + 22
        drawn += [_box(style, x + 17 * index, y, 16, 14) for index, style in enumerate(styles)]
        drawn.append(_text(x + 17 * len(styles) + 4, y + 11, name))
        x += size
    note = "the number is the microbatch"
    if chunks > 1:
        note += "; light to strong: the stages per rank, from the first to the last"
    drawn += [_text(_MARGIN, y + 34, note, "quiet"), _text(_MARGIN, y + 52, f"peak: {peak}", "quiet")]
    return drawn, y + 68


def _fill(kind: Kind, chunk: int, chunks: int) -> str:
    light, strong = _COLOURS[kind]
    share = chunk / (chunks - 1) if chunks > 1 else 0.5
    mixed = (
        round(int(light[at : at + 2], 16) * (1 - share) + int(strong[at : at + 2], 16) * share) for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _box(style: str, x: float, y: float, width: float, height: float, about: str = "") -> str:
    shape = f'<rect class="{style}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="2"'
    return f"{shape}><title>{about}</title></rect>" if about else f"{shape}/>"


def _text(x: float, y: float, text: str, style: str = "", *, anchor: str = "") -> str:
    attributes = f' class="{style}"' if style else ""
    attributes += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text{attributes} x="{_n(x)}" y="{_n(y)}">{escape(text, quote=False)}</text>'


def _n(number: float) -> str:
    """Format to a hundredth of a pixel, without trailing zeros."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


_INSIDE = 0.01
"""Distance of an arrow's end from the edge of its slice, as a fraction of the slice: viewers bind an arrow to the slice
around its end."""


def merge_traces(sources: Mapping[str, Sequence[Event]]) -> dict[str, Any]:
    """Merge timelines into one trace, e.g. {"measured": ..., "ideal": ...}: one process per timeline, in dict order.

    The name of a slice is its action (`2F0`), the category is the kind, the arguments are stage and microbatch. Arrows
    lead from each result to the computation on another rank that needs it. A source may contain several consecutive
    steps: the k-th occurrences of all actions belong together.

    `sources`: name -> events, in seconds since a common start. The result, in microseconds with a resolution of a
    nanosecond, can be written with `json.dump`."""
    events: list[dict[str, Any]] = []
    flow = 0
    for process, (name, timed) in enumerate(sources.items()):
        events.append(_meta("process_name", process, 0, name=name))
        events.append(_meta("process_sort_index", process, 0, sort_index=process))
        for rank in sorted({event.rank for event in timed}):
            events.append(_meta("thread_name", process, rank, name=f"rank {rank}"))
            events.append(_meta("thread_sort_index", process, rank, sort_index=rank))
        events.extend(_slice(process, event) for event in timed)
        for producer, consumer in _messages(timed):
            shared = {"name": str(producer.action), "cat": "message", "id": flow, "pid": process}
            begin = producer.end - _INSIDE * (producer.end - producer.start)
            arrive = consumer.start + _INSIDE * (consumer.end - consumer.start)
            events.append({**shared, "ph": "s", "tid": producer.rank, "ts": _nanoseconds(begin) / 1e3})
            events.append({**shared, "ph": "f", "bp": "e", "tid": consumer.rank, "ts": _nanoseconds(arrive) / 1e3})
            flow += 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _meta(what: str, process: int, rank: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": rank, "args": arguments}


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _slice(process: int, event: Event) -> dict[str, Any]:
    kind, stage, microbatch = event.action
    # Both ends are rounded before the duration is computed, so that adjacent slices still touch and never overlap.
    start, end = _nanoseconds(event.start), _nanoseconds(event.end)
    return {
        "ph": "X",
        "name": str(event.action),
        "cat": MEANINGS[kind],
        "pid": process,
        "tid": event.rank,
        "ts": start / 1e3,
        "dur": (end - start) / 1e3,
        "args": {"stage": stage, "microbatch": microbatch},
    }


def _messages(timed: Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield pairs (producer, consumer) on different ranks."""
    times: dict[Action, list[Event]] = defaultdict(list)
    for event in sorted(timed, key=lambda event: event.start):
        times[event.action].append(event)
    # A schedule with what `dependencies` reads: sizes, splits and recomputation.
    num_stages = max((action.stage for action in times), default=-1) + 1
    num_microbatches = max((action.microbatch for action in times), default=-1) + 1
    schedule = Schedule("trace", num_microbatches, (0,) * num_stages, (tuple(times),))
    for action, occurrences in times.items():
        for needed in dependencies(action, schedule):
            # A measured step may lack events that were not recorded; their arrows are left out.
            for producer, consumer in zip(times.get(needed, ()), occurrences, strict=False):
                if producer.rank != consumer.rank:
                    yield producer, consumer
