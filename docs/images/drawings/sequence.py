"""sequence.svg: one block under tensor and sequence parallelism, and how its activations are split."""

from drawings.canvas import DARK, FAINT, LIGHT, MUTED, RED, Drawing
from megalite.topology.layout import ShardSpec

TP = 2
SEQUENCE, FEATURES = 0, 1

REGIONS = (
    ("norm", SEQUENCE),
    ("attention", FEATURES),
    ("dropout, + x, norm", SEQUENCE),
    ("MLP", FEATURES),
    ("dropout, + x", SEQUENCE),
)
"""What a block does, in order, and the dimension of [s, h] along which tp splits it."""


def draw() -> Drawing:
    """The regions of a block from left to right, with a collective at each border."""
    drawing = Drawing(
        306,
        "Sequence parallelism: norms, dropout and residuals are split over the sequence, attention and MLP over "
        "features; all-gather and reduce-scatter at the borders.",
    )
    drawing.text(24, 26, "Sequence parallelism: one block over tp 2", size=14, align="left", bold=True)
    size, gap, top = 84.0, 70.0, 104.0
    left = (760 - 5 * size - 4 * gap) / 2
    for index, (name, dim) in enumerate(REGIONS):
        x = left + index * (size + gap)
        _activations(drawing, x, top, size, dim)
        drawing.text(x + size / 2, top - 22, name, bold=True)
        split = "split over s" if dim == SEQUENCE else "split over heads" if name == "attention" else "split over ffn"
        drawing.text(x + size / 2, top + size + 18, split, colour=MUTED)
        if index:
            _border(drawing, x - gap, top, size, gap, gathers=dim == FEATURES)
    drawing.text(left - 10, top + size / 2, "s", colour=MUTED)
    _legend(drawing, 262)
    return drawing


def _activations(drawing: Drawing, x: float, y: float, size: float, dim: int) -> None:
    for rank in range(TP):
        part = ShardSpec.split("activations", (TP, TP), dim=dim, index=rank, parts=TP)
        (top, bottom), (left, right) = ((a * size / TP, b * size / TP) for a, b in part.slice)
        drawing.box(x + left, y + top, right - left, bottom - top, fill=LIGHT[rank], edge="white", line=2)
        middle = (x + (left + right) / 2, y + (top + bottom) / 2)
        label = f"rank {rank}" if dim == SEQUENCE else str(rank)
        drawing.text(*middle, label, colour=DARK[rank])


def _border(drawing: Drawing, x: float, y: float, height: float, width: float, *, gathers: bool) -> None:
    forward, backward = ("AG", "RS") if gathers else ("RS", "AG")
    middle = x + width / 2
    drawing.text(middle, y + 14, forward, size=13, colour=RED, bold=True)
    drawing.arrow((x + 8, y + 29), (x + width - 8, y + 29), colour=RED, line=2)
    drawing.arrow((x + width - 8, y + height - 25), (x + 8, y + height - 25), colour=RED)
    drawing.text(middle, y + height - 10, backward, size=13, colour=RED)


def _legend(drawing: Drawing, y: float) -> None:
    drawing.line((24, y - 20), (736, y - 20), colour=FAINT)
    drawing.text(24, y, "AG all-gather: [s/tp, h] → [s, h]", align="left", colour=RED)
    drawing.text(736, y, "RS reduce-scatter: sum of [s, h] → [s/tp, h]", align="right", colour=RED)
    note = "→ forward, ← backward. The first layer keeps [s/tp, h] and gathers it once more for its weight gradient."
    drawing.text(24, y + 24, note, align="left", colour=MUTED)
