"""Render schedules as text: the grid of time slots, and the action lists around a fault."""

from collections.abc import Iterable, Mapping, Sequence
from math import floor
from typing import NamedTuple

from megalite.pipeline.ir.actions import MEANINGS, Action, Kind
from megalite.pipeline.ir.lower import NEVER, unit_starts
from megalite.pipeline.ir.memory import activation_peaks
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Timeline
from megalite.pipeline.ir.table import Table

_IDLE = "."
_CUT = "…"
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
        numbers = "".join((_CUT if slot is None else str(slot)).rjust(cell) for slot in panel)
        lines.append(f"{'':<{label}}{numbers}{heading if last else ''}".rstrip())
        for rank in ranks:
            if rank is None:
                lines.append(_CUT)
                continue
            row = grid.rows[rank]
            drawn = "".join((_CUT if slot is None else row[slot]).rjust(cell) for slot in panel)
            lines.append(f"{f'rank {rank}':<{label}}{drawn}{ends[rank] if last else ''}".rstrip())
    lines.append(_legend(schedule))
    for what, cut in (("slots", cut_slots), ("ranks", cut_ranks)):
        if cut:
            lines.append(f"{_CUT} {what} {cut[0]} to {cut[-1]} are left out")
    if grid.hidden:
        lines.append(f"{grid.hidden} actions are too short to be seen")
    return "\n".join(lines)


def render_lists(
    actions: Sequence[Sequence[Action]], marks: Mapping[int, int], *, width: int = 120, max_ranks: int = 16
) -> str:
    """Draw the plain action lists, a row per rank, for programs that cannot be simulated.

    `marks` (rank -> position) are shown as `>2F3<`. Long rows are cut around their mark, or around the position of the
    first mark. With more than `max_ranks` ranks, those without a mark are left out first.
    """
    around = next(iter(marks.values()), 0)
    ranks = sorted(range(len(actions)), key=lambda rank: (rank not in marks, rank))[:max_ranks]
    label = len(f"rank {len(actions) - 1}: ")
    lines = []
    for rank in sorted(ranks):
        cells = [f">{action}<" if marks.get(rank) == i else str(action) for i, action in enumerate(actions[rank])]
        lines.append(f"rank {rank}: ".ljust(label) + _window(cells, marks.get(rank, around), width - label))
    if len(ranks) < len(actions):
        lines.append(f"{_CUT} {len(actions) - len(ranks)} ranks are left out")
    return "\n".join(lines)


def _window(cells: list[str], centre: int, width: int) -> str:
    """Join as many cells around the centre as fit, with … at a cut."""
    if not cells:
        return "(nothing)"
    low = high = min(centre, len(cells) - 1)
    used = len(cells[low])
    room = width - 2 * len(f" {_CUT}")
    while True:
        left = len(cells[low - 1]) + 1 if low > 0 else None
        right = len(cells[high + 1]) + 1 if high + 1 < len(cells) else None
        # Grow on the shorter side, to show cells both before and after the centre.
        if left is not None and used + left <= room and (right is None or centre - low <= high - centre):
            low, used = low - 1, used + left
        elif right is not None and used + right <= room:
            high, used = high + 1, used + right
        else:
            break
    before = [_CUT] if low > 0 else []
    after = [_CUT] if high + 1 < len(cells) else []
    return " ".join([*before, *cells[low : high + 1], *after])


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


def _legend(schedule: Schedule) -> str:
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
