"""samples.svg: the samples of one epoch as training cuts them, from a stream and by best fit, and what a token sees."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from drawings.canvas import FAINT, GREY, LIGHT, MIDDLE, MUTED, Drawing
from megalite.data.dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset, write_documents
from megalite.data.packed_dataset import PackedDataset

LENGTHS = (7, 4, 9, 3, 6, 2, 4)
SEQ_LENGTH = 8
PAD = 99
FILLS = (*LIGHT, *MIDDLE)

CELL, LEFT, PITCH = 26.0, 104.0, 36.0
MASK_LEFT, MASK_CELL = 548.0, 20.0


@contextmanager
def documents() -> Iterator[IndexedDataset]:
    """A token file in which every id tells its document: token i of document d is 10·d + i."""
    with tempfile.TemporaryDirectory() as folder:
        ids = [10 * document + i for document, length in enumerate(LENGTHS) for i in range(length)]
        write_documents(Path(folder) / "corpus", [(np.array(ids), LENGTHS)], np.uint16)
        yield IndexedDataset(Path(folder) / "corpus")


def draw() -> Drawing:
    """Left: the file and the samples. Right: the mask of one sample of each sort."""
    drawing = Drawing(
        500,
        "Seven documents, the samples that are cut from them as one shuffled stream, and the samples of whole documents "
        "that best fit packs, with the attention mask of one of each.",
    )
    with documents() as indexed:
        settings = {"documents": range(len(indexed)), "seq_length": SEQ_LENGTH, "seed": 5, "name": "train"}
        stream = GPTDataset(indexed, **settings)  # type: ignore[arg-type]
        packed = PackedDataset(indexed, **settings, pad_token=PAD)  # type: ignore[arg-type]
        _file(drawing)
        y = _samples(drawing, 118, "stream (default)", [stream.sample(k) for k in range(stream.samples_per_epoch)])
        drawing.line((24, y), (736, y), colour=FAINT)
        rows = [packed.sample(k) for k in range(packed.samples_per_epoch)]
        _samples(drawing, y + 26, "--packing best-fit", rows)
        packings = [packed.packing(k) for k in range(len(rows))]
        fullest = max(range(len(rows)), key=lambda k: len(packings[k].starts))
        _mask(drawing, 124, stream.sample(0), (0,), SEQ_LENGTH, "sample 0 sees what is before it")
        starts, used = packings[fullest].starts, packings[fullest].used
        _mask(drawing, y + 36, rows[fullest], starts, used, f"sample {fullest}: its own document")
    return drawing


def _file(drawing: Drawing) -> None:
    drawing.text(24, 26, "Documents of a token file", size=14, align="left", bold=True)
    x = 24.0
    for document, length in enumerate(LENGTHS):
        width = length * 18.0
        drawing.box(x, 44, width - 3, CELL, fill=FILLS[document], radius=3)
        drawing.text(x + width / 2 - 1.5, 44 + CELL / 2, str(length), size=11)
        x += width
    drawing.text(x + 10, 44 + CELL / 2, "tokens", align="left", colour=MUTED)


def _samples(drawing: Drawing, y: float, title: str, samples: list[np.ndarray]) -> float:
    """A row for each sample of an epoch; where the next part starts."""
    drawing.text(24, y, title, size=14, align="left", bold=True)
    drawing.text(LEFT + (SEQ_LENGTH + 1) * CELL + 6, y, "+ 1, a label alone", size=11, colour=MUTED)
    for k, sample in enumerate(samples):
        top = y + 20 + k * PITCH
        drawing.text(LEFT - 12, top + CELL / 2, f"sample {k}", align="right", colour=MUTED)
        for position, token in enumerate(sample.tolist()):
            is_pad = token == PAD
            gap = 8 if position == SEQ_LENGTH else 0
            fill = GREY if is_pad else FILLS[token // 10]
            drawing.box(LEFT + position * CELL + gap, top, CELL - 2, CELL, fill=fill, radius=3)
            if not is_pad:
                label = str(token % 10)
                drawing.text(LEFT + position * CELL + gap + CELL / 2 - 1, top + CELL / 2, label, size=11)
    return y + 20 + len(samples) * PITCH + 8


def _mask(drawing: Drawing, y: float, sample: np.ndarray, starts: tuple[int, ...], used: int, title: str) -> None:
    """Rows: queries, columns: keys that they see."""
    drawing.text(MASK_LEFT + SEQ_LENGTH * MASK_CELL / 2, y - 16, title, size=11, colour=MUTED)
    for query in range(SEQ_LENGTH):
        first = max(start for start in starts if start <= query)
        for key in range(query + 1):
            seen = first <= key and query < used
            fill = FILLS[int(sample[key]) // 10] if seen else "none"
            drawing.box(
                MASK_LEFT + key * MASK_CELL, y + query * MASK_CELL, MASK_CELL - 2, MASK_CELL - 2, fill=fill, edge=FAINT
            )
