import gzip
import hashlib
import json
import pydoc_data.topics
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.cli.preprocess import main
from megalite.cli.train_tokenizer import main as train_main
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.preprocess import PreprocessJob, Progress, preprocess
from megalite.data.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer

ROOT = Path(__file__).parents[2]
TOPICS = sorted(pydoc_data.topics.topics.items())
NUMBERS = DataConfig(tokenizer_type="NullTokenizer")


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run_numbers(folder: Path, *inputs: Path | str, vocab_size: int = 1000, **settings: object) -> Progress:
    """Preprocess texts of numbers into folder/out_text_document."""
    job = PreprocessJob(
        inputs=tuple(map(str, inputs)),
        output_prefix=str(folder / "out"),
        tokenizer=NUMBERS,
        vocab_size=vocab_size,
        **settings,  # type: ignore[arg-type]
    )
    return preprocess(job)


def documents(folder: Path, key: str = "text") -> list[list[int]]:
    return [document.tolist() for document in IndexedDataset(folder / f"out_{key}_document")]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python's documentation topics as jsonl, and a tokenizer trained on them by the command."""
    folder = tmp_path_factory.mktemp("real")
    write_jsonl(folder / "topics.jsonl", [text for _, text in TOPICS])
    command = [
        "--input",
        str(folder / "topics.jsonl"),
        "--output-prefix",
        str(folder / "tok"),
        "--vocab-size",
        "800",
    ]
    assert train_main(command) == 0
    return folder


def test_real_text_end_to_end_whatever_the_workers(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "--input",
        str(real / "topics.jsonl"),
        "--tokenizer-model",
        str(real / "tok.model"),
        "--append-eod",
    ]
    for workers in (1, 2):
        assert main([*command, "--output-prefix", str(real / f"w{workers}"), "--workers", str(workers)]) == 0
    out, err = capsys.readouterr()
    assert f"w2_text_document.bin and .idx: {len(TOPICS)} documents" in out
    assert "79 documents" in err.replace(str(len(TOPICS)), "79") and "MB/s" in err and "tokens (" in err
    for suffix in (".bin", ".idx", ".json"):
        one, two = ((real / f"w{n}_text_document{suffix}").read_bytes() for n in (1, 2))
        assert one == two
    tokenizer = SentencePieceTokenizer(real / "tok.model")
    dataset = IndexedDataset(real / "w1_text_document")
    assert len(dataset) == len(TOPICS) and dataset.dtype == np.dtype("<u2")
    for (_, text), tokens in zip(TOPICS, dataset):
        assert tokens[-1] == tokenizer.eod
        assert tokenizer.decode(tokens[:-1].tolist()) == text
    facts = json.loads((real / "w1_text_document.json").read_text())
    assert facts == {
        "documents": len(TOPICS),
        "tokens": dataset.num_tokens,
        "bad_lines": 0,
        "dtype": "uint16",
        "append_eod": True,
        "tokenizer": "SentencePieceTokenizer",
        "tokenizer_sha256": hashlib.sha256((real / "tok.model").read_bytes()).hexdigest(),
        "vocab_size": 800,
        "eod": 2,
        "bin_sha256": hashlib.sha256((real / "w1_text_document.bin").read_bytes()).hexdigest(),
    }
    assert not list(real.glob("*.tmp"))


def test_order_and_kinds_of_input(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["1 2", "3"])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "4 5"}\n\n{"text": "6"}'))
    (tmp_path / "deep" / "d.txt").write_text("7\n8\n")
    (tmp_path / "deep" / "ignored.csv").write_text("9")
    run_numbers(tmp_path, tmp_path / "deep", tmp_path / "*.jsonl", tmp_path / "b.jsonl")
    assert documents(tmp_path) == [[4, 5], [6], [7, 8], [1, 2], [3]]


def test_many_batches_keep_their_order(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [str(i) for i in range(5000)])
    result = run_numbers(tmp_path, path, vocab_size=70000, append_eod=True, workers=2)
    assert documents(tmp_path) == [[i, 69999] for i in range(5000)]
    assert (result.documents, result.tokens, result.input_bytes) == (5000, 10000, path.stat().st_size)
    assert IndexedDataset(tmp_path / "out_text_document").dtype == np.dtype("<i4")


