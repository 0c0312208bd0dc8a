"""Read the tables in `tables/`: lines ASKED => EXPECTED, which may break before the =>, and comments."""

import re
from collections.abc import Iterable
from pathlib import Path

_SHORT = {
    "ELASTIC": "--elastic --global-batch-size 8 --run-dir r --save-interval 5 --load r/checkpoints --fresh-if-missing "
    "--train-iters 100",
    "TOP1": "--moe-router-topk 1 --moe-router-pre-softmax",
}
"""Abbreviations in the tables."""


def lines(table: str | Path) -> list[str]:
    """Return the lines of a table here, or of a file."""
    path = table if isinstance(table, Path) else Path(__file__).with_name("tables") / f"{table}.txt"
    text = path.read_text(encoding="utf-8")
    for word, meaning in _SHORT.items():
        text = text.replace(word, meaning)
    return [line for line in text.replace("\n    =>", " =>").splitlines() if line and not line.startswith("#")]


def parts_of(rows: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Split lines ASKED => PART … PART into (asked, parts of the message in order)."""
    return [(asked, message.split(" … ")) for asked, _, message in (row.partition(" => ") for row in rows)]


def says(message: str, parts: list[str]) -> bool:
    """Return whether the message contains the parts in order."""
    found = re.search(".*".join(re.escape(part.replace("\\n", "\n")) for part in parts), message, re.DOTALL)
    return found is not None


def refused() -> list[tuple[int, str, list[str]]]:
    """Return (world size, command line, parts of the message) that `validate` refuses."""
    asked = [(*words.partition(" "), parts) for words, parts in parts_of(lines("illegal"))]
    return [(int(world_size), flags, parts) for world_size, _, flags, parts in asked]
