"""imports.svg: the packages of megalite, each above all that it imports."""

import functools
import re
from pathlib import Path

from drawings.canvas import DARK, FAINT, LIGHT, MUTED, WIDTH, Drawing

ROOT = Path(__file__).parents[3] / "megalite"
IMPORT = re.compile(r"^\s*(?:from|import) megalite\.(\w+)", re.MULTILINE)
CORE = {
    *(
        "config",
        "topology",
        "kernels",
        "tensor_parallel",
        "context_parallel",
        "pipeline",
        "optimizers",
        "data_parallel",
    ),
    *("models", "data", "tokenizers", "checkpoint", "partition", "training", "watchdog"),
}
"""What a training run may import."""
BOX, ROW, TOP = 27.0, 62.0, 78.0


@functools.cache
def imported(package: str) -> frozenset[str]:
    """The packages that one imports."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / package).rglob("*.py"))
    return frozenset(IMPORT.findall(text)) - {package} & packages()


@functools.cache
def packages() -> frozenset[str]:
    """All of megalite's."""
    return frozenset(path.parent.name for path in ROOT.glob("*/__init__.py"))


@functools.cache
def below(package: str) -> frozenset[str]:
    """All that it imports, directly or not."""
    return frozenset[str]().union(*({name} | below(name) for name in imported(package)))


@functools.cache
def floor(package: str) -> int:
    """0 imports none."""
    return 1 + max(map(floor, imported(package)), default=-1)


def draw() -> Drawing:
    """A row per floor, the command line on top; a line to what no other line leads to already."""
    floors = 1 + max(map(floor, packages()))
    drawing = Drawing(
        TOP + floors * ROW, "The packages of megalite in rows: each imports only packages in rows below its own."
    )
    drawing.text(24, 26, "Who imports whom", size=14, align="left", bold=True)
    drawing.text(
        24,
        48,
        "Each package is above all that it imports; what other lines imply has none.",
        align="left",
        colour=MUTED,
    )
    place: dict[str, tuple[float, float, float]] = {}
    for level in range(floors):
        # Near what it imports, so that lines are short.
        names = sorted(
            (name for name in packages() if floor(name) == level),
            key=lambda name: (sum(place[b][0] for b in sorted(imported(name))) / max(1, len(imported(name))), name),
        )
        for index, name in enumerate(names):
            x = WIDTH * (index + 0.5) / len(names)
            place[name] = (x, TOP + (floors - 1 - level) * ROW, 7.4 * len(name) + 20)
    for name, (x, y, _) in place.items():
        for other in sorted(imported(name)):
            if not any(other in below(between) for between in imported(name) - {other}):
                to, down, _ = place[other]
                drawing.line((x, y + BOX), (to, down), colour=FAINT, line=1.4)
    for name, (x, y, width) in place.items():
        colour = 0 if name in CORE else 1
        drawing.box(x - width / 2, y, width, BOX, fill=LIGHT[colour], edge=DARK[colour], line=0.8, radius=5)
        drawing.text(x, y + BOX / 2, name)
    drawing.text(WIDTH - 24, 26, "blue: the core, which trains; orange: tools", align="right", colour=MUTED)
    return drawing
