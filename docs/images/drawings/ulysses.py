"""ulysses.svg: the all-to-all around the attention core."""

from drawings.canvas import DARK, LIGHT, MUTED, RED, Drawing
from megalite.topology.layout import ShardSpec, sequence_spans

CP = 4
CHUNKS = 2 * CP
HEADS = 8


def draw() -> Drawing:
    """Rows are positions, columns heads: split by rows, then by columns, then by rows."""
    drawing = Drawing(
        330,
        "All-to-all context parallelism: each rank exchanges its part of the sequence with all heads for the whole "
        "sequence with a part of the heads, and back.",
    )
    drawing.text(24, 26, "All-to-all (Ulysses): attention over cp 4", size=14, align="left", bold=True)
    size, top = 152.0, 96.0
    gap = (760 - 3 * size - 2 * 52) / 2
    titles = ("query, key, value", "attention", "its output")
    shapes = ("[s/cp, heads]", "[s, heads/cp]", "[s/cp, heads]")
    for index, (title, shape) in enumerate(zip(titles, shapes, strict=True)):
        x = 52 + index * (size + gap)
        split = _columns if index == 1 else _rows
        split(drawing, x, top, size)
        drawing.text(x + size / 2, top - 32, title, size=13, bold=True)
        drawing.text(x + size / 2, top - 12, "heads →", size=11, colour=MUTED)
        drawing.text(x + size / 2, top + size + 20, shape, size=13)
        if index:
            drawing.arrow((x - gap + 10, top + size / 2), (x - 10, top + size / 2), colour=RED, line=2.5)
            drawing.text(x - gap / 2, top + size / 2 - 18, "all-to-all", size=13, colour=RED, bold=True)
    drawing.text(44, top + size / 2, "s", size=13, colour=MUTED, align="right")
    note = "A rank sees every position, in true order, of its own heads. The backward goes the same way in reverse."
    drawing.text(380, 304, note, colour=MUTED)
    return drawing


def _rows(drawing: Drawing, x: float, y: float, size: float) -> None:
    """Split over the sequence, in zigzag."""
    unit = size / CHUNKS
    for rank in range(CP):
        for first, stop in sequence_spans(CHUNKS, cp_rank=rank, cp_size=CP):
            top, height = y + first * unit, (stop - first) * unit
            drawing.box(x, top, size, height, fill=LIGHT[rank], edge="white", line=1.5)
            drawing.text(x + size / 2, top + height / 2, f"rank {rank}", size=11, colour=DARK[rank])


def _columns(drawing: Drawing, x: float, y: float, size: float) -> None:
    """Split over the heads."""
    unit = size / HEADS
    for rank in range(CP):
        first, stop = ShardSpec.split("heads", (HEADS,), dim=0, index=rank, parts=CP).slice[0]
        left, width = x + first * unit, (stop - first) * unit
        drawing.box(left, y, width, size, fill=LIGHT[rank], edge="white", line=1.5)
        drawing.text(left + width / 2, y + size / 2, f"{rank}", size=13, colour=DARK[rank])
