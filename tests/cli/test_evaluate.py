"""Test `megalite evaluate` on one rank: output and refused input."""

import json
import math
from pathlib import Path

import pytest

from megalite.cli.model_commands import EVALUATE
from megalite.conversion.native import write_native
from megalite.data.token_files import encode_side_file
from tests.conversion.samples import BYTES, GPT, MadeUp, byte_tokenizer
from tests.data.token_files import write_by_layout

Captured = pytest.CaptureFixture[str]
TEXT = "def main():\n    return 'é'\n" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 24 positions and a byte tokenizer, and one text as text, jsonl and token file."""
    folder = tmp_path_factory.mktemp("evaluate")
    weights = MadeUp(folder, GPT, tokenizer_files=byte_tokenizer(folder / "vocabulary"))
    write_native(weights, folder / "model")
    (folder / "a.txt").write_text(TEXT)
    (folder / "a.jsonl").write_text(json.dumps({"content": TEXT}) + "\n")
    symbols = json.loads((folder / "vocabulary" / "vocab.json").read_text())
    ids = [BYTES.index(byte) for byte in TEXT.encode()]
    write_by_layout(folder / "a", [[*ids, symbols["<|endoftext|>"]]])
    return folder


def evaluate(folder: Path, *words: str | Path) -> int:
    return EVALUATE(["--load", str(folder / "model"), "--device", "cpu", *map(str, words)])


def test_text_json_and_token_files_give_the_same_loss(folder: Path, capsys: Captured) -> None:
    reports = []
    for words in (
        ("--input", folder / "a.txt"),
        ("--input", folder / "a.jsonl", "--json-key", "content"),
        ("--data-path", folder / "a"),
    ):
        assert evaluate(folder, *words, "--json") == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert len({report["loss"] for report in reports}) == 1
    side = {
        "documents": 1,
        "tokens": 105,
        "dtype": "uint16",
        "tokenizer": {"kind": "NullTokenizer", "sha256": "0" * 64},
    }
    (folder / "a.json").write_bytes(encode_side_file(side))
    assert evaluate(folder, "--data-path", folder / "a") == 2
    said = capsys.readouterr().err
    assert (
        "a.bin was made with another tokenizer: NullTokenizer (sha256 000000000000...), and the model has its own"
        in said
    )
    (folder / "a.json").unlink()
    first = reports[0]
    assert first["tokens"] == first["bytes"] == len(TEXT.encode())
    assert (first["seq_length"], first["stride"], first["windows"]) == (24, 24, -(-first["tokens"] // 24))
    assert first["perplexity"] == math.exp(first["loss"])
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))
    assert reports[2]["bits_per_byte"] is None and reports[2]["bytes"] is None


def test_text_output(folder: Path, capsys: Captured) -> None:
    words = ("--input", folder / "a.txt", "--seq-length", "12", "--stride", "5", "--batch-size", "4", "--dtype", "fp64")
    assert evaluate(folder, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["model", "tokens", "loss", "perplexity", "bits per byte"]
    assert "windows of 12, stride 5" in lines[1]
