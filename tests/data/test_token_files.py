"""Side files, and token files of another tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.data.token_files import TokenFiles, encode_side_file, read_side_file, require_recorded_tokenizer
from megalite.tokenizers.base import ByteLevelTokenizer, NullTokenizer
from megalite.training.setup import open_data
from tests.data.token_files import write_by_layout
from tests.support.ranks import RankContext
from tests.support.tiny import build, tiny_config

FACTS = {
    "documents": 2,
    "tokens": 5,
    "dtype": "uint16",
    "files": {".bin": {"bytes": 10, "sha256": "0" * 64}},
    "text": "\udc80 is half a pair",
}


def test_side_file_round_trip(tmp_path: Path) -> None:
    assert read_side_file(tmp_path / "d") is None
    (tmp_path / "d.json").write_bytes(encode_side_file(FACTS))
    assert read_side_file(tmp_path / "d") == {"format": 1, **FACTS}


CHANGES = {
    "documents is -1, expected a number": {"documents": -1},
    "documents is True, expected a number": {"documents": True},
    "documents is None, expected a number": {"documents": None},
    "tokens is '5', expected a number": {"tokens": "5"},
    "dtype is 8, expected the name": {"dtype": 8},
    "dtype is None, expected the name": {"dtype": None},
    "files  is \\[\\], expected bytes": {"files": []},
    "files .bin is .*, expected bytes and sha256": {"files": {".bin": {"bytes": 10, "sha256": "0"}}},
    "files .idx is None, expected bytes": {"files": {".idx": None}},
}


@pytest.mark.parametrize("message", CHANGES)
def test_invalid_field_is_named(tmp_path: Path, message: str) -> None:
    (tmp_path / "d.json").write_text(json.dumps({"format": 1, **FACTS, **CHANGES[message]}))
    with pytest.raises(ConfigError, match=rf"d\.json: {message}.*; move it away, or write the dataset again"):
        read_side_file(tmp_path / "d")


def test_newer_format_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text('{"format": 2}')
    with pytest.raises(ConfigError, match=r"newer megalite \(format 2, this version reads 1\); .*move the file away"):
        read_side_file(tmp_path / "d")


FOREIGN = [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}", b"null", b"{}"]
FOREIGN += [b'{"format": "jsonl"}', b'{"format": true}', b'{"format": null}', b'{"format": 0}']
FOREIGN += [b'{"text": "one"}\n{"text": "two"}\n', b'{"version": "1.0", "model": {"type": "BPE"}}']


@pytest.mark.parametrize("content", FOREIGN)
def test_json_of_another_program_is_ignored(tmp_path: Path, content: bytes) -> None:
    """JSON of other programs beside token files, such as texts or a tokenizer.json."""
    path = tmp_path / "d.json"
    path.write_bytes(content)
    assert read_side_file(tmp_path / "d") is None


def test_huge_side_file_or_folder_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with (tmp_path / "long.json").open("wb") as file:
        file.write(encode_side_file(FACTS))
        file.truncate(1 << 40)
    for name in ("folder", "long"):
        assert read_side_file(tmp_path / name) is None


BYTES = ByteLevelTokenizer()
RECORDED: dict[str, Any] = {"documents": 50, "tokens": 1000, "dtype": "uint16"}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Token files made with ByteLevelTokenizer according to their side file."""
    write_by_layout(tmp_path / "d", [[1] * 20] * 50)
    made_with = {"kind": BYTES.name, "sha256": BYTES.fingerprint(), "vocab_size": 257, "eod": 256}
    (tmp_path / "d.json").write_bytes(encode_side_file({**RECORDED, "tokenizer": made_with}))
    return str(tmp_path / "d")


def refusal(prefix: str) -> str:
    return (
        f"{prefix}.bin was made with another tokenizer: ByteLevelTokenizer (sha256 {BYTES.fingerprint()[:12]}...), and this "
        f"run has NullTokenizer (sha256 {NullTokenizer(300).fingerprint()[:12]}...); use the one of the file, or move "
        f"{prefix}.json away if both tokenizers give the same ids"
    )


def test_training_refuses_another_tokenizer(prefix: str) -> None:
    def read(tokenizer: ByteLevelTokenizer | NullTokenizer | None) -> None:
        config = tiny_config(1, data_path=[prefix], split="1", vocab_size=300, eod_mask_loss=False)
        assert open_data(build(RankContext(0), config), tokenizer).train is not None

    read(BYTES)
    read(None)
    with pytest.raises(ConfigError) as error:
        read(NullTokenizer(300))
    assert str(error.value) == refusal(prefix)
    Path(f"{prefix}.json").unlink()
    read(NullTokenizer(300))


