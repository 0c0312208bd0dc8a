"""Drawings of docs/parallelism.md and docs/data.md: the files equal the script's output, and are legible."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from tests.e2e.programs import REPOSITORY
from tests.support.ranks import RankContext, run_ranks

IMAGES = REPOSITORY / "docs" / "images"
NAMES = sorted(path.stem for path in IMAGES.glob("*.svg"))

Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Import a module as `python docs/images/draw.py` does."""
    monkeypatch.syspath_prepend(IMAGES)
    return importlib.import_module


def ink(svg: str) -> tuple[list[str], list[tuple[list[int], str]]]:
    """Texts, and shapes in half pixels with their style.

    Without outlines of letters and ids, which depend on the versions of matplotlib and the font."""
    shapes = []
    outside = re.sub(r'<g id="text_\d+">.*?\n   </g>', "", svg, flags=re.DOTALL)
    for outline, style in re.findall(r'<path d="(.*?)" style="(.*?)"/>', outside, flags=re.DOTALL):
        shapes.append(([round(float(number) * 8 / 3) for number in re.findall(r"-?[\d.]+", outline)], style))
    return re.findall(r"<!-- (.*?) -->", svg), shapes


@pytest.mark.parametrize("name", NAMES)
def test_drawing_is_up_to_date_and_legible(name: str, load: Load, tmp_path: Path) -> None:
    """No text overlaps another or leaves its panel, and colours differ on a dark page."""
    drawing, kept = load("draw").DRAWINGS[name](), (IMAGES / f"{name}.svg").read_text()
    renderer = FigureCanvasAgg(drawing.figure).get_renderer()
    scale = 96 / drawing.figure.dpi
    texts = [(text.get_text(), text.get_window_extent(renderer)) for text in drawing.axes.texts]
    panel = Bbox([[12 / scale, 6 / scale], [(760 - 12) / scale, (drawing.height - 6) / scale]])
    assert [text for text, box in texts if not _inside(box, panel)] == []
    pairs = [(a, b) for i, a in enumerate(texts) for b in texts[i + 1 :]]
    assert [(a, b) for (a, one), (b, other) in pairs if _overlap(one, other)] == []

    path = tmp_path / f"{name}.svg"
    drawing.save(path)
    found = ink(path.read_text())
    assert len(found[0]) >= 10 and len(found[1]) >= 10
    assert found == ink(kept), "out of date: run python docs/images/draw.py"

    rules, _, shapes = kept.partition("prefers-color-scheme: dark")[2].partition("</style>")
    used = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", shapes))
    assert used and all(f'[style*="{colour}"]' in rules for colour in used)


def _inside(box: Bbox, panel: Bbox) -> bool:
    return panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1


def _overlap(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    # A pixel of the line box above or below the letters may touch.
    return shared is not None and shared.width > 0 and shared.height > 1.5


def owners_of_what_comes_by(context: RankContext) -> list[int]:
    """Ranks of the tensors that this rank has at each step of the ring."""
    cp = context.topology(cp=4).cp
    present = torch.tensor([cp.rank])
    owners = []
    for step in range(cp.size):
        owners.append(int(present))
        if step < cp.size - 1:
            present, exchange = cp.rotate_async(present)
            exchange.wait()
    return owners


def test_drawn_ring_and_buckets_equal_training(load: Load) -> None:
    keys_at = load("drawings.context").keys_at
    assert run_ranks(4, owners_of_what_comes_by) == [[keys_at(rank, step) for step in range(4)] for rank in range(4)]
    assert load("drawings.data").bucket_layers() == [[5, 4], [3, 2], [1, 0]]
