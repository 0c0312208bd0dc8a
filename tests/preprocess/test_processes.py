"""The command as a process: killed, interrupted, with a full disk, reading a pipe, and with workers that die."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.preprocess.output import State
from tests.preprocess.jobs import NUMBER_FLAGS, output_bytes, run_numbers, write_numbers
from tests.support.patience import is_gone, wait_until

ROOT = Path(__file__).parents[2]
DOCUMENTS = 4000
PATIENCE_SECONDS = 60.0


class Command:
    """The driver's process, with its output in files."""

    def __init__(self, folder: Path, *words: str, source: str | None = None, stdin: int = subprocess.DEVNULL) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "tests.preprocess.driver"]
        if words[:1] == ("--file-limit",):
            command, words = [*command, *words[:2]], words[2:]
        command += ["--input", source or str(folder / "a.jsonl"), "--output-prefix", str(folder / "out")]
        self.errors = folder / "stderr.txt"
        self.errors.unlink(missing_ok=True)  # a killed command's resource tracker may still write into its own files
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *NUMBER_FLAGS, *words],
                cwd=ROOT,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def wait_until_kept(self, more: int) -> bool:
        """Wait until that many more documents are saved; False if the command ends before."""
        start = self.kept()
        wait_until(lambda: self.kept() >= start + more or self.process.poll() is not None)
        return self.process.poll() is None

    def kept(self) -> int:
        state = State.read(self.folder / "out.unfinished" / "state.json")
        return 0 if state is None else state.outputs[0].documents

    def workers(self) -> list[int]:
        """Processes started by this one."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        children = [int(word) for word in path.read_text().split()]
        return [child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

    def end(self) -> tuple[int, str]:
        """Return (exit status, stderr)."""
        return self.process.wait(PATIENCE_SECONDS), self.errors.read_text()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    run_numbers(folder, write_numbers(folder / "a.jsonl", DOCUMENTS), checkpoint_seconds=5.0)
    return output_bytes(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_numbers(tmp_path / "a.jsonl", DOCUMENTS)
    yield tmp_path


def test_killed_command_resumes_and_leaves_no_process(folder: Path, expected: list[bytes]) -> None:
    draw = random.Random(2)
    killed = 0
    while True:
        command = Command(folder, "--workers", "2")
        if killed == 2 or not command.wait_until_kept(draw.randrange(20, 600)):
            break
        started = command.workers()
        command.process.kill()
        assert command.process.wait() == -signal.SIGKILL
        wait_until(lambda pids=tuple(started): all(map(is_gone, pids)))
        killed += 1
    status, said = command.end()
    assert status == 0, said
    assert killed >= 2 and "resuming after" in said
    assert output_bytes(folder) == expected
    assert not (folder / "out.unfinished").exists()


def test_signal_ends_the_command_with_one_line(folder: Path, expected: list[bytes]) -> None:
    command = Command(folder, "--workers", "3")
    assert command.wait_until_kept(100)
    workers = command.workers()
    assert len(workers) == 2
    os.killpg(command.process.pid, signal.SIGINT)  # as terminals and batch systems do
    code, said = command.end()
    assert code == 130
    line, end, rest = said.partition("\n")
    assert (end, rest) == ("\n", "") and line.startswith("interrupted; ")
    assert line.endswith(
        f" documents are kept in {folder}/out.unfinished: the same command resumes there, --restart drops them"
    )
    assert all(map(is_gone, workers))
    assert f"resuming after {line.split()[1]} documents" in run_numbers(folder, folder / "a.jsonl").notice
    assert output_bytes(folder) == expected


def test_killed_worker_is_one_error(folder: Path, expected: list[bytes]) -> None:
    command = Command(folder, "--workers", "3")
    assert command.wait_until_kept(100)
    first, second = command.workers()
    for number in (signal.SIGINT, signal.SIGTERM):  # only the parent handles these
        os.kill(first, number)
    assert command.wait_until_kept(500)
    os.kill(first, signal.SIGKILL)
    code, said = command.end()
    assert code == 2 and said.count("\n") == 1
    assert said.startswith(
        "error: a worker process died (out of memory?); use megalite preprocess --workers 1, or a smaller"
    )
    assert "documents are kept in" in said and is_gone(second)
    run_numbers(folder, folder / "a.jsonl")
    assert output_bytes(folder) == expected


def test_full_disk_is_one_error_and_loses_nothing(folder: Path, expected: list[bytes]) -> None:
    code, said = Command(folder, "--file-limit", str(len(expected[0]) // 2)).end()
    assert code == 2 and said.count("\n") == 1
    assert said.startswith("error: ") and "File too large; make room on the disk" in said
    kept = int(said.split("; ")[-1].split()[0].replace(",", ""))
    assert DOCUMENTS // 4 < kept < DOCUMENTS
    assert not (folder / "out_text_document.bin").exists()
    assert f"resuming after {kept:,} documents" in run_numbers(folder, folder / "a.jsonl").notice
    assert output_bytes(folder) == expected