def test_several_keys_keep_in_step(tmp_path: Path) -> None:
    lines = [{"q": "1", "a": "2 3"}, {"q": "4"}, {"a": "5", "q": "6", "other": 7}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = run_numbers(tmp_path, tmp_path / "a.jsonl", json_keys=("q", "a"))
    assert documents(tmp_path, "q") == [[1], [6]] and documents(tmp_path, "a") == [[2, 3], [5]]
    assert result.faults == [f"{tmp_path / 'a.jsonl'}:2: no key 'a' (there are 'q')"]


BAD_LINES = {
    b'{"text": "1"': "invalid JSON",
    b"[" * 100_000: "invalid JSON",
    b'["text"]': "expected a JSON object, got list",
    b'{"body": "1"}': "no key 'text' (there are 'body')",
    b"{}": "no key 'text' (there are none)",
    b'{"text": 5}': "expected a string under 'text', got int",
    b'{"text": null}': "expected a string under 'text', got NoneType",
    b'{"text": ""}': "empty text under 'text'",
    b'{"text": "  "}': "no tokens",
    b'{"text": "\xff"}': "invalid UTF-8 at byte 10",
    b'{"text": "\\ud800"}': "half of a surrogate pair under 'text'",
    b'{"text": "x"}': "'x' is not a number from 0 to 999",
}


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_line_is_counted_and_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "1"}\n\n' + bad + b'\n{"text": "2"}\n')
    result = run_numbers(tmp_path, path)
    assert (result.documents, result.bad_lines) == (2, 1) and documents(tmp_path) == [[1], [2]]
    assert result.faults[0].startswith(f"{path}:3: ") and BAD_LINES[bad] in result.faults[0]
    assert json.loads((tmp_path / "out_text_document.json").read_text())["bad_lines"] == 1
    with pytest.raises(ConfigError, match=r"a\.jsonl:3: .*stopped by --strict"):
        run_numbers(tmp_path, path, strict=True)


def test_only_the_first_bad_lines_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.jsonl").write_text('x\n{"text": "1"}\ny\nz\nw\n')
    command = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out")]
    assert main([*command, "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]) == 0
    err = capsys.readouterr().err
    assert "4 bad lines were left out" in err
    assert [n for n in range(1, 6) if f"a.jsonl:{n}: invalid JSON" in err] == [1, 3, 4]


def test_a_byte_order_mark_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "1"}\r\n{"text": "2"}\r\n')
    assert run_numbers(tmp_path, tmp_path / "a.jsonl").bad_lines == 0
    assert documents(tmp_path) == [[1], [2]]


def test_a_failed_run_leaves_earlier_output_alone(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", ["1 2 3"])
    run_numbers(tmp_path, good)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "b.jsonl").write_text('{"text": "4"}\n{"text"\n')
    with pytest.raises(ConfigError, match=r"b\.jsonl:2"):
        run_numbers(tmp_path, good, tmp_path / "b.jsonl", strict=True)
    (tmp_path / "b.jsonl").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_side_file_never_speaks_of_another_bin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_numbers(tmp_path, write_jsonl(tmp_path / "a.jsonl", ["1 2 3"]))

    def killed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("megalite.data.preprocess._write_side_file", killed)
    with pytest.raises(KeyboardInterrupt):
        run_numbers(tmp_path, write_jsonl(tmp_path / "b.jsonl", ["4"]))
    assert documents(tmp_path) == [[4]] and not (tmp_path / "out_text_document.json").exists()


def test_inputs_and_settings_that_do_not_work(tmp_path: Path) -> None:
    good = write_jsonl(tmp_path / "a.jsonl", ["1"])
    (tmp_path / "plain.txt").write_text("1")
    (tmp_path / "data.csv").write_text("1")
    (tmp_path / "bad.jsonl").write_text("x\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "1"}\n' * 1000)[:-20])
    (tmp_path / "plain.jsonl.gz").write_text('{"text": "1"}')
    (tmp_path / "empty").mkdir()
    faults: list[tuple[list[Path], dict[str, object], str]] = [
        ([tmp_path / "no.jsonl"], {}, r"no\.jsonl does not exist"),
        ([tmp_path / "empty"], {}, "is a folder without files that end in .jsonl"),
        ([tmp_path / "data.csv"], {}, r"data\.csv is of an unknown kind"),
        ([], {}, "no input files"),
        ([tmp_path / "cut.jsonl.gz"], {}, r"cut\.jsonl\.gz cannot be read"),
        ([tmp_path / "plain.jsonl.gz"], {}, r"plain\.jsonl\.gz cannot be read: Not a gzipped file"),
        (
            [tmp_path / "bad.jsonl"],
            {},
            r"no document in 1 input files; the first of 1 bad lines: .*bad\.jsonl:1: invalid",
        ),
        ([good], {"workers": 0}, "workers 0 must be at least 1"),
        ([good], {"json_keys": ()}, "must name one or more different keys"),
        ([good], {"json_keys": ("a", "a")}, "'a a' must name one or more different keys"),
        ([tmp_path / "plain.txt"], {"json_keys": ("a", "b")}, r"plain\.txt is plain text and has no keys"),
    ]
    before = sorted(tmp_path.iterdir())
    for inputs, settings, message in faults:
        with pytest.raises(ConfigError, match=message):
            run_numbers(tmp_path, *inputs, **settings)
        assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(ConfigError, match="no tokenizer: give --tokenizer-model"):
        preprocess(
            PreprocessJob(inputs=(str(good),), output_prefix=str(tmp_path / "out"), tokenizer=DataConfig())
        )


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_error_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\nx\n')
    command = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "out"), "--strict"]
    command += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "10", "--workers", workers]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"error: {tmp_path / 'a.jsonl'}:2: invalid JSON")


