"""A full disk, or a removed run folder, does not end the training, and exit.json is still written."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.files import free_bytes
from megalite.training import records
from megalite.training.records import AppendedFile, BestEffort, JsonLines
from megalite.training.saving import SaveError
from megalite.training.stopping import Ending, reserve_ending, write_ending
from megalite.training.writers import CSVFile, TensorBoard
from tests.support.tiny import TINY
from tests.support.trainer import fit
from tests.training.test_sinks import record, scalars

SETTINGS = {**TINY, "mock_data": True, "eod_mask_loss": False, "train_iters": 8, "log_interval": 1}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 8 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(autouse=True)
def tries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_RETRY_SECONDS", 0.0)


def run(at: dict[int, Callable[[], None]], **changes: Any) -> list[str]:
    lines: list[str] = []

    def log(line: str) -> None:
        lines.append(line)
        if line.startswith("step "):
            at.pop(int(line.split()[1].split("/")[0]), lambda: None)()

    try:
        fit(log, **{**SETTINGS, **changes})
    except SaveError as error:
        lines.append(f"SaveError: {error}")
    assert at == {}
    return lines


def fill(disk: Path) -> None:
    with (disk / "filling").open("wb", buffering=0) as file, pytest.raises(OSError) as caught:
        while True:
            file.write(b"x" * 4096)
    assert caught.value.errno == errno.ENOSPC and free_bytes(disk) == 0


def steps(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines if line]


def reported(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "exit.json").read_text())
    return found


def test_full_disk_loses_only_records(disk: Path, tmp_path: Path) -> None:
    folder = disk / "run"

    def grow() -> None:
        fill(disk)
        for path in (folder / "metrics.jsonl", folder / "metrics.csv", *folder.glob("tensorboard/*")):
            with path.open("ab") as file:
                file.write(b"\n" * (-path.stat().st_size % 4096))

    more = {"metrics": ["csv"], "save": str(tmp_path / "saved"), "save_interval": 4}
    lines = run({2: grow, 5: (disk / "filling").unlink}, run_dir=str(folder), **more)
    warnings = [line for line in lines if "cannot write" in line]
    assert [line.split("cannot write ")[1].split(";")[0] for line in warnings if "sessions" not in line] == [
        f"{folder}/{name}: No space left on device" for name in ("metrics.jsonl", "tensorboard", "metrics.csv")
    ]
    again = [line for line in lines if "is written again" in line]
    assert again == [
        f"{folder}/{name} is written again; 3 records are missing in it"
        for name in ("metrics.jsonl", "tensorboard", "metrics.csv")
    ]
    assert (tmp_path / "saved" / "step-0000004").is_dir() and (tmp_path / "saved" / "step-0000008").is_dir()
    assert steps(folder) == [1, 2, 6, 7, 8]
    assert reported(folder)["status"] == "finished"


def test_removed_folder_loses_only_records(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    more = {"save": str(tmp_path / "saved"), "save_interval": 4, "tensorboard_dir": str(tmp_path / "board")}
    lines = run({2: lambda: shutil.rmtree(folder)}, run_dir=str(folder), **more)
    said = f"warning: cannot write {folder}/metrics.jsonl: it has been removed; training continues, and records are"
    assert [line for line in lines if line.startswith(said)]
    assert f"{folder}/metrics.jsonl is written again; 1 records are missing in it" in lines
    assert steps(folder) == [4, 5, 6, 7, 8]
    assert [step for step, _ in scalars(tmp_path / "board")["lm loss"]] == list(range(1, 9))
    assert reported(folder)["status"] == "finished"
    assert (tmp_path / "saved" / "step-0000008").is_dir()


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limit the size of this process's files: a longer write is cut off, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the signal of that limit ends the process")
@pytest.mark.parametrize("kind", ["metrics.jsonl", "metrics.csv", "tensorboard"])
def test_partially_written_record_is_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    sink: Any
    if kind == "tensorboard":
        sink = TensorBoard(path)
    else:
        sink = {"metrics.jsonl": JsonLines, "metrics.csv": CSVFile}[kind](path, step=0)
    lines: list[str] = []
    patient = BestEffort(sink, kind, lines.append)
    patient.write(record(1))
    file = next(path.iterdir()) if path.is_dir() else path
    before = file.read_bytes()
    with largest_file(len(before) + 10):
        patient.write(record(2))
        patient.write(record(3))
        assert file.read_bytes() == before
    patient.write(record(4))
    patient.close()
    assert [line.partition(";")[0] for line in lines] == [
        f"warning: cannot write {kind}: File too large",
        f"{kind} is written again",
    ]
    assert "2 records are missing" in lines[1]
    if kind == "tensorboard":
        assert [step for step, _ in scalars(path)["lm loss"]] == [1, 4]
    else:
        assert file.read_bytes().startswith(before) and file.read_bytes().count(b"\n") == before.count(b"\n") + 1


def test_failed_sink_is_not_used_before_the_next_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_RETRY_SECONDS", 3600.0)
    asked, lines = [], list[str]()

    class Full:
        def write(self, record: dict[str, Any]) -> None:
            asked.append(record["step"])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def close(self) -> None:
            pass

    sink = BestEffort(Full(), "it", lines.append)
    for step in range(1, 5):
        sink.write(record(step))
    sink.close()
    assert asked == [1] and len(lines) == 2
    assert lines[1] == "warning: the last 4 records are missing in it"


def test_removed_file_is_recreated_with_its_header(tmp_path: Path) -> None:
    file = AppendedFile(tmp_path / "a" / "b", head=b"head ")
    file.append(b"1 ")
    shutil.rmtree(tmp_path / "a")
    with pytest.raises(FileNotFoundError, match="removed"):
        file.append(b"2 ")
    file.append(b"3 ")
    file.append(b"4 ")
    assert (tmp_path / "a" / "b").read_bytes() == b"head 3 4 "
    file.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the signal of that limit ends the process")
def test_ending_is_truncated_to_its_reserved_space(tmp_path: Path) -> None:
    reserve_ending(tmp_path)
    (reserved,) = tmp_path.iterdir()
    before = reserved.stat().st_ino
    with largest_file(reserved.stat().st_size):
        write_ending(tmp_path, Ending(status="failed", reason='"é' * 20000, step=1, exit_code=1))
    found = reported(tmp_path)
    assert found["reason"].endswith("... (the log has all of it)") and len(found["reason"]) > 1000
    assert [path.stat().st_ino for path in tmp_path.iterdir()] == [before]
