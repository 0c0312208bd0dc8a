import json
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.side_file import encode_side_file, read_side_file, unused_side_file

FACTS = {
    "documents": 2,
    "tokens": 5,
    "dtype": "uint16",
    "files": {".bin": {"bytes": 10, "sha256": "0" * 64}},
    "text": "\udc80 is half a pair",
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_side_file(tmp_path / "d") is None
    (tmp_path / "d.json").write_bytes(encode_side_file(FACTS))
    assert read_side_file(tmp_path / "d") == {"format": 1, **FACTS}
    assert unused_side_file(tmp_path / "d") is None


CHANGES = {
    "documents is -1, expected a number": {"documents": -1},
    "documents is true, expected a number": {"documents": True},
    "documents is null, expected a number": {"documents": None},
    'tokens is "5", expected a number': {"tokens": "5"},
    "dtype is 8, expected the name": {"dtype": 8},
    "files is a list, expected an object": {"files": []},
    'files ".bin" is an object, expected bytes and sha256': {"files": {".bin": {"bytes": 10, "sha256": "0"}}},
    'files ".idx" is null, expected bytes': {"files": {".idx": None}},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_field_that_cannot_be_is_named(tmp_path: Path, message: str) -> None:
    (tmp_path / "d.json").write_text(json.dumps({"format": 1, **FACTS, **CHANGES[message]}))
    with pytest.raises(ConfigError, match=rf"d\.json: {message}.*; move it away, or write the dataset again"):
        read_side_file(tmp_path / "d")


def test_a_field_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"format": 1, "documents": 2, "tokens": 5}')
    with pytest.raises(ConfigError, match=r"d\.json: dtype is missing; move it away"):
        read_side_file(tmp_path / "d")


def test_a_newer_format(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"format": 2}')
    for read in (read_side_file, unused_side_file):
        with pytest.raises(
            ConfigError, match=r"newer megalite \(format 2, this one reads 1\); .*move the file away"
        ):
            read(tmp_path / "d")


FOREIGN = [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", b"null", b"{}"]
FOREIGN += [b'{"format": "jsonl"}', b'{"format": true}', b'{"format": null}', b'{"format": 0}']
FOREIGN += [b'{"text": "one"}\n{"text": "two"}\n', b'{"version": "1.0", "model": {"type": "BPE"}}']


@pytest.mark.parametrize("content", FOREIGN)
def test_a_file_of_another_program_is_not_used(tmp_path: Path, content: bytes) -> None:
    """Texts in JSON beside the tokens that were made of them, or a tokenizer.json, say."""
    path = tmp_path / "d.json"
    path.write_bytes(content)
    assert read_side_file(tmp_path / "d") is None
    assert unused_side_file(tmp_path / "d") == f"{path} is not a side file of megalite: not used"


def test_one_of_an_earlier_version_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_text(json.dumps({"documents": 2, "tokenizer_sha256": "0" * 64, "bin_sha256": "0" * 64}))
    assert read_side_file(tmp_path / "d") is None
    assert unused_side_file(tmp_path / "d") == f"{path} is of an earlier version: not used"


def test_what_is_too_long_or_no_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with (tmp_path / "long.json").open("wb") as file:
        file.write(encode_side_file(FACTS))
        file.truncate(1 << 40)
    for name in ("folder", "long"):
        assert read_side_file(tmp_path / name) is None
        assert "is not a side file of megalite" in str(unused_side_file(tmp_path / name))
