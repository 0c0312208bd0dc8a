from pathlib import Path

import pytest

from megalite.config.data import DataConfig
from megalite.data.tokenizers.base import Tokenizer
from megalite.data.tokenizers.build import build_tokenizer

MEGABYTE = 1_000_000
PLANES = "".join(chr(c) for c in range(0, 0x110000, 7) if not 0xD800 <= c < 0xE000).replace("\u2581", "")
TEXTS = {
    "empty": "",
    "no spaces": "ab" * (MEGABYTE // 2),
    "one capital": "A" * MEGABYTE,
    "spaces": " " * MEGABYTE + "x",
    "line ends": "\n" * MEGABYTE,
    "mixed space": "\t \n\u00a0" * (MEGABYTE // 5) + "x",
    "emoji": "🙂" * (MEGABYTE // 4),
    "NULs": "\0" * MEGABYTE,
    "marks": "e" + "\u0301" * (MEGABYTE // 4),
    "all planes": PLANES,
}
KINDS: dict[str, dict[str, str]] = {
    "sentencepiece": {"tokenizer_model": "sp.model"},
    "hugging face": {"tokenizer_model": "tokenizer.json"},
    "gpt2": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "tiktoken gpt2": {"tokenizer_model": "ranks.tiktoken", "tiktoken_pattern": "gpt2"},
    "tiktoken llama3": {"tokenizer_model": "ranks.tiktoken", "tiktoken_pattern": "llama3"},
    "bytes": {"tokenizer_type": "ByteLevelTokenizer"},
}


def opened(folder: Path, settings: dict[str, str]) -> Tokenizer:
    paths = {
        key: value if key.startswith("ti") or key.endswith("type") else str(folder / value)
        for key, value in settings.items()
    }
    tokenizer = build_tokenizer(DataConfig(**paths), None)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_text_is_done_with(small_files: Path, kind: str) -> None:
    """No text takes more than time in proportion to its length, and every one comes back."""
    pytest.importorskip("tiktoken")
    tokenizer = opened(small_files, KINDS[kind])
    for name, text in TEXTS.items():
        ids = tokenizer.encode_batch([text])[0]
        assert tokenizer.decode(ids) == text, name
