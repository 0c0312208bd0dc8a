"""Write inputs, and read them completely through pieces."""

import gzip
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import zstandard

from megalite.preprocess.documents import PieceTexts, read_piece
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.pieces import Limits, Piece, Place, cut

Found = tuple[list[str], list[tuple[str, int, str]]]  # texts, and (file name, line from 1, fault) of bad lines


def write(path: Path, content: bytes) -> Path:
    """Write a file, compressed according to its name."""
    if path.suffix == ".gz":
        content = gzip.compress(content, 1)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor().compress(content)
    path.write_bytes(content)
    return path


def pieces_of(*paths: Path | str, limits: Limits | None = None, after: Place | None = None) -> list[Piece]:
    inputs = find_inputs([str(path) for path in paths])
    return list(cut(inputs, keys=["text"], limits=limits or Limits(), after=after))


def read(pieces: Iterable[Piece], limits: Limits | None = None, start: Place | None = None) -> Found:
    """Return the contents of the pieces."""
    texts: list[str] = []
    bad: list[tuple[str, int, str]] = []
    place = start
    for piece in pieces:
        found = read_piece(piece, ["text"], limits or Limits())
        before = place.lines if place and place.source == piece.source else 0
        texts += found.texts[0]
        bad += [(Path(piece.path).name, before + fault.line + 1, fault.kind) for fault in found.bad]
        place = piece.after(found.lines, place)
    return texts, bad


def read_all(*paths: Path | str, limits: Limits | None = None, after: Place | None = None) -> Found:
    return read(pieces_of(*paths, limits=limits, after=after), limits, after)


def places(pieces: Sequence[Piece], limits: Limits) -> list[Place]:
    """End of each piece."""
    found: list[Place] = []
    for piece in pieces:
        lines = read_piece(piece, ["text"], limits).lines
        found.append(piece.after(lines, found[-1] if found else None))
    return found


def only(path: Path, keys: Sequence[str] = ("text",), limits: Limits | None = None) -> PieceTexts:
    """The single piece of a small file."""
    limits = limits or Limits()
    (piece,) = cut(find_inputs([str(path)]), keys=keys, limits=limits)
    return read_piece(piece, keys, limits)


def words(generator: random.Random, most: int) -> str:
    """A text of no, one or several words, some in other alphabets."""
    choice = ["a", "word", "naïve", "日本語", "🙂", "\u2028", "x" * 40]
    return " ".join(generator.choice(choice) for _ in range(generator.randrange(1, most)))
