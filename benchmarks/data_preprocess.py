"""`megalite preprocess` beside the tokenizer library's own batch encode on the same text, as whole processes."""

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCUMENT_BYTES = 4000
"""About as long as a web page's text: longer documents are cut at blank lines."""
KINDS = ("Hugging Face", "SentencePiece", "tiktoken")
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def write_corpus(source: Path, output: Path, *, copies: int) -> tuple[int, int]:
    """jsonl of the texts of `source`, cut into documents, `copies` times over; (documents, bytes of text)."""
    documents = [
        piece
        for line in source.read_text(encoding="utf-8").splitlines()
        for piece in _cut(json.loads(line)["text"])
    ]
    with output.open("w", encoding="utf-8") as file:
        for _ in range(copies):
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
    return copies * len(documents), copies * sum(len(text.encode()) for text in documents)


def _cut(text: str) -> Iterator[str]:
    piece = ""
    for paragraph in text.split("\n\n"):
        piece += paragraph + "\n\n"
        if len(piece) >= DOCUMENT_BYTES:
            yield piece
            piece = ""
    if piece.strip():
        yield piece


def make_tokenizers(corpus: Path, folder: Path) -> dict[str, Path]:
    """A tokenizer of each kind, trained on the corpus by `megalite train-tokenizer`; the third has the first's merges."""
    prefixes = {"Hugging Face": ("byte-level-bpe", 32768), "SentencePiece": ("sentencepiece-bpe", 8192)}
    files = {}
    for kind, (type_, vocabulary) in prefixes.items():
        prefix = folder / type_
        command = [sys.executable, "-m", "megalite.cli.main", "train-tokenizer", "--type", type_]
        command += ["--input", str(corpus), "--output-prefix", str(prefix), "--vocab-size", str(vocabulary)]
        subprocess.run(command, check=True, capture_output=True)
        files[kind] = next(path for path in folder.glob(f"{type_}*") if path.suffix in (".json", ".model"))
    files["tiktoken"] = _as_tiktoken(files["Hugging Face"], folder / "ranks.tiktoken")
    return files


def _as_tiktoken(tokenizer_json: Path, output: Path) -> Path:
    """The same byte pairs as a tiktoken file: tokens in the order of their ids, in base64."""
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


def preprocess_seconds(corpus: Path, tokenizer: Path, prefix: Path, *, workers: int) -> dict[str, float]:
    """The whole command, from its start to the end of its process, and what it did."""
    command = [sys.executable, "-m", "megalite.cli.main", "preprocess", "--input", str(corpus)]
    command += ["--output-prefix", str(prefix), "--tokenizer-model", str(tokenizer), "--append-eod"]
    command += ["--workers", str(workers), "--restart"]
    if tokenizer.suffix == ".tiktoken":
        command += ["--tiktoken-pattern", PATTERN]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - start
    side = json.loads(Path(f"{prefix}_text_document.json").read_text())
    return {"seconds": seconds, "tokens": side["tokens"], "documents": side["documents"]}


def bare_seconds(kind: str, corpus: Path, tokenizer: Path, *, threads: int) -> dict[str, float]:
    """The library's batch encode with `threads` threads of its own, in a process of its own; nothing else is timed."""
    command = [sys.executable, __file__, kind, str(corpus), str(tokenizer), str(threads)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
    done = subprocess.run(command, check=True, capture_output=True, env=environment, text=True)
    return dict(json.loads(done.stdout))


def _bare(kind: str, corpus: Path, tokenizer: Path, threads: int) -> dict[str, Any]:
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
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
            base64.b64decode(token): int(rank)
            for token, rank in (line.split() for line in tokenizer.read_bytes().splitlines())
        }
        encoding = tiktoken.Encoding("bare", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
        start = time.perf_counter()
        ids = encoding.encode_ordinary_batch(texts, num_threads=threads)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "tokens": sum(map(len, ids)), "documents": len(ids)}


if __name__ == "__main__":
    print(json.dumps(_bare(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))))