def test_blend_of_two_tokenizers_is_an_error(prefix: str, tmp_path: Path) -> None:
    """Also without a tokenizer in the run."""
    write_by_layout(tmp_path / "e", [[1] * 20] * 50)
    other = {"kind": "NullTokenizer", "sha256": "0" * 64}
    (tmp_path / "e.json").write_bytes(encode_side_file({**RECORDED, "tokenizer": other}))
    files = TokenFiles(300)
    files.open(prefix)
    with pytest.raises(ConfigError, match=r"e.bin was made with NullTokenizer .* and .*d.bin with ByteLevelTokenizer"):
        files.open(str(tmp_path / "e"))
    Path(f"{prefix}.json").unlink()
    both = TokenFiles(300)
    assert all(both.open(each) for each in (prefix, str(tmp_path / "e")))


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"format": 2, **RECORDED, "tokenizer": {"sha256": "0"}}),
        json.dumps({"format": 1, **RECORDED}),
        json.dumps({"format": 1, **RECORDED, "tokenizer": "ByteLevelTokenizer"}),
        json.dumps({"format": 1, **RECORDED, "tokenizer": {"kind": "x", "sha256": 7}}),
    ],
)
def test_invalid_side_file_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "d.json").write_text(content)
    require_recorded_tokenizer(str(tmp_path / "d"), BYTES)
    require_recorded_tokenizer(str(tmp_path / "none"), BYTES)


@pytest.mark.parametrize("signs", [["json"], ["mask"], ["json", "mask"]])
def test_examples_as_plain_text_are_refused(tmp_path: Path, signs: list[str]) -> None:
    """Examples are recognised by the side file or the mask; without both they are ordinary text."""
    write_by_layout(tmp_path / "e_document", [[1] * 20] * 50)
    side, mask = tmp_path / "e_document.json", tmp_path / "e_mask_document"
    if "json" in signs:
        side.write_bytes(encode_side_file({**RECORDED, "key": "sft", "keys": ["sft", "sft_mask"]}))
    if "mask" in signs:
        write_by_layout(mask, [[1] * 20] * 50)
    prefix = str(tmp_path / "e_document")
    config = tiny_config(1, data_path=[prefix], split="1", vocab_size=300, eod_mask_loss=False)
    with pytest.raises(
        ConfigError, match=r"their prompts are learned too; add --sft to .* away to learn all tokens"
    ) as error:
        open_data(build(RankContext(0), config), None)
    shown = [str({"json": side, "mask": f"{mask}.idx"}[sign]) for sign in signs]
    assert f"(see {' and '.join(shown)})" in str(error.value)
    if "mask" in signs:
        assert open_data(build(RankContext(0), replace(config, sft=True)), None).train is not None
    for file in (side, Path(f"{mask}.idx")):
        file.unlink(missing_ok=True)
    assert open_data(build(RankContext(0), config), None).train is not None


def test_file_without_tokens_is_an_error(tmp_path: Path) -> None:
    write_by_layout(tmp_path / "d", [[], []])
    config = tiny_config(1, data_path=[str(tmp_path / "d")], eod_mask_loss=False)
    with pytest.raises(ConfigError, match=r"data path .*/d: .*/d\.bin has no tokens; leave it out"):
        open_data(build(RankContext(0), config), None)


def test_split_without_documents_names_the_split(tmp_path: Path) -> None:
    write_by_layout(tmp_path / "d", [[1] * 40] * 3)

    def message(**settings: Any) -> str:
        config = tiny_config(1, eod_mask_loss=False, **settings)
        with pytest.raises(ConfigError) as error:
            open_data(build(RankContext(0), config), None)
        return str(error.value)

    path = [str(tmp_path / "d")]
    assert "the training split is empty (split 0,1,0)" in message(data_path=path, split="0,1,0")
    assert "no validation data (split 969,30,1); give it a larger share of --split" in message(
        data_path=path, eval_interval=5
    )


def test_token_ids_of_another_tokenizer_are_named(tmp_path: Path) -> None:
    """With a tokenizer, the message does not mention vocab_size, which the user did not set."""
    write_by_layout(tmp_path / "d", [[1] * 400, [998]])

    def message(tokenizer: ByteLevelTokenizer | NullTokenizer) -> str:
        size = tokenizer.vocab_size
        settings = {"data_path": [str(tmp_path / "d")], "split": "1", "eod_mask_loss": False}
        config = tiny_config(1, vocab_size=size, **settings)
        with pytest.raises(ConfigError) as error:
            open_data(build(RankContext(0), config), tokenizer)
        return str(error.value)

    said = message(BYTES)
    assert "holds token id 998, but vocab_size is 257 of ByteLevelTokenizer (sha256 " in said
    assert "set vocab_size to at least 999" in message(NullTokenizer(300))
