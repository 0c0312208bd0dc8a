"""overview.svg: one run from its config to its checkpoint, the ranks that train it and what they exchange."""

from drawings.canvas import DARK, FAINT, GREY, INK, LIGHT, MIDDLE, MUTED, RED, Drawing
from megalite.pipeline.ir.generators import one_f_one_b
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Kind
from megalite.pipeline.ir.simulate import Costs, Timeline, simulate
from megalite.topology.layout import ParallelLayout

LAYOUT = ParallelLayout(tp=2, pp=2, dp=2)
MICROBATCHES = 4
BLUE, ORANGE = 0, 1
FILLS = {Kind.F: LIGHT[BLUE], Kind.B: LIGHT[ORANGE]}
STEPS = {
    "config": ("preset, YAML, flags;", "one validator, for", "any number of ranks"),
    "layout": ("who is in which", "group; which layers", "are on which stage"),
    "schedule": ("actions of each rank:", "proved, simulated,", "drawn, then run"),
    "executor": ("does what the list", "says; buckets, one", "optimizer step"),
    "checkpoint": ("hashed; all or", "nothing; any layout", "continues from it"),
}
"""What a run goes through -> three lines about it."""
OTHERS = ("tp 4 · dp 2", "pp 4 · dp 2", "one rank")
"""Layouts that could continue from the checkpoint."""
CELL = 42.0


def timeline() -> Timeline:
    """A backward takes two forwards, messages nothing."""
    schedule = one_f_one_b(LAYOUT.pp, MICROBATCHES)
    return simulate(lower(schedule), Costs.uniform(schedule.num_stages))


def draw() -> Drawing:
    """The five steps on top; ranks at the lower left; schedule and checkpoint at the lower right."""
    drawing = Drawing(
        470,
        "One run: config, layout, schedule, executor, checkpoint; 8 ranks as tp 2, pp 2, dp 2 with what they exchange, "
        "the schedule of their pipelines, and the layouts that can continue from the checkpoint.",
    )
    drawing.text(24, 26, "One run", size=14, align="left", bold=True)
    _steps(drawing, 48)
    _ranks(drawing, 178)
    _schedule(drawing, 178)
    _checkpoint(drawing, 330)
    return drawing


def _steps(drawing: Drawing, y: float) -> None:
    width, gap, height = 128.0, 18.0, 92.0
    for index, (name, lines) in enumerate(STEPS.items()):
        x = 24 + index * (width + gap)
        drawing.box(x, y, width, height, fill="#f6f8fa", edge=FAINT, radius=6)
        drawing.text(x + width / 2, y + 18, name, size=13, bold=True)
        for row, line in enumerate(lines):
            drawing.text(x + width / 2, y + 40 + 17 * row, line, size=11, colour=MUTED)
        if index:
            drawing.arrow((x - gap + 1, y + height / 2), (x - 1, y + height / 2), colour=INK)


