"""The pictures of docs/parallelism.md and docs/data.md: the files are what the script draws, it draws what the code does, legibly."""

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.indexed_writer import write_documents
from megalite.data.packed_dataset import PackedDataset
from megalite.pipeline.ir.generators.many_chunks import interleaved
from megalite.topology.layout import ParallelLayout, ShardSpec
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
    """The texts, and the shapes in half pixels with their style.

    Not the outlines of letters, nor ids: those are another version of matplotlib's or of the font's to change.
    """
    shapes = []
    outside = re.sub(r'<g id="text_\d+">.*?\n   </g>', "", svg, flags=re.DOTALL)
    for outline, style in re.findall(r'<path d="(.*?)" style="(.*?)"/>', outside, flags=re.DOTALL):
        shapes.append(([round(float(number) * 8 / 3) for number in re.findall(r"-?[\d.]+", outline)], style))
    return re.findall(r"<!-- (.*?) -->", svg), shapes


def kept(name: str) -> str:
    return (IMAGES / f"{name}.svg").read_text()


def saved(drawing: Any, folder: Path) -> str:
    """The SVG that the script makes of a drawing."""
    path = folder / "drawing.svg"
    drawing.save(path)
    return path.read_text()


def test_there_is_a_file_for_each_drawing(load: Load) -> None:
    assert sorted(load("draw").DRAWINGS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_what_the_script_draws(name: str, load: Load, tmp_path: Path) -> None:
    """And no text overlaps another or leaves the panel."""
    drawing = load("draw").DRAWINGS[name]()
    renderer = FigureCanvasAgg(drawing.figure).get_renderer()
    scale = 96 / drawing.figure.dpi
    texts = [(text.get_text(), text.get_window_extent(renderer)) for text in drawing.axes.texts]
    panel = Bbox([[12 / scale, 6 / scale], [(760 - 12) / scale, (drawing.height - 6) / scale]])
    assert [text for text, box in texts if not _inside(box, panel)] == []
    pairs = [(a, b) for i, a in enumerate(texts) for b in texts[i + 1 :]]
    assert [(a, b) for (a, one), (b, other) in pairs if _overlap(one, other)] == []
    svg = saved(drawing, tmp_path)
    assert "<dc:date>" not in svg
    found = ink(svg)
    assert min(map(len, found)) >= 10
    assert found == ink(kept(name)), "out of date: run python docs/images/draw.py"


@pytest.mark.parametrize("name", NAMES)
def test_every_colour_has_another_on_a_dark_page(name: str) -> None:
    _, _, dark = kept(name).partition("prefers-color-scheme: dark")
    rules, _, drawing = dark.partition("</style>")
    used = set(re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", drawing))
    assert used and all(f'[style*="{colour}"]' in rules for colour in used)


def test_the_script_writes_what_is_named(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("draw")
    monkeypatch.setattr("sys.argv", ["draw.py", "tensor", "ulysses", "--output", str(tmp_path)])
    script.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tensor.svg", "ulysses.svg"]
    monkeypatch.setattr("sys.argv", ["draw.py", "tensors"])
    with pytest.raises(SystemExit):
        script.main()
    assert "there is no drawing tensors; there are ranks, tensor" in capsys.readouterr().err


def _inside(box: Bbox, panel: Bbox) -> bool:
    return panel.x0 <= box.x0 and box.x1 <= panel.x1 and panel.y0 <= box.y0 and box.y1 <= panel.y1


def _overlap(one: Bbox, other: Bbox) -> bool:
    shared = Bbox.intersection(one, other)
    # A pixel of the line box above or below the letters may touch.
    return shared is not None and shared.width > 0 and shared.height > 1.5


def _cut_along_the_last(name: str, shape: tuple[int, ...], *, dim: int, index: int, parts: int) -> ShardSpec:
    return ShardSpec.split(name, shape, dim=len(shape) - 1, index=index, parts=parts)


class _OtherSpec:
    split = staticmethod(_cut_along_the_last)


class _OtherSeed(PackedDataset):
    def __init__(self, indexed: IndexedDataset, **settings: Any) -> None:
        super().__init__(indexed, **{**settings, "seed": 1})


CHANGES: list[tuple[str, str, Any]] = [
    ("overview", "LAYOUT", ParallelLayout(tp=2, dp=2, pp=2, order="tp-cp-ep-pp-dp")),
    ("ranks", "LAYOUT", ParallelLayout(tp=2, cp=2, dp=2, pp=2, order="tp-cp-ep-pp-dp")),
    ("tensor", "ShardSpec", _OtherSpec),
    ("sequence", "ShardSpec", _OtherSpec),
    ("context", "tiles", lambda q, k: []),
    ("ulysses", "sequence_spans", lambda s, cp_rank, cp_size: ((2 * cp_rank, 2 * cp_rank + 2),)),
    ("experts", "GRIDS", ParallelLayout(tp=2, cp=2, dp=2, ep=2, etp=2)),
    ("pipeline", "interleaved", lambda pp, vpp, microbatches: interleaved(pp, vpp, microbatches, 8)),
    ("data", "bucket_layers", lambda: [[5, 4, 3], [2, 1, 0]]),
    ("token_file", "write_documents", lambda prefix, blocks, dtype: write_documents(prefix, blocks, np.int32)),
    ("samples", "PackedDataset", _OtherSeed),
    ("imports", "imported", lambda package: frozenset({"config"}) - {package}),
    ("strategies", "wire_factor", lambda operation, size: 1.0),
]
"""Per drawing, something that the package says, and what it could say instead."""


@pytest.mark.parametrize("name, attribute, other", CHANGES, ids=[name for name, _, _ in CHANGES])
def test_a_drawing_follows_the_code(
    name: str, attribute: str, other: Any, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load(f"drawings.{name}"), attribute, other)
    assert ink(saved(load("draw").DRAWINGS[name](), tmp_path)) != ink(kept(name))


def test_every_drawing_follows_the_code() -> None:
    assert sorted(name for name, _, _ in CHANGES) == NAMES


def test_unbalanced_spans_are_not_called_equal(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    context = load("drawings.context")
    monkeypatch.setattr(context, "sequence_spans", lambda s, cp_rank, cp_size: ((4 * cp_rank, 4 * cp_rank + 4),))
    with pytest.raises(AssertionError, match="zigzag balances"):
        context.draw()


def owners_of_what_comes_by(context: RankContext) -> list[int]:
    """The rank whose tensor this one has at each step of the ring."""
    cp = context.topology(cp=4).cp
    present = torch.tensor([cp.rank])
    owners = []
    for step in range(cp.size):
        owners.append(int(present))
        if step < cp.size - 1:
            present, exchange = cp.rotate_async(present)
            exchange.wait()
    return owners


def test_the_ring_turns_as_drawn(load: Load) -> None:
    keys_at = load("drawings.context").keys_at
    assert run_ranks(4, owners_of_what_comes_by) == [[keys_at(rank, step) for step in range(4)] for rank in range(4)]


def test_buckets_are_those_of_training(load: Load) -> None:
    assert load("drawings.data").bucket_layers() == [[5, 4], [3, 2], [1, 0]]
