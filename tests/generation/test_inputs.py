"""Prompts, and texts for perplexity, from files."""

import os
import sys
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.generation.continuation import read_prompts
from megalite.generation.likelihood import stream_of_files, stream_of_texts
from megalite.preprocess.pieces import Limits
from megalite.tokenizers.base import ByteLevelTokenizer
from tests.data.token_files import write_by_layout

BYTES = ByteLevelTokenizer()


def test_prompts_from_lines_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, objects = tmp_path / "a.txt", tmp_path / "b.jsonl"
    lines.write_bytes(b"\xef\xbb\xbffirst \r\n\n  second\nthird")
    assert read_prompts(str(lines), None) == ["first ", "  second", "third"]
    objects.write_text('{"prompt": "a\\nb", "q": "c"}\n\n{"q": "d", "prompt": "e"}\n')
    assert read_prompts(str(objects), None) == ["a\nb", "e"]
    assert read_prompts(str(objects), "q") == ["c", "d"]
    (tmp_path / "piped").write_bytes(b"one\ntwo\n")
    with (tmp_path / "piped").open() as piped:
        monkeypatch.setattr(sys, "stdin", piped)
        assert read_prompts("-", None) == ["one", "two"]
        monkeypatch.setattr(os, "isatty", lambda number: True)
        with pytest.raises(ConfigError, match="standard input is a terminal"):
            read_prompts("-", None)


@pytest.mark.parametrize(
    ("name", "content", "key", "message"),
    [
        ("a.txt", b"a", "text", r"--prompt-key text has no effect on .*a\.txt"),
        ("a.txt", b"\n \n", None, r"a\.txt has no prompts"),
        ("a.txt", b"good\n\xff\n", None, r"a\.txt:2: invalid UTF-8"),
        ("a.jsonl", b'{"prompt": "a"}\n{"promt": "b"}\n', None, r"a\.jsonl:2: no key 'prompt' .*did you mean 'promt'"),
        ("a.jsonl", b"{", None, r"a\.jsonl:1: invalid JSON"),
        ("missing.txt", None, None, r"missing\.txt cannot be read: No such file"),
    ],
)
def test_bad_prompts_are_errors(
    tmp_path: Path, name: str, content: bytes | None, key: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_prompts(str(tmp_path / name), key)


def test_stream_of_texts(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "né"}\n{"text": "b"}\n')
    (tmp_path / "b.txt").write_text("cd\nef\n")
    paths = [str(tmp_path / name) for name in ("a.jsonl", "b.txt")]
    stream = stream_of_texts(paths, key="text", limits=Limits(), tokenizer=BYTES)
    expected = [*"né".encode(), 256, *b"b", 256, *b"cd\nef\n", 256]
    assert stream.read(0, len(stream)).tolist() == expected
    assert stream.text_bytes == len(expected) - 3
    by_line = stream_of_texts(paths[1:], key="text", limits=Limits(text_documents="line"), tokenizer=BYTES)
    assert by_line.read(0, len(by_line)).tolist() == [*b"cd", 256, *b"ef", 256]


def test_bad_texts_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: no key 'text' .*fix the line"):
        stream_of_texts([str(path)], key="text", limits=Limits(), tokenizer=BYTES)
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="no text found"):
        stream_of_texts([str(path)], key="text", limits=Limits(), tokenizer=BYTES)


def test_stream_of_token_files(tmp_path: Path) -> None:
    for name, documents in {"a": [[1, 2, 3], [4]], "b": [[5, 6]]}.items():
        write_by_layout(tmp_path / name, documents)
    stream = stream_of_files([str(tmp_path / "a"), str(tmp_path / "b")], 7)
    assert stream.read(0, len(stream)).tolist() == [1, 2, 3, 4, 5, 6]
    assert stream.text_bytes is None
    with pytest.raises(ConfigError, match="holds token id 6, but vocab_size is 6"):
        stream_of_files([str(tmp_path / "b")], 6)
    with pytest.raises(ConfigError, match="do not exist; give a path without"):
        stream_of_files([str(tmp_path / "aa")], 7)
