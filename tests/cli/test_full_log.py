"""A log that cannot be written, such as stdout in a file on a full disk, ends no run and spoils no exit status."""

import io
import os
import sys
from pathlib import Path

import pytest

from megalite.cli.failures import guarded
from megalite.cli.train import _Log


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_under_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    path = tmp_path / "log"
    path.touch()
    full = os.open("/dev/full", os.O_WRONLY)
    with path.open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        line = _Log()

        with guarded("megalite train", [], lasting=True) as end:
            line("before")
            kept = os.dup(log.fileno())
            os.dup2(full, log.fileno())
            line("1")
            line("2")
            os.dup2(kept, log.fileno())
            line("after")
            os.dup2(full, log.fileno())
            line("3")
            os.close(kept)
            end.status = 75
        assert end.status == 75
    os.close(full)
    lines = path.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == ("the log is written again; up to 2 lines before this one are missing")
    assert "after" in lines
    assert (
        said.getvalue().splitlines()
        == ["warning: cannot write the log: No space left on device; training continues"] * 2
    )
