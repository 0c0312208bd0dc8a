"""ranks.svg: which ranks form each kind of group."""

from drawings.canvas import DARK, FAINT, LIGHT, MIDDLE, MUTED, Drawing
from megalite.topology.layout import ParallelLayout

LAYOUT = ParallelLayout(tp=2, cp=2, dp=2, pp=2)
COLUMNS = LAYOUT.tp * LAYOUT.cp
"""Ranks of one row: those that work on the same samples with the same layers."""

WHAT = {"tp": "parts of each layer", "cp": "parts of a sequence", "dp": "other samples", "pp": "other layers"}
"""What the ranks of one group have that differs."""


def draw() -> Drawing:
    """The grid with its coordinates, and the same grid once for each kind, a colour a group."""
    drawing = Drawing(390, "16 ranks as tp 2, cp 2, dp 2, pp 2: the grid of ranks and the groups of each kind.")
    drawing.text(24, 26, "16 ranks = tp 2 · cp 2 · dp 2 · pp 2", size=14, align="left", bold=True)
    _coordinates(drawing, 100, 106, 56)
    for index, kind in enumerate(WHAT):
        _groups(drawing, kind, 380 + index % 2 * 186, 56 + index // 2 * 174)
    return drawing


def _coordinates(drawing: Drawing, x: float, y: float, cell: float) -> None:
    for rank in range(LAYOUT.world_size):
        place = LAYOUT.coordinate(rank)
        column, row = place.tp + LAYOUT.tp * place.cp, place.dp + LAYOUT.dp * place.pp
        left, top = x + column * cell, y + row * cell
        drawing.box(left + 2, top + 2, cell - 4, cell - 4, fill="white", edge=FAINT, radius=4)
        drawing.text(left + cell / 2, top + cell / 2, str(rank), size=16)
        if row == 0:
            drawing.text(left + cell / 2, y - 12, f"tp {place.tp}", colour=MUTED)
            if place.tp == 0:
                _brace(drawing, (left + 6, y - 26), (left + 2 * cell - 6, y - 26))
                drawing.text(left + cell, y - 38, f"cp {place.cp}", colour=MUTED)
        if column == 0:
            drawing.text(x - 8, top + cell / 2, f"dp {place.dp}", colour=MUTED, align="right")
            if place.dp == 0:
                _brace(drawing, (x - 44, top + 6), (x - 44, top + 2 * cell - 6))
                drawing.text(x - 52, top + cell, f"pp {place.pp}", colour=MUTED, align="right")
    note = "rank = tp + 2·(cp + 2·(dp + 2·pp))"
    drawing.text(x + 2 * cell, y + 4 * cell + 26, note, colour=MUTED)


def _brace(drawing: Drawing, start: tuple[float, float], end: tuple[float, float]) -> None:
    drawing.line(start, end, colour=FAINT, line=2)


def _groups(drawing: Drawing, kind: str, x: float, y: float) -> None:
    cell = 29
    groups = LAYOUT.groups(kind)
    drawing.text(x, y - 4, kind, size=14, align="left", bold=True)
    drawing.text(x + 26, y - 4, WHAT[kind], align="left", colour=MUTED)
    fills = LIGHT + MIDDLE
    assert len(groups) <= len(fills)
    for index, ranks in enumerate(groups):
        for rank in ranks:
            left, top = x + rank % COLUMNS * cell, y + 12 + rank // COLUMNS * cell
            drawing.box(left + 1, top + 1, cell - 2, cell - 2, fill=fills[index], radius=3)
            drawing.text(left + cell / 2, top + cell / 2, str(rank))
        names = ", ".join(map(str, ranks))
        drawing.text(x + 4 * cell + 12, y + 19 + index * 14.6, names, size=11, align="left", colour=DARK[index % 4])
