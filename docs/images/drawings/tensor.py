"""tensor.svg: a column-parallel and a row-parallel layer after one another."""

from drawings.canvas import DARK, FAINT, GREY, INK, LIGHT, MUTED, RED, Drawing
from megalite.topology.layout import ShardSpec

TP = 2
A, B = (4, 6), (6, 4)
"""Shapes as drawn: features in, features out."""


def draw() -> Drawing:
    """Top: the two matrices and their cuts. Below: what each rank does, and what f and g are."""
    drawing = Drawing(
        398,
        "Tensor parallelism: A is cut by columns and B by rows, so that a pair of layers needs one all-reduce "
        "in the forward (g) and one in the backward (f).",
    )
    drawing.text(24, 26, "Tensor parallelism: Z = act(X·A)·B over tp 2", size=14, align="left", bold=True)
    _matrix(drawing, 187, 62, 11, "A", A, dim=1)
    drawing.text(264, 76, "cut by columns:", align="left", colour=MUTED)
    drawing.text(264, 94, "outputs", align="left", colour=MUTED)
    _matrix(drawing, 478, 51, 11, "B", B, dim=0)
    drawing.text(534, 76, "cut by rows:", align="left", colour=MUTED)
    drawing.text(534, 94, "inputs", align="left", colour=MUTED)
    _flow(drawing)
    _table(drawing, 342)
    return drawing


def _matrix(drawing: Drawing, x: float, y: float, unit: float, name: str, shape: tuple[int, int], *, dim: int) -> None:
    for rank in range(TP):
        part = ShardSpec.split(name, shape, dim=dim, index=rank, parts=TP)
        (top, bottom), (left, right) = part.slice
        width, height = (right - left) * unit, (bottom - top) * unit
        drawing.box(x + left * unit, y + top * unit, width, height, fill=LIGHT[rank], edge="white", line=2)
        middle = (x + left * unit + width / 2, y + top * unit + height / 2)
        drawing.text(*middle, f"{name}{'₀₁'[rank]}", size=14, colour=DARK[rank])


def _flow(drawing: Drawing) -> None:
    middle = 228
    drawing.box(28, middle - 26, 52, 52, fill=GREY, radius=4)
    drawing.text(54, middle, "X", size=15)
    drawing.box(680, middle - 26, 52, 52, fill=GREY, radius=4)
    drawing.text(706, middle, "Z", size=15)
    drawing.line((80, middle), (110, middle), line=1.5)
    drawing.arrow((640, middle), (680, middle))
    for rank in range(TP):
        y = middle - 42 + 84 * rank
        name = "₀₁"[rank]
        drawing.arrow((126, middle), (168, y))
        boxes = ((168, 104, f"X·A{name}"), (312, 96, f"Y{name} = act(·)"), (448, 104, f"Y{name}·B{name}"))
        for x, width, label in boxes:
            drawing.box(x, y - 22, width, 44, fill=LIGHT[rank], radius=4)
            drawing.text(x + width / 2, y, label, size=14)
        drawing.arrow((272, y), (312, y))
        drawing.arrow((408, y), (448, y))
        drawing.line((552, y), (624, middle), line=1.5)
        drawing.text(360, y + (-36 if rank == 0 else 36), f"rank {rank}", colour=DARK[rank], bold=True)
    for x, name in ((118, "f"), (632, "g")):
        drawing.circle(x, middle, 17, fill="white", edge=RED, line=2)
        drawing.text(x, middle, name, size=16, colour=RED, bold=True)
    drawing.text(54, middle + 40, "on both", colour=MUTED)
    drawing.text(706, middle + 40, "on both", colour=MUTED)


def _table(drawing: Drawing, y: float) -> None:
    drawing.line((24, y - 18), (736, y - 18), colour=FAINT)
    for x, text in ((112, "f"), (112 + 340, "g")):
        drawing.text(x, y + 13, text, size=16, colour=RED, bold=True)
    drawing.text(132, y + 2, "forward: nothing", align="left")
    drawing.text(132, y + 24, "backward: all-reduce of dX", align="left", colour=RED)
    drawing.text(472, y + 2, "forward: all-reduce of Z", align="left", colour=RED)
    drawing.text(472, y + 24, "backward: nothing", align="left", colour=INK)
