"""Write a corpus of real text from what every Python installation carries: no download, the same text every time.

The language's documentation topics and then, as far as the size allows, the standard library's own source files in
alphabetical order. They are written in a fixed shuffled order, so that the last documents, which a split leaves for
validation, are of the same sort as the others.
"""

import argparse
import hashlib
import json
import pydoc_data.topics
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "idle_test",
    "idlelib",
    "lib2to3",
    "pydoc_data",  # its text is the topics themselves
    "site-packages",
    "test",
    "tests",
}


def main() -> int:
    """Write the corpus and say what is in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="the .jsonl file to write")
    parser.add_argument("--max-megabytes", type=float, default=12.0, metavar="MB", help="stop here; default 12")
    arguments = parser.parse_args()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    left = arguments.max_megabytes * 1e6
    counts = {"topics": 0, "library files": 0}
    partial = arguments.output.with_name(arguments.output.name + ".tmp")
    chosen = []
    for kind, source, text in documents():
        size = len(text.encode("utf-8"))
        if size > left:
            break
        left -= size
        counts[kind] += 1
        chosen.append((source, text))
    with partial.open("w", encoding="utf-8") as file:
        for source, text in sorted(chosen, key=lambda pair: hashlib.sha256(pair[0].encode()).digest()):
            file.write(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
    partial.replace(arguments.output)
    megabytes = arguments.max_megabytes - left / 1e6
    print(f"{arguments.output}: " + ", ".join(f"{n} {kind}" for kind, n in counts.items()) + f", {megabytes:.1f} MB")
    return 0


def documents() -> Iterator[tuple[str, str, str]]:
    """(kind, source, text) of every document, in a fixed order."""
    for topic, text in sorted(pydoc_data.topics.topics.items()):
        yield "topics", f"topic {topic}", text
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.intersection(relative.parts[:-1]):
            continue
        try:
            with tokenize.open(path) as file:  # reads the encoding from the file's first lines
                text = file.read()
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue
        if text.strip():
            yield "library files", relative.as_posix(), text


if __name__ == "__main__":
    sys.exit(main())
