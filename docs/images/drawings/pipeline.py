"""pipeline.svg: the interleaved schedule on a clock, as the generator and the simulator have it."""

from drawings.canvas import FAINT, GREY, LIGHT, MIDDLE, MUTED, Drawing
from megalite.pipeline.ir.generators import interleaved
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Kind
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate

PP, VPP, MICROBATCHES = 4, 2, 8
BLUE, ORANGE = 0, 1
FILLS = {Kind.F: (LIGHT[BLUE], MIDDLE[BLUE]), Kind.B: (LIGHT[ORANGE], MIDDLE[ORANGE])}
"""Per kind, chunk 0 and chunk 1."""


def timeline() -> Timeline:
    """A backward takes two forwards, messages nothing."""
    schedule = interleaved(PP, VPP, MICROBATCHES)
    return simulate(lower(schedule), Costs.uniform(schedule.num_stages))


def draw() -> Drawing:
    """A row per rank, time to the right; the number in a box is the microbatch."""
    drawing = Drawing(
        296,
        "Pipeline parallelism: interleaved 1F1B with 4 ranks, 2 chunks per rank and 8 microbatches; forwards, "
        "backwards and idle time of each rank.",
    )
    found = timeline()
    title = f"Interleaved 1F1B: pp {PP}, vpp {VPP}, {MICROBATCHES} microbatches"
    drawing.text(24, 26, title, size=14, align="left", bold=True)
    left, top, pitch, height = 76.0, 54.0, 36.0, 32.0
    unit = (736 - left) / found.makespan
    for rank in range(PP):
        y = top + rank * pitch
        drawing.text(24, y + height / 2, f"rank {rank}", align="left")
        drawing.box(left, y, found.makespan * unit, height, fill=GREY)
    for event in found.events:
        x, y = left + event.start * unit, top + event.rank * pitch
        width = (event.end - event.start) * unit
        chunk = found.schedule.stages_of(event.rank).index(event.action.stage)
        drawing.box(x, y, width, height, fill=FILLS[event.action.kind][chunk], edge="white")
        drawing.text(x + width / 2, y + height / 2, str(event.action.microbatch), size=11)
    axis = top + PP * pitch + 4
    drawing.line((left, axis), (736, axis), colour=FAINT)
    for tick in range(0, int(found.makespan) + 1, 10):
        drawing.line((left + tick * unit, axis), (left + tick * unit, axis + 5), colour=FAINT)
        drawing.text(left + tick * unit, axis + 14, str(tick), size=11, colour=MUTED)
    drawing.text(24, axis + 14, "time", align="left", colour=MUTED)
    _legend(drawing, axis + 44, found)
    return drawing


def _legend(drawing: Drawing, y: float, found: Timeline) -> None:
    entries = [
        ("forward", FILLS[Kind.F], 24),
        ("backward", FILLS[Kind.B], 204),
        (f"idle: {found.bubble_fraction:.1%} of the time", (GREY,), 400),
    ]
    for text, fills, x in entries:
        for index, fill in enumerate(fills):
            drawing.box(x + index * 24, y - 8, 22, 16, fill=fill, radius=2)
        drawing.text(x + len(fills) * 24 + 6, y, text, align="left")
    note = "light: the rank's first chunk of layers, strong: its second; the number is the microbatch"
    drawing.text(24, y + 24, note, align="left", colour=MUTED)
