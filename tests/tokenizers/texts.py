"""Real text, unusual text, and tokenizer files written by hand."""

import base64
import json
import pydoc_data.topics
from collections.abc import Mapping
from pathlib import Path

from hypothesis import strategies as st

TEXTS = [text for _, text in sorted(pydoc_data.topics.topics.items())]
SOURCE = Path(json.__file__).read_text(encoding="utf-8")
AWKWARD = [
    "",
    " ",
    "  two  spaces  ",
    "\n\n\tif x:\r\n\t\treturn\n",
    "don't we'll I'VE 'tis",
    "naïve café ½ 日本語 🙂👩‍👩‍👧 العربية",
    "e\u0301 \u2028 \ufeff \u00a0x",
    "a\x00b\x7f",
    "</s> <unk> <0x41> <|endoftext|>",
    "1234567890 3.14e-10 0xdeadbeef",
    "=" * 300 + " " * 300 + "\n" * 50,
    "trailing lines \n \n  ",
]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def byte_symbols() -> list[str]:
    """Return GPT-2's printable character for each byte."""
    spare = iter(range(256, 400))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]


def write_gpt2(folder: Path) -> None:
    """Write vocab.json and merges.txt of a BPE with three merges; <|endoftext|> is 259."""
    tokens = [*byte_symbols(), "ab", "abc", "Ġab", "<|endoftext|>"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\na b\nab c\nĠ ab\n", encoding="utf-8")


def write_tiktoken(path: Path, ranks: Mapping[bytes, int]) -> Path:
    """Write a tiktoken file."""
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    path.write_bytes(b"".join(lines))
    return path


def write_megatron_list(path: Path, ranks: Mapping[bytes, int]) -> Path:
    """Write the same as the JSON list that Megatron-LM reads."""
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for token, i in ranks.items()
    ]
    path.write_text(json.dumps(entries))
    return path


def ranks_of(vocab_file: Path) -> dict[bytes, int]:
    """Ranks, from 0, of the tokens of a vocab.json that are made of byte symbols."""
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    plain = [bytes(byte_of[c] for c in token) for token in tokens if token != "<|endoftext|>"]
    return {token: rank for rank, token in enumerate(plain)}
