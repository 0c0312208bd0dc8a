"""Speed of making token files from text and samples from token files, compared with the limits of this machine.

    python -m benchmarks.data.run [--rounds 3] [--copies 6] [--folder DIR] [--json FILE]

Preprocessing is compared with the tokenizer library's own batch encode of the same text, indices and samples with a
plain copy of the tokens, opening and verification with a plain read; each pair in the same round."""

import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common
from benchmarks.data.preprocess import KINDS, bare, make_tokenizers, preprocess, write_corpus
from benchmarks.data.read import index_row, open_row, samples_row, write_tokens

WORKERS = (1, 2)
LIBRARIES = ("numpy", "tokenizers", "sentencepiece", "tiktoken")


def preprocessing(
    folder: Path, *, rounds: int, copies: int, workers_of: Sequence[int], documents: int | None = None
) -> list[dict[str, Any]]:
    """A row per tokenizer and number of workers."""
    source, corpus = folder / "source.jsonl", folder / "corpus.jsonl"
    common.run_python("examples/quickstart/build_corpus.py", "--output", str(source))
    count, size = write_corpus(source, corpus, copies=copies, documents=documents)
    tokenizers = make_tokenizers(source if documents is None else corpus, folder, small=documents is not None)
    print(f"preprocess: {count} documents, {size / 1e6:.0f} MB of text; the whole command, start-up included")
    rows = []
    for kind in KINDS:
        for workers in workers_of:
            pairs = []
            for _ in range(rounds):
                ours = preprocess(corpus, tokenizers[kind], folder / "out", workers=workers)
                theirs = bare(kind, corpus, tokenizers[kind], threads=workers)
                # megalite adds an end token to every document.
                assert ours["tokens"] == theirs["tokens"] + theirs["documents"], (kind, ours, theirs)
                pairs.append((ours["seconds"], theirs["seconds"]))
            own, other = (list(seconds) for seconds in zip(*pairs, strict=True))
            rate, others = size / statistics.median(own) / 1e6, size / statistics.median(other) / 1e6
            row = {"tokenizer": kind, "workers": workers, "MB/s": rate, "bare MB/s": others, "of bare": common.ratio(other, own)}
            row |= {"tokens/s": ours["tokens"] / statistics.median(own), "seconds": pairs}
            rows.append(row)
            print(
                f"  {kind:<14} {workers} workers: {row['MB/s']:6.2f} MB/s, {row['tokens/s']:,.0f} tokens/s; "
                f"bare library {row['bare MB/s']:.2f} MB/s: {row['of bare']:.2f} of it",
                flush=True,
            )
    return rows


def reading(folder: Path, *, tokens: int, documents: int, samples: int, rounds: int) -> dict[str, Any]:
    """Rows of index, samples, opening and verification, for one token file."""
    prefix = folder / "tokens"
    write_tokens(prefix, tokens=tokens, documents=documents)
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "index, megalite's order": lambda: index_row(prefix, "megalite"),
        "index, Megatron's order": lambda: index_row(prefix, "megatron"),
        "samples": lambda: samples_row(prefix, samples),
        "open and verify": lambda: open_row(prefix),
    }
    result: dict[str, Any] = {}
    print(f"{tokens:.3g} tokens in {documents:.3g} documents:")
    for name, measure in measures.items():
        rows = [measure() for _ in range(rounds)]
        result[name] = {key: [row[key] for row in rows] for key in rows[0]}
        shown = ", ".join(f"{key} {statistics.median(values):,.4g}" for key, values in result[name].items())
        print(f"  {name}: {shown}", flush=True)
    return result


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=6, help="of the corpus of 11 MB that is tokenized")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of the index and the file read")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--tiny", action="store_true", help="a few documents, one round: does it run?")
    arguments = parser.parse_args(words)
    rounds, sizes = arguments.rounds, {"tokens": arguments.tokens, "documents": arguments.documents}
    copies, text, workers, samples = arguments.copies, None, WORKERS, 20_000
    if arguments.tiny:
        rounds, copies, text, workers, samples = 1, 1, 200, WORKERS[-1:], 50
        sizes = {"tokens": 200_000, "documents": 500}
    versions = {name: common.version(name) for name in LIBRARIES}
    with tempfile.TemporaryDirectory(prefix="data-", dir=arguments.folder) as folder:
        rows = preprocessing(Path(folder), rounds=rounds, copies=copies, workers_of=workers, documents=text)
        found = reading(Path(folder), **sizes, samples=samples, rounds=rounds)
    common.write_json(arguments.json, "data.run", words, {"versions": versions, "preprocess": rows, **found})


if __name__ == "__main__":
    main()
