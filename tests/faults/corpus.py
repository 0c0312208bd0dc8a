"""The text that the runs train on: made by the commands that a user would give."""

import contextlib
import runpy
import sys
from pathlib import Path

from megalite.cli import preprocess

BUILDER = Path(__file__).parents[2] / "examples" / "quickstart" / "build_corpus.py"


def build(folder: Path) -> list[str]:
    """A fifth of a megabyte of documentation, its tokenizer and its token files; the flags that train on them.

    What the commands print goes to `corpus.log`.
    """
    text, tokenizer, prefix = folder / "corpus.jsonl", folder / "tokenizer.model", folder / "corpus"
    learn = ["--input", str(text), "--output-prefix", str(tokenizer.with_suffix("")), "--vocab-size", "384"]
    words = ["--input", str(text), "--output-prefix", str(prefix), "--tokenizer-model", str(tokenizer)]
    log = folder / "corpus.log"
    with log.open("w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        statuses = [
            _run_script(BUILDER, ["--output", str(text), "--max-megabytes", "0.2"]),
            preprocess.train_tokenizer(learn),
            preprocess.main([*words, "--append-eod"]),
        ]
    assert statuses == [0, 0, 0], f"{statuses}: {log.read_text()}"
    data = f"{prefix}_text_document"
    return ["--data-path", data, "--split", "100,0,0", "--tokenizer-model", str(tokenizer)]


def _run_script(path: Path, arguments: list[str]) -> int | str | None:
    ours, sys.argv = sys.argv, [str(path), *arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return end.code
    finally:
        sys.argv = ours
    return None
