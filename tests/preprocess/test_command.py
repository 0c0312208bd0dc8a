import gzip
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.cli.model_commands import KINDS
from megalite.cli.model_commands import PREPROCESS as main
from megalite.cli.preprocess import JobProgress, job_of, summary, tokenizer_kind
from megalite.config.errors import ConfigError
from megalite.preprocess.job import Progress
from megalite.preprocess.output import State
from megalite.watchdog.processes import usable_cores
from tests.preprocess.jobs import NUMBER_FLAGS, documents, write_jsonl, write_numbers

ROOT = Path(__file__).parents[2]
Capture = pytest.CaptureFixture[str]


def run(folder: Path, *words: str) -> int:
    return main(["--output-prefix", str(folder / "out"), *NUMBER_FLAGS, *words])


def test_summary_at_the_end(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jsonl").write_text('x\n{"text": "1 2 3"}\ny\n{"text": ""}\nw\nv\n')
    assert run(tmp_path, "--input", str(tmp_path / "a.jsonl"), "--append-eod", "--workers", "1") == 0
    out, err = capsys.readouterr()
    prefix = tmp_path / "out_text_document"
    assert out == f"{prefix}.bin, .idx and .json: 1 documents\n"
    lines = err.splitlines()
    assert lines[0] == "5 bad lines were left out (1 empty text, 4 invalid JSON), the first of them:"
    assert [line.split(":")[1] for line in lines[1:6]] == ["1", "3", "4", "5", "6"]
    assert lines[6].startswith("1 documents, 4 tokens (4.0 per document) from 39 bytes of text in ") and len(lines) == 7
    assert documents(tmp_path) == [[1, 2, 3, 999]]


def test_error_is_one_line_and_status_2(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\nx\n')
    assert run(tmp_path, "--input", str(tmp_path / "a.jsonl"), "--strict") == 2
    assert run(tmp_path, "--input", str(tmp_path / "b.jsonl")) == 2
    (tmp_path / "file").write_text("")
    assert main(["--output-prefix", f"{tmp_path}/file/out", "--input", f"{tmp_path}/a.jsonl", *NUMBER_FLAGS]) == 2
    out, err = capsys.readouterr()
    first, second, third = err.splitlines()
    assert out == "" and first.startswith(f"error: {tmp_path / 'a.jsonl'}:2: invalid JSON")
    assert second.startswith("error: input") and "b.jsonl does not exist" in second
    assert third.startswith("error: ") and "Not a directory" in third


def test_second_signal_does_not_interrupt_saving(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_numbers(tmp_path / "a.jsonl", 20)
    write = State.write

    def interrupt(self: JobProgress, progress: Progress) -> None:
        if progress.documents:
            signal.raise_signal(signal.SIGINT)

    def write_late(state: State, path: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        write(state, path)

    monkeypatch.setattr(JobProgress, "take", interrupt)
    monkeypatch.setattr(State, "write", write_late)
    assert run(tmp_path, "--input", str(tmp_path / "a.jsonl")) == 130
    assert capsys.readouterr().err.startswith("interrupted; 20 documents are kept in")


def test_third_signal_ends_the_process() -> None:
    code = (
        "import signal\nfrom megalite.cli.output import Stopped, first_signal_raises\n"
        "with first_signal_raises():\n"
        "    try:\n        signal.raise_signal(2)\n    except Stopped:\n        signal.raise_signal(15)\n"
        "        print('saved', flush=True)\n        signal.raise_signal(15)\n        print('never')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "saved\n")


def test_dry_run_writes_nothing(tmp_path: Path, capsys: Capture) -> None:
    write_jsonl(tmp_path / "b.jsonl", ["7"])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'x\n\n{"text": "1 2"}\n'))
    before = sorted(tmp_path.iterdir())
    assert run(tmp_path, "--input", str(tmp_path), "--dry-run", "--append-eod", "--workers", "3") == 0
    out, err = capsys.readouterr()
    assert err == "" and sorted(tmp_path.iterdir()) == before
    size = (tmp_path / "a.jsonl.gz").stat().st_size
    assert out.splitlines() == [
        f"2 inputs, {size + 14} bytes:",
        f"  {tmp_path}/a.jsonl.gz: jsonl, gz, {size} bytes",
        f"  {tmp_path}/b.jsonl: jsonl, 14 bytes",
        "NullTokenizer: 1,000 ids stored as uint16, end of document 999",
        f"first document, {tmp_path}/a.jsonl.gz:3: 3 characters, 3 tokens",
        "  '1 2'",
        "  1 2 999",
        "3 workers would write:",
        f"  {tmp_path}/out_text_document.bin, .idx and .json",
    ]
    assert run(tmp_path, "--input", str(tmp_path / "c.jsonl"), "--dry-run") == 2
    assert "c.jsonl does not exist" in capsys.readouterr().err


def test_flags_become_the_job() -> None:
    words = "--input a b - --output-prefix p --json-keys q a --append-eod --strict --restart --max-document-mb 0.5 "
    words += "--text-documents line --tokenizer-model t --tiktoken-pattern x --tokenizer-type "
    flags = main.parse((words + "gptsentencepiecetokenizer").split())
    job = job_of(flags)
    assert (job.inputs, job.output_prefix, job.json_keys) == (("a", "b", "-"), "p", ("q", "a"))
    assert (job.append_eod, job.strict, job.restart, job.text_documents) == (True, True, True, "line")
    assert (job.max_document_bytes, flags.dry_run) == (1 << 19, False)
    assert (job.tokenizer.tokenizer_model, job.tokenizer.tiktoken_pattern) == ("t", "x")
    assert job.tokenizer.tokenizer_type == "SentencePieceTokenizer"
    assert job.workers == usable_cores() >= 1 and flags.ignored == []
    assert job_of(main.parse(["--input", "a", "--output-prefix", "p"])).max_document_bytes == 8 << 20
    for given, message in (
        ("--max-document-mb 0", "--max-document-mb 0.0 must be above 0 and below 1,048,576; try 8"),
        ("--max-document-mb 1048576", "--max-document-mb 1048576.0 must be above 0 and below 1,048,576"),
        ("--max-document-mb nan", "--max-document-mb: takes a number such as 0.1, got 'nan'"),
        ("--max-document-mb inf", "--max-document-mb: takes a number such as 0.1, got 'inf'"),
    ):
        with pytest.raises(ConfigError, match=message):
            job_of(main.parse(["--input", "a", "--output-prefix", "p", *given.split()]))


@pytest.mark.parametrize("flag", main.foreign)
def test_flag_of_another_script_is_one_error(flag: str, capsys: Capture) -> None:
    assert main(["--input", "a", "--output-prefix", "p", flag, "x", "y"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {flag}: {main.foreign[flag][0]}; ")
    assert main([flag]) == 2
    assert f"- {flag}: {main.foreign[flag][0]}\n" in capsys.readouterr().err


def test_redundant_flags_are_accepted_with_a_note(tmp_path: Path, capsys: Capture) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["7"])
    words = ["--dataset-impl", "mmap", "--log-interval", "1000", "--partitions", "1", "--dry-run"]
    assert run(tmp_path, "--input", str(tmp_path / "a.jsonl"), *words) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert all(f"{flag} {value}" in line for flag, value in zip(words[:6:2], words[1:6:2], strict=True))
    for bad in (["--dataset-impl", "lazy"], ["--partitions", "11"], ["--log-interval"]):
        assert run(tmp_path, "--input", str(tmp_path / "a.jsonl"), *bad) == 2
        assert capsys.readouterr().err.startswith(f"error: {bad[0]}: {main.foreign[bad[0]][0]}; ")


def test_tokenizer_names_of_other_scripts() -> None:
    assert {tokenizer_kind(kind.lower()) for kind in KINDS} == set(KINDS)
    assert tokenizer_kind("GPTSentencePieceTokenizer") == "SentencePieceTokenizer"
    with pytest.raises(ConfigError, match="would put <s> before each document; use SentencePieceTokenizer"):
        tokenizer_kind("Llama2Tokenizer")
    with pytest.raises(ConfigError, match=r"HugingFaceTokenizer is unknown: did you mean HuggingFaceTokenizer\?"):
        tokenizer_kind("HugingFaceTokenizer")


class TestProgress:
    def show(self, monkeypatch: pytest.MonkeyPatch, *, tty: bool, total: int | None) -> None:
        """Half of 2 MB done in 10 s, after a quarter in an earlier run."""
        clock = [100.0]
        monkeypatch.setattr("megalite.cli.display.time.monotonic", lambda: clock[0])
        monkeypatch.setattr(sys.stderr, "isatty", lambda: tty, raising=False)
        line = JobProgress()
        for second in range(11):
            clock[0] = 100.0 + second
            done = 500_000 + 50_000 * second
            line.take(
                Progress(
                    documents=1000 + 100 * second,
                    tokens=done // 4,
                    input_bytes=done,
                    disk_bytes=done,
                    disk_total=total,
                    bad={"no object": 2} if second else {},
                    notice="continuing",
                )
            )
        line.close()

    @pytest.mark.parametrize("columns", [150, 40])
    def test_bar_is_rewritten_on_a_terminal(
        self, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
    ) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        self.show(monkeypatch, tty=True, total=2_000_000)
        head, _, drawn = capsys.readouterr().err.partition("\n")
        assert head == "continuing" and drawn.count("\r") >= 10
        last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn).rstrip().split("\r")[-1]
        assert "2,000 documents (100" in last and len(last) <= columns
        if columns == 150:
            text = "2,000 documents (100/s), 250,000 tokens (12,500/s), 1.0 MB (50.0 KB/s), 2 bad lines, 0:20 left"
            assert f" 50% {text}" in last

    def test_lines_at_intervals_without_a_terminal(self, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
        monkeypatch.setattr("megalite.cli.display._LOG_SECONDS", 5.0)
        self.show(monkeypatch, tty=False, total=None)
        assert capsys.readouterr().err.splitlines() == [
            "continuing",
            "1,500 documents (100/s), 187,500 tokens (12,500/s), 750.0 KB (50.0 KB/s), 2 bad lines",
            "2,000 documents (100/s), 250,000 tokens (12,500/s), 1.0 MB (50.0 KB/s), 2 bad lines",
        ]

    def test_summary_has_the_speed_of_this_run_only(self) -> None:
        done = Progress(documents=300, tokens=9000, input_bytes=5_000_000, output_bytes=18_000)
        done.kept_documents, done.kept_tokens, done.kept_bytes = 100, 3000, 1_000_000
        assert summary(done, 2.0) == (
            "300 documents, 9,000 tokens (30.0 per document) from 5.0 MB of text in 2.0 s: 100 documents/s, "
            "3,000 tokens/s, 2.0 MB/s; 18.0 KB written"
        )


def test_tool_runs_the_command(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["preprocess_data.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "tools" / "preprocess_data.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert stop.value.code == 0 and "--append-eod" in out and "--partitions" not in out
