"""The folder of a run."""

import fcntl
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.doctor import host
from megalite.doctor.host import Finding


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few bytes and syncs."""
    monkeypatch.setattr(host, "BYTES", 2 << 20)
    monkeypatch.setattr(host, "SYNCS", 3)


def looked_at(folder: Path, **options: object) -> dict[str, Finding]:
    return {finding.name: finding for finding in host.examine_disk(folder, **options)}  # type: ignore[arg-type]


def test_a_good_folder(tmp_path: Path) -> None:
    rows = looked_at(tmp_path)
    assert {name: row.level for name, row in rows.items()} == dict.fromkeys(
        ("folder", "locks", "writing", "fsync"), "ok"
    )
    assert rows["writing"].data["bytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    row = looked_at(tmp_path / "runs" / "first")["folder"]
    assert row.level == "ok" and f"(of {tmp_path}: " in row.text
    assert list(tmp_path.iterdir()) == []


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    rows = looked_at(tmp_path / "file" / "runs")
    assert (rows["folder"].level, rows["folder"].text) == ("error", f"{tmp_path / 'file'} is a file")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**where: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.mkstemp", refuse)
    rows = looked_at(tmp_path)
    assert rows["folder"].text == f"cannot write to {tmp_path}: Read-only file system"
    assert rows["folder"].level == "error" and len(rows) == 1


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, block: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(host, "write_all", full)
    before = len(list(Path("/proc/self/fd").iterdir()))
    findings = list(host.examine_disk(tmp_path))
    assert findings[-1].level == "error" and "No space left" in findings[-1].text
    assert list(tmp_path.iterdir()) == [] and len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_slow_disk(tmp_path: Path) -> None:
    clock = itertools.count(0.0, 0.3)
    rows = looked_at(tmp_path, clock=lambda: next(clock))
    assert rows["fsync"].level == "warning" and rows["fsync"].text.startswith("300.0 ms")


def test_little_room_and_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=1 << 20))
    rows = looked_at(tmp_path)
    assert (rows["folder"].level, rows["locks"].level) == ("warning", "warning")
    assert "1.00 MiB free of 1.00 TiB" in rows["folder"].text
