"""Test `megalite data`: flags, output and exit statuses. tests/preprocess tests the functions behind it."""

import json
import os
import signal
from pathlib import Path

import pytest

from megalite.cli.display import ByteProgress
from megalite.cli.model_commands import DATA as main
from megalite.tokenizers.base import NullTokenizer
from tests.preprocess.layout import MIXED, both, pack, write, write_with_side_file

Captured = pytest.CaptureFixture[str]
NULL = {"kind": "NullTokenizer", "sha256": NullTokenizer(14).fingerprint(), "vocab_size": 14, "eod": 13}


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_with_side_file(
        tmp_path / "d", MIXED, tokenizer=NULL, append_eod=False, bad_lines={"invalid JSON": 2}, key="a\x1b[2J"
    )


def test_verify_output(prefix: str, tmp_path: Path, capsys: Captured) -> None:
    plain = write(tmp_path / "plain", MIXED)
    assert main(["verify", f"{prefix}.idx", f"{prefix}.bin", plain]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{prefix}: sound: 6 documents, 13 uint16 tokens, 212 bytes; ids up to 13, vocab_size 14; sha256 as in the "
        "side file",
        f"{plain}: sound: 6 documents, 13 uint16 tokens, 212 bytes; ids up to 13 (not compared: give "
        "--vocab-size); sha256 not compared: no side file",
    ]
    assert main(["verify", prefix, "--no-hash"]) == 0
    assert capsys.readouterr().out.endswith("; sha256 not compared\n")
    assert main(["verify", str(tmp_path), "--vocab-size", "13"]) == 1
    damaged, other = capsys.readouterr().out.splitlines()
    assert damaged.startswith(f"{prefix}: damaged: {prefix}.bin: byte 24: token id 13 (document 5, sequence 7,")
    assert other.startswith(f"{plain}: damaged: {plain}.bin: byte 24: ")


