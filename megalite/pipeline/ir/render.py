"""Schedules as text: the grid of time slots, and the lists around a fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor

from megalite.pipeline.ir.actions import Action
from megalite.pipeline.ir.schedule import Schedule, peak_activations
from megalite.pipeline.ir.simulate import Timeline
from megalite.pipeline.ir.unit_time import unit_slots

_IDLE = "."
_CUT = "…"


@dataclass(frozen=True)
class _Grid:
    """What to draw: per rank the text of each slot and a remark for the end of the row."""

    rows: list[list[str]]
    bubbles: list[float]
    remarks: list[str]
    slot: str


def render_grid(source: Schedule | Timeline, *, width: int = 240, max_ranks: int = 16) -> str:
    """A row a rank, a column a time slot, each row ending with its bubble (idle share) and peak live activations.

    A `Schedule` is drawn in unit time: one slot an action, messages at once. Of a `Timeline` the slot is the shortest
    action. With one stage a rank cells read `F2`, with several `5F2` (stage 5). What goes beyond `width` characters or
    `max_ranks` rows is left out in the middle, and said so.
    """
    schedule = source if isinstance(source, Schedule) else source.schedule
    grid = _of_schedule(source) if isinstance(source, Schedule) else _of_timeline(source)
    peaks = peak_activations(schedule.actions, forward_only=schedule.forward_only)
    num_slots = len(grid.rows[0])
    label = len(f"rank {schedule.num_ranks - 1}")
    cell = 1 + max([len(str(num_slots - 1)), *(len(text) for row in grid.rows for text in row)])
    tail = "  bubble  peak"
    slots, cut_slots = _middle_cut(num_slots, (width - label - len(tail)) // cell)
    ranks, cut_ranks = _middle_cut(schedule.num_ranks, max_ranks)

    def line(name: str, cells: Sequence[str], end: str) -> str:
        drawn = "".join((_CUT if slot is None else cells[slot]).rjust(cell) for slot in slots)
        return f"{name:<{label}}{drawn}{end}".rstrip()

    lines = [_title(schedule, grid.slot), line("", [str(slot) for slot in range(num_slots)], tail)]
    for rank in ranks:
        if rank is None:
            lines.append(_CUT)
            continue
        end = f"  {grid.bubbles[rank]:>6.1%}{peaks[rank]:>6}{grid.remarks[rank]}"
        lines.append(line(f"rank {rank}", grid.rows[rank], end))
    example = (
        "5F2 forward of microbatch 2 through stage 5"
        if schedule.num_chunks > 1
        else "F2 forward of microbatch 2"
    )
    backward = "" if schedule.forward_only else ", B its backward"
    lines.append(f"{example}{backward}, {_IDLE} idle; peak: live activations, in microbatches x stages")
    for what, cut in (("slots", cut_slots), ("ranks", cut_ranks)):
        if cut:
            lines.append(f"{_CUT} {what} {cut[0]} to {cut[-1]} are left out")
    return "\n".join(lines)


def render_lists(
    actions: Sequence[Sequence[Action]], marks: Mapping[int, int], *, width: int = 120, max_ranks: int = 16
) -> str:
    """The action lists as they stand, a row a rank, for programs that no clock can run.

    `marks` (rank -> position) are shown as `>2F3<`; long rows are cut around their mark, and a rank without one around
    the first mark's position. With more than `max_ranks` ranks those without a mark are left out first.
    """
    around = next(iter(marks.values()), 0)
    ranks = sorted(range(len(actions)), key=lambda rank: (rank not in marks, rank))[:max_ranks]
    label = len(f"rank {len(actions) - 1}: ")
    lines = []
    for rank in sorted(ranks):
        cells = [
            f">{action}<" if marks.get(rank) == i else str(action) for i, action in enumerate(actions[rank])
        ]
        lines.append(f"rank {rank}: ".ljust(label) + _window(cells, marks.get(rank, around), width - label))
    if len(ranks) < len(actions):
        lines.append(f"{_CUT} {len(actions) - len(ranks)} ranks are left out")
    return "\n".join(lines)


def _window(cells: list[str], centre: int, width: int) -> str:
    """As many cells around the centre as fit, with … where some are cut."""
    if not cells:
        return "(nothing)"
    low = high = min(centre, len(cells) - 1)
    used = len(cells[low])
    room = width - 2 * len(f" {_CUT}")
    while True:
        left = len(cells[low - 1]) + 1 if low > 0 else None
        right = len(cells[high + 1]) + 1 if high + 1 < len(cells) else None
        # Grow on the shorter side, so that the centre stays in view with what is before and after it.
        if left is not None and used + left <= room and (right is None or centre - low <= high - centre):
            low, used = low - 1, used + left
        elif right is not None and used + right <= room:
            high, used = high + 1, used + right
        else:
            break
    before = [_CUT] if low > 0 else []
    after = [_CUT] if high + 1 < len(cells) else []
    return " ".join([*before, *cells[low : high + 1], *after])


def _title(schedule: Schedule, slot: str) -> str:
    stages = f"{schedule.num_stages} stages" if schedule.num_chunks > 1 else "one stage each"
    return (
        f"schedule {schedule.name}: {schedule.num_ranks} ranks, {stages}, {schedule.num_microbatches} microbatches; "
        f"one slot = {slot}"
    )


def _cell_text(action: Action, schedule: Schedule) -> str:
    return str(action) if schedule.num_chunks > 1 else f"{action.kind}{action.microbatch}"


def _of_schedule(schedule: Schedule) -> _Grid:
    slots = unit_slots(schedule)
    num_slots = max(slots.values(), default=-1) + 1
    rows = [[_IDLE] * num_slots for _ in schedule.actions]
    remarks = []
    for row, actions in zip(rows, schedule.actions, strict=True):
        stuck = next((action for action in actions if action not in slots), None)
        for action in actions:
            if action in slots:
                row[slots[action]] = _cell_text(action, schedule)
        remarks.append("" if stuck is None else f"  stuck at {stuck}")
    bubbles = [row.count(_IDLE) / max(num_slots, 1) for row in rows]
    return _Grid(rows, bubbles, remarks, "any one action")


def _of_timeline(timeline: Timeline) -> _Grid:
    schedule = timeline.schedule
    unit = min((event.end - event.start for event in timeline.events if event.end > event.start), default=1.0)

    def slot(time: float) -> int:
        # Half up: two ends at least a unit apart then never share a slot.
        return floor(time / unit + 0.5)

    rows = [[_IDLE] * slot(timeline.makespan) for _ in range(schedule.num_ranks)]
    for event in timeline.events:
        first, stop = slot(event.start), slot(event.end)
        text = _cell_text(event.action, schedule)
        rows[event.rank][first:stop] = [text, *["-" * len(text)] * (stop - first - 1)][: stop - first]
    bubbles = [idle / timeline.makespan if timeline.makespan else 0.0 for idle in timeline.idle]
    return _Grid(rows, bubbles, [""] * schedule.num_ranks, f"{unit:g}")


def _middle_cut(count: int, room: int) -> tuple[list[int | None], range]:
    """The indices to show, None where the middle is cut, and the indices left out. Shows two at least."""
    if count <= room:
        return list(range(count)), range(0)
    shown = max(room - 1, 2)
    head = (shown + 1) // 2
    cut = range(head, count - (shown - head))
    return [*range(head), None, *range(cut.stop, count)], cut
