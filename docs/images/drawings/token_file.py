"""token_file.svg: every byte of a small .idx and .bin, as our writer writes them."""

import tempfile
from pathlib import Path

import numpy as np

from drawings.canvas import DARK, FAINT, GREY, LIGHT, MUTED, Drawing
from megalite.data.indexed_dataset import HEADER, MAGIC, write_documents

DOCUMENTS = ([464, 3797, 3332, 50256], [5756, 50256], [2061, 318, 1521, 50256])
"""Ids of three short texts, the last of each the end of document."""

CELL, ROW, LEFT = 24.0, 30.0, 252.0
BYTES_A_ROW = 20

Field = tuple[str, str, int, list[str]]
"""Name, type, bytes of an item, fill of each item."""


def written() -> tuple[bytes, bytes]:
    """The two files of DOCUMENTS."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = [(np.array(document), [len(document)]) for document in DOCUMENTS]
        write_documents(Path(folder) / "corpus", blocks, np.uint16)
        return tuple((Path(folder) / f"corpus{suffix}").read_bytes() for suffix in (".idx", ".bin"))  # type: ignore[return-value]


def fields() -> list[Field]:
    """What stands in .idx, in its order."""
    count = len(DOCUMENTS)
    hues = list(LIGHT[:count])
    return [
        ("magic", f"{len(MAGIC)} bytes", len(MAGIC), [GREY]),
        ("version, always 1", "u64", 8, [GREY]),
        ("token type, 8 is u16", "u8", 1, [GREY]),
        ("sequences S", "u64", 8, [GREY]),
        ("document indices D", "u64", 8, [GREY]),
        ("tokens of each sequence", "i32 [S]", 4, hues),
        ("where each starts in .bin, bytes", "i64 [S]", 8, hues),
        ("first sequence of each document", "i64 [D]", 8, [*hues, GREY]),
    ]


def draw() -> Drawing:
    """A row of cells for each field of .idx, and below all of .bin."""
    idx, bin_ = written()
    drawing = Drawing(
        520,
        "The bytes of an index file and a token file with three documents: header, lengths, byte offsets and document "
        "indices in the one, and nothing but tokens in the other.",
    )
    drawing.text(24, 26, ".idx, byte by byte (hexadecimal, little endian)", size=14, align="left", bold=True)
    y, offset = 46.0, 0
    for name, kind, size, fills in fields():
        y, offset = _field(drawing, y, offset, idx, (name, kind, size, fills))
    assert offset == len(idx) and idx[:9] == MAGIC and HEADER.size == 34, (offset, len(idx))
    drawing.line((24, y + 10), (736, y + 10), colour=FAINT)
    drawing.text(24, y + 32, ".bin: the tokens, nothing else", size=14, align="left", bold=True)
    _tokens(drawing, y + 50, bin_)
    return drawing


def _field(drawing: Drawing, y: float, offset: int, data: bytes, field: Field) -> tuple[float, int]:
    """One field's rows of bytes; where the next one starts on the page and in the file."""
    name, kind, size, fills = field
    drawing.text(24, y + CELL / 2, str(offset), size=11, align="left", colour=MUTED)
    drawing.text(50, y + CELL / 2 - 5.5, name, size=11, align="left")
    drawing.text(50, y + CELL / 2 + 8.5, kind, size=11, align="left", colour=MUTED)
    a_row = max(1, BYTES_A_ROW // size)
    for index, fill in enumerate(fills):
        row, column = divmod(index, a_row)
        for byte in range(size):
            x = LEFT + (column * size + byte) * CELL
            at = offset + index * size + byte
            drawing.box(x, y + row * ROW, CELL - 1, CELL, fill=fill, radius=2)
            drawing.text(x + CELL / 2, y + row * ROW + CELL / 2, f"{data[at]:02x}", size=11)
    rows = -(-len(fills) // a_row)
    return y + rows * ROW + 6, offset + size * len(fills)


def _tokens(drawing: Drawing, y: float, data: bytes) -> None:
    tokens = np.frombuffer(data, dtype="<u2")
    x, width, at = 24.0, 48.0, 0
    for index, document in enumerate(DOCUMENTS):
        drawing.text(x, y + 8, f"document {index}, byte {2 * at}", size=11, align="left", colour=DARK[index])
        for token in tokens[at : at + len(document)]:
            drawing.box(x, y + 20, width - 2, 40, fill=LIGHT[index], radius=3)
            drawing.text(x + width / 2 - 1, y + 32, str(token), size=11)
            low, high = int(token) & 255, int(token) >> 8
            drawing.text(x + width / 2 - 1, y + 48, f"{low:02x} {high:02x}", size=11, colour=MUTED)
            x += width
        x += 22 if len(document) > 2 else 52
        at += len(document)