def _ranks(drawing: Drawing, y: float) -> None:
    """A block a replica, a row per stage, a column a tensor-parallel rank."""
    title = f"{LAYOUT.world_size} ranks = tp {LAYOUT.tp} · pp {LAYOUT.pp} · dp {LAYOUT.dp}"
    drawing.text(24, y, title, size=13, align="left", bold=True)
    left, top, between, down = 88.0, y + 52, 22.0, 88.0
    block = LAYOUT.tp * CELL + (LAYOUT.tp - 1) * between
    apart = block + 72
    for rank in range(LAYOUT.world_size):
        place = LAYOUT.coordinate(rank)
        x = left + place.dp * apart + place.tp * (CELL + between)
        row = top + place.pp * down
        drawing.box(x, row, CELL, CELL, fill=(LIGHT, MIDDLE)[place.tp % 2][place.pp], radius=4)
        drawing.text(x + CELL / 2, row + CELL / 2, str(rank), size=15)
        if place.tp:
            _both_ways(drawing, (x - between + 2, row + CELL / 2), (x - 2, row + CELL / 2))
        if place.pp:
            _both_ways(drawing, (x + CELL / 2, row - down + CELL + 3), (x + CELL / 2, row - 3))
    height = (LAYOUT.pp - 1) * down + CELL + 20
    for dp in range(LAYOUT.dp):
        x = left + dp * apart - 10
        drawing.box(x, top - 10, block + 20, height, edge=FAINT, radius=8, dashed=True)
        if dp:
            end = (x - 4, top - 10 + height / 2)
            _both_ways(drawing, (x - apart + block + 24, end[1]), end, line=2.5)
        drawing.text(left + dp * apart + block / 2, top - 22, f"replica {dp}", size=12, colour=MUTED)
    for pp in range(LAYOUT.pp):
        drawing.text(24, top + pp * down + CELL / 2, f"stage {pp}", align="left", colour=DARK[pp])
    notes = (
        ("tp", "parts of a layer's sums, in every layer"),
        ("pp", "activations and their gradients"),
        ("dp", "gradients, once per step"),
    )
    for row, (axis, text) in enumerate(notes):
        line = top + LAYOUT.pp * down + 2 + 19 * row
        drawing.text(24, line, axis, align="left", colour=RED, bold=True)
        drawing.text(54, line, text, align="left", colour=MUTED)


def _both_ways(drawing: Drawing, start: tuple[float, float], end: tuple[float, float], *, line: float = 1.2) -> None:
    middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
    drawing.arrow(middle, end, colour=RED, line=line)
    drawing.arrow(middle, start, colour=RED, line=line)


def _schedule(drawing: Drawing, y: float) -> None:
    """The clock of one pipeline: a row per stage."""
    found = timeline()
    left, top, height = 462.0, y + 26, 28.0
    title = f"one pipeline's step: {found.schedule.name}, {MICROBATCHES} microbatches"
    drawing.text(404, y, title, size=13, align="left", bold=True)
    unit = (736 - left) / found.makespan
    for rank in range(LAYOUT.pp):
        row = top + rank * (height + 4)
        drawing.text(404, row + height / 2, f"stage {rank}", align="left", colour=DARK[rank])
        drawing.box(left, row, found.makespan * unit, height, fill=GREY)
    for event in found.events:
        x, row = left + event.start * unit, top + event.rank * (height + 4)
        width = (event.end - event.start) * unit
        drawing.box(x, row, width, height, fill=FILLS[event.action.kind], edge="white")
        drawing.text(x + width / 2, row + height / 2, str(event.action.microbatch), size=11)
    legend = top + LAYOUT.pp * (height + 4) + 16
    entries = (
        ("forward", FILLS[Kind.F], 462.0),
        ("backward", FILLS[Kind.B], 548.0),
        (f"idle {found.bubble_fraction:.0%}", GREY, 646.0),
    )
    for text, fill, x in entries:
        drawing.box(x, legend - 7, 14, 14, fill=fill, radius=2)
        drawing.text(x + 20, legend, text, size=11, align="left", colour=MUTED)


def _checkpoint(drawing: Drawing, y: float) -> None:
    """What is on the disk, and who can continue from it."""
    drawing.text(404, y, "a checkpoint, and who continues from it", size=13, align="left", bold=True)
    top, height = y + 20, 92.0
    drawing.box(404, top, 176, height, fill="#f6f8fa", edge=FAINT, radius=6)
    lines = ("step-0000300/", "manifest.json", "weights-*.safetensors", "optimizer-*.safetensors")
    for row, line in enumerate(lines):
        drawing.text(414 + 10 * bool(row), top + 17 + 20 * row, line, size=11, align="left")
    for row, name in enumerate(OTHERS):
        middle = top + 15 + row * 31
        drawing.arrow((584, top + height / 2), (632, middle), colour=INK, line=1.2)
        drawing.box(636, middle - 12, 100, 24, fill=LIGHT[2 + row % 2], radius=4)
        drawing.text(686, middle, name, size=11)