def test_progress_rewrites_one_line_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.cli.preprocess._TTY_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    path = write_jsonl(tmp_path / "a.jsonl", ["1"] * 2500)
    command = ["--input", str(path), "--output-prefix", str(tmp_path / "out")]
    assert main([*command, "--tokenizer-type", "NullTokenizer", "--vocab-size", "10"]) == 0
    err = capsys.readouterr().err
    assert err.count("\r") == 4 and err.count("\n") == 1
    assert [part.split()[0] for part in err.strip().split("\r")] == ["1,000", "2,000", "2,500", "2,500"]


def test_the_tool_runs_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "tools" / "preprocess_data.py"), run_name="__main__")
    assert stop.value.code == 0 and "--append-eod" in capsys.readouterr().out


class TestTrainTokenizer:
    def test_it_reads_as_much_as_it_is_told_to(self, tmp_path: Path) -> None:
        texts = [text for _, text in TOPICS]
        write_jsonl(tmp_path / "all.jsonl", texts)
        needed = sum(len(text.encode()) for text in texts[:40])
        write_jsonl(tmp_path / "first.jsonl", texts[:40])
        common = ["--vocab-size", "600", "--output-prefix"]
        assert train_main(["--input", str(tmp_path / "first.jsonl"), *common, str(tmp_path / "first")]) == 0
        limit = ["--max-megabytes", str((needed - 1) / 1e6)]
        assert (
            train_main(["--input", str(tmp_path / "all.jsonl"), *limit, *common, str(tmp_path / "limited")])
            == 0
        )
        assert (tmp_path / "limited.model").read_bytes() == (tmp_path / "first.model").read_bytes()

    def test_other_keys_and_bad_lines(self, tmp_path: Path) -> None:
        lines = [json.dumps({"body": text}) for _, text in TOPICS]
        (tmp_path / "a.jsonl").write_text("\n".join(["{bad", *lines]))
        command = [
            "--input",
            str(tmp_path / "a.jsonl"),
            "--output-prefix",
            str(tmp_path / "t"),
            "--vocab-size",
            "600",
        ]
        assert train_main([*command, "--json-keys", "body"]) == 0
        assert SentencePieceTokenizer(tmp_path / "t.model").vocab_size == 600

    def test_an_error_is_one_line_and_status_2(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        write_jsonl(tmp_path / "a.jsonl", ["hello"])
        assert train_main(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "t")]) == 2
        assert train_main(["--input", str(tmp_path / "b.jsonl"), "--output-prefix", str(tmp_path / "t")]) == 2
        first, second = capsys.readouterr().err.strip().split("\n")
        assert first.startswith(
            "error: a SentencePiece model with vocab_size 2048 cannot be trained on 5 characters"
        )
        assert second.startswith("error: input") and "b.jsonl does not exist" in second

    def test_a_damaged_corpus_is_not_half_used(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        whole = gzip.compress("\n".join(json.dumps({"text": text}) for _, text in TOPICS).encode())
        (tmp_path / "a.jsonl.gz").write_bytes(whole[:-100])
        command = ["--input", str(tmp_path / "a.jsonl.gz"), "--output-prefix", str(tmp_path / "t")]
        assert train_main([*command, "--vocab-size", "400"]) == 2
        assert "a.jsonl.gz cannot be read" in capsys.readouterr().err
        assert not (tmp_path / "t.model").exists()
