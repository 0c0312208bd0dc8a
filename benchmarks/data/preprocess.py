"""`megalite preprocess` compared with the tokenizer library's own batch encode of the same text, as whole processes."""

import base64
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common

DOCUMENT_BYTES = 4000  # about the length of a web page; longer documents are split at blank lines
KINDS = ("Hugging Face", "SentencePiece", "tiktoken")
MEGALITE = ("-m", "megalite.cli.main")
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def write_corpus(source: Path, output: Path, *, copies: int, documents: int | None = None) -> tuple[int, int]:
    """Write a jsonl of the texts of `source`, split into documents, of which `documents` or all, repeated `copies` times. Returns
    (documents, bytes of text)."""
    pieces = [piece for text in texts_of(source) for piece in _cut(text)][:documents]
    with output.open("w", encoding="utf-8") as file:
        for _ in range(copies):
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in pieces)
    return copies * len(pieces), copies * sum(len(text.encode()) for text in pieces)


def texts_of(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]


def _cut(text: str) -> Iterator[str]:
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= DOCUMENT_BYTES:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def make_tokenizers(corpus: Path, folder: Path, *, small: bool = False) -> dict[str, Path]:
    """Train a tokenizer of each kind with `megalite train-tokenizer`; the third has the merges of the first."""
    files = {}
    for kind, type_, size in zip(KINDS, ("byte-level-bpe", "sentencepiece-bpe"), (32768, 8192)):
        made = ("--output-prefix", str(folder / type_), "--vocab-size", str(1024 if small else size))
        common.run_python(*MEGALITE, "train-tokenizer", "--type", type_, "--input", str(corpus), *made)
        files[kind] = next(path for path in folder.glob(f"{type_}*") if path.suffix in (".json", ".model"))
    files["tiktoken"] = _as_tiktoken(files["Hugging Face"], folder / "ranks.tiktoken")
    return files


def _as_tiktoken(tokenizer_json: Path, output: Path) -> Path:
    """Write the same byte pairs as a tiktoken file: tokens in the order of ids, in base64."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    model = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    special = {token["content"] for token in model["added_tokens"]}
    vocabulary = sorted((i, token) for token, i in model["model"]["vocab"].items() if token not in special)
    tokens = [bytes(byte_of[letter] for letter in token) for _, token in vocabulary]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    output.write_text("".join(lines))
    return output


def preprocess(corpus: Path, tokenizer: Path, prefix: Path, *, workers: int) -> dict[str, Any]:
    """Seconds of the whole command, from start to end of its process, and its summary."""
    words = ["--input", str(corpus), "--output-prefix", str(prefix), "--tokenizer-model", str(tokenizer)]
    words += ["--append-eod", "--workers", str(workers), "--restart"]
    if tokenizer.suffix == ".tiktoken":
        words += ["--tiktoken-pattern", PATTERN]
    seconds = common.seconds_of(lambda: common.run_python(*MEGALITE, "preprocess", *words))
    made = json.loads(Path(f"{prefix}_text_document.json").read_text())
    return {"seconds": seconds, "tokens": made["tokens"], "documents": made["documents"]}


def bare(kind: str, corpus: Path, tokenizer: Path, *, threads: int) -> dict[str, Any]:
    """Seconds of the library's batch encode with `threads` threads, in a separate process, without its start."""
    words = (kind, str(corpus), str(tokenizer), str(threads))
    library = {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    return dict(json.loads(common.run_python("-m", "benchmarks.data.preprocess", *words, **library)))


def _bare(kind: str, corpus: Path, tokenizer: Path, threads: int) -> dict[str, Any]:
    texts = texts_of(corpus)
    if kind == "Hugging Face":
        import tokenizers

        encoder = tokenizers.Tokenizer.from_file(str(tokenizer))
        start = time.perf_counter()
        ids = [one.ids for one in encoder.encode_batch_fast(texts, add_special_tokens=False)]
    elif kind == "SentencePiece":
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
        start = time.perf_counter()
        ids = processor.encode(texts, num_threads=threads)
    else:
        import tiktoken

        ranks = {
            base64.b64decode(token): int(rank) for token, rank in (line.split() for line in tokenizer.read_bytes().splitlines())
        }
        encoding = tiktoken.Encoding("bare", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        start = time.perf_counter()
        ids = encoding.encode_ordinary_batch(texts, num_threads=threads)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(map(len, ids)), "documents": len(ids)}


if __name__ == "__main__":
    print(json.dumps(_bare(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))))
