#!/usr/bin/env python3
"""How fast text becomes token files and token files become samples, beside what bounds each on this machine.

    python benchmarks/data.py [--rounds 3] [--copies 6] [--folder DIR] [--json FILE]

Preprocessing stands beside the tokenizer library's own batch encode of the same text, indices and samples beside a
plain copy of the tokens, opening and verifying beside a plain read; each pair in the same round.
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from data_preprocess import KINDS, bare_seconds, make_tokenizers, preprocess_seconds, write_corpus
from data_read import index_row, open_row, samples_row, write_tokens

WORKERS = (1, 2)
LIBRARIES = ("numpy", "tokenizers", "sentencepiece", "tiktoken")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=6, help="of the corpus of 11 MB that is tokenized")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of the index and the file read")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="data-", dir=arguments.folder))
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {name: metadata.version(name) for name in LIBRARIES}
        | {"python": platform.python_version()},
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    try:
        result["preprocess"] = preprocessing(folder, rounds=arguments.rounds, copies=arguments.copies)
        result |= reading(folder, arguments)
    finally:
        shutil.rmtree(folder)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def preprocessing(folder: Path, *, rounds: int, copies: int) -> list[dict[str, Any]]:
    """A row for each tokenizer and number of workers."""
    source, corpus = folder / "source.jsonl", folder / "corpus.jsonl"
    builder = Path(__file__).parents[1] / "examples" / "quickstart" / "build_corpus.py"
    subprocess.run([sys.executable, str(builder), "--output", str(source)], check=True, capture_output=True)
    documents, size = write_corpus(source, corpus, copies=copies)
    tokenizers = make_tokenizers(source, folder)
    print(
        f"preprocess: {documents} documents, {size / 1e6:.0f} MB of text; the whole command, start-up included"
    )
    rows = []
    for kind in KINDS:
        for workers in WORKERS:
            pairs = []
            for _ in range(rounds):
                ours = preprocess_seconds(corpus, tokenizers[kind], folder / "out", workers=workers)
                bare = bare_seconds(kind, corpus, tokenizers[kind], threads=workers)
                # Ours ends every document with a token of its own.
                assert ours["tokens"] == bare["tokens"] + bare["documents"], (kind, ours, bare)
                pairs.append((ours, bare))
            row = {
                "tokenizer": kind,
                "workers": workers,
                "MB/s": statistics.median(size / ours["seconds"] / 1e6 for ours, _ in pairs),
                "tokens/s": statistics.median(ours["tokens"] / ours["seconds"] for ours, _ in pairs),
                "bare MB/s": statistics.median(size / bare["seconds"] / 1e6 for _, bare in pairs),
                "of bare": statistics.median(bare["seconds"] / ours["seconds"] for ours, bare in pairs),
                "seconds": [(ours["seconds"], bare["seconds"]) for ours, bare in pairs],
            }
            rows.append(row)
            print(
                f"  {kind:<14} {workers} workers: {row['MB/s']:6.2f} MB/s, {row['tokens/s']:,.0f} tokens/s; bare library "
                f"{row['bare MB/s']:.2f} MB/s: {row['of bare']:.2f} of it",
                flush=True,
            )
    return rows


def reading(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Index, samples, opening and verifying, all of the same token file."""
    prefix = folder / "tokens"
    write_tokens(prefix, tokens=arguments.tokens, documents=arguments.documents)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "index, megalite's order": lambda: index_row(prefix, "megalite"),
        "index, Megatron's order": lambda: index_row(prefix, "megatron"),
        "samples": lambda: samples_row(prefix),
        "open and verify": lambda: open_row(prefix),
    }
    result: dict[str, Any] = {}
    print(f"{arguments.tokens:.3g} tokens in {arguments.documents:.3g} documents:")
    for name, measure in measures.items():
        rows = [measure() for _ in range(arguments.rounds)]
        result[name] = {key: [row[key] for row in rows] for key in rows[0]}
        shown = ", ".join(f"{key} {statistics.median(values):,.4g}" for key, values in result[name].items())
        print(f"  {name}: {shown}", flush=True)
    return result


if __name__ == "__main__":
    main()