def test_verify_continues_after_bad_input(prefix: str, tmp_path: Path, capsys: Captured) -> None:
    plain = write(tmp_path / "a", MIXED)
    Path(f"{plain}.json").write_text('{"format": 1}')
    assert main(["verify", plain, prefix, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {plain}.json: documents is None, expected")
    first, second = json.loads(captured.out)
    assert (first["prefix"], first["fault"], first["largest_id"]) == (plain, None, 13)
    assert first["bad_side_file"] in captured.err
    assert (second["prefix"], second["fault"], second["largest_id"]) == (prefix, None, 13)
    assert main(["verify", plain]) == 2
    assert "a: sound: 6 documents" in capsys.readouterr().out
    Path(f"{prefix}.idx").write_bytes(b"")
    assert main(["verify", prefix, "--json"]) == 1
    [result] = json.loads(capsys.readouterr().out)
    assert (result["fault"]["path"], result["fault"]["offset"]) == (f"{prefix}.idx", 0)


def test_verify_with_a_tokenizer(prefix: str, capsys: Captured) -> None:
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size"]
    assert main(["verify", prefix, *null, "14"]) == 0
    assert main(["verify", prefix, *null, "15"]) == 2
    assert "d.bin was made with another tokenizer: " in capsys.readouterr().err
    assert main(["verify", prefix, "--vocab-size", "0"]) == 2
    assert "error: vocab_size 0 must be at least 1" in capsys.readouterr().err


def test_inspect_output(prefix: str, capsys: Captured) -> None:
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "14"]
    assert main(["inspect", prefix, "--documents", "1:3", "--max-tokens", "2", *null]) == 0
    text = capsys.readouterr().out
    for line in (
        prefix,
        "  tokens     13 of type uint16",
        "  documents  6 (2 without tokens, 8 sequences)",
        "  files      .bin 26 bytes, .idx 186 bytes",
        "  lengths    0 to 4 tokens, mean 2.2",
        "                        2 to 3              3 ##############################",
        "  side file",
        "    append_eod: false",
        "    bad_lines: {invalid JSON: 2}",
        "  document 1: 3 tokens, 3 sequences",
        "    4 5 ... 1 more",
        "    | 4 5",
        "  document 2: 0 tokens, 0 sequences",
    ):
        assert line in text.splitlines(), line
    assert "kind: NullTokenizer" in text and "\x1b" not in text
    assert main(["inspect", prefix, "--documents", "0", "--json", *null]) == 0
    [facts] = json.loads(capsys.readouterr().out)
    assert facts["shown_documents"] == [
        {"number": 0, "sequences": 1, "length": 3, "tokens": [1, 2, 3], "text": "1 2 3"}
    ]


def test_inspect_refuses_flags_without_effect(prefix: str, tmp_path: Path, capsys: Captured) -> None:
    null = ["--tokenizer-type", "NullTokenizer", "--vocab-size"]
    plain = write(tmp_path / "plain", MIXED)
    for flags, message in (
        ([prefix, *null, "14"], "choose them, e.g. --documents 0:3"),
        ([prefix, "--vocab-size", "14"], "vocab_size 14 has no effect"),
        ([prefix, "--max-tokens", "0"], "--max-tokens: takes a whole number of at least 1, such as 4, got 0"),
        ([prefix, "--documents", "9"], "has the documents 0 to 5"),
        ([plain, "--documents", "5", *null, "5"], "token id 10, but NullTokenizer has ids below 5"),
        ([str(tmp_path / "zzz")], "neither "),
    ):
        assert main(["inspect", *flags]) == 2
        assert message in capsys.readouterr().err


def test_merge_output(prefix: str, tmp_path: Path, capsys: Captured) -> None:
    plain = write(tmp_path / "e", MIXED)
    output = str(tmp_path / "new" / "all")
    assert main(["merge", "--input", str(tmp_path), "--output-prefix", output]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{output}.bin and .idx: 12 documents, 26 uint16 tokens, of 2 datasets",
        "no side file written: a dataset has none, or vocabularies differ; tokenizers were not compared",
    ]
    assert both(output) == pack(MIXED + MIXED)
    assert main(["merge", "--input", plain, prefix, "--output-prefix", output]) == 2
    assert "all.bin exists" in capsys.readouterr().err
    assert main(["merge", "--input", plain, "--output-prefix", output + "4", "--dtype", "int32"]) == 0
    assert both(output + "4") == pack(MIXED, code=4)


def test_split_output(prefix: str, tmp_path: Path, capsys: Captured) -> None:
    def split(*flags: str) -> list[str]:
        assert main(["split", "--input", prefix, *flags]) == 0
        return capsys.readouterr().out.splitlines()

    out = str(tmp_path / "new" / "p")
    [first, second] = split("--output-prefix", out, "--parts", "2")
    assert first == f"{out}_0.bin, .idx and .json: 4 documents, 6 uint16 tokens, documents 0 to 3"
    assert second == f"{out}_1.bin, .idx and .json: 2 documents, 7 uint16 tokens, documents 4 to 5"
    assert both(f"{out}_1") == pack(MIXED[4:])
    [one] = split("--output-prefix", out, "--documents", "1:3")
    assert one.startswith(f"{out}.bin, ")
    split("--output-prefix", out + "d", "--documents", "0:2", "--documents", "1:6")
    assert both(f"{out}d_1") == pack(MIXED[1:])
    [train, valid, test] = split("--output-prefix", out, "--split", "1,1")
    assert train.startswith(f"{out}_train.bin") and valid.startswith(f"{out}_valid.bin")
    assert test == f"{out}_test: no documents, not written"
    assert not Path(f"{out}_test.bin").exists()
    assert main(["split", "--input", str(tmp_path / "new"), "--output-prefix", out, "--parts", "2"]) == 2
    assert "contains 7 datasets; give the prefix of one" in capsys.readouterr().err
    empty = write(tmp_path / "empty", [])
    assert main(["split", "--input", empty, "--output-prefix", out, "--parts", "2"]) == 2
    assert "empty has no documents to split" in capsys.readouterr().err


def test_names_of_parts_are_sortable(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", [[[i]] for i in range(11)])
    assert main(["split", "--input", prefix, "--output-prefix", str(tmp_path / "o" / "p"), "--parts", "11"]) == 0
    assert main(["merge", "--input", str(tmp_path / "o"), "--output-prefix", str(tmp_path / "all")]) == 0
    assert both(tmp_path / "all") == both(prefix)


@pytest.mark.parametrize(
    ("command", "number", "status", "word"),
    [(["merge"], signal.SIGINT, 130, "interrupted"), (["split", "--parts", "2"], signal.SIGTERM, 143, "terminated")],
)
def test_signal_leaves_no_files(
    prefix: str,
    command: list[str],
    number: signal.Signals,
    status: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    """The signal arrives while tokens are copied and a part of them is in a file."""
    folder = Path(prefix).parent / "new"

    def stop(self: ByteProgress, count: int) -> None:
        assert list(folder.glob(".new-*/0.bin"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(ByteProgress, "advance", stop)
    before = signal.getsignal(number)
    assert main([*command, "--input", prefix, "--output-prefix", str(folder / "all")]) == status
    assert capsys.readouterr().err.splitlines()[-1] == word
    assert not list(folder.iterdir()) and signal.getsignal(number) is before
