"""Test how commands end: one line for a mistake or a bug, and a traceback only with --debug."""

import errno
import importlib
import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.cli.main import COMMANDS, main
from megalite.cli.output import BAD_INPUT, BUG, DEBUG_VARIABLE, INTERRUPTED, UNDER_TORCHRUN, Stopped, show
from megalite.cli.output import guarded as guarding
from megalite.cli.train import RunLog
from megalite.config.errors import ConfigError, RankError
from megalite.training.step import Stepper

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "TORCHELASTIC_RUN_ID", DEBUG_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def raising(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


def guarded(run: Callable[[], int | None], program: str, *, long_running: bool = False) -> int | None:
    """Return the exit status of a call inside `guarded`."""
    with guarding(program, [], long_running=long_running) as end:
        end.status = run() or 0
    return end.status


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's error."""


class DistError(RuntimeError):
    """Has the name of torch's error."""


MISTAKES = [
    (ConfigError("tp 3 does not divide"), "tp 3 does not divide"),
    (ConfigError("a name\x1b[2J"), "a name\\x1b[2J"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "a/b"), "a/b: No such file or directory; check the path"),
    (PermissionError(errno.EACCES, "Permission denied", "a"), "a: Permission denied; give a path that you may read and write"),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "a"), "a: Is a directory; give a file, not a folder"),
    (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; make room, or give another folder"),
    (OSError(errno.EXDEV, "Invalid cross-device link", "a", None, "b"), "a and b: Invalid cross-device link"),
    (OSError("something"), "something"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "x was given text that is not UTF-8 ('utf-8' codec"),
    (MemoryError(), "x ran out of memory; give it less to do"),
    (OutOfMemoryError("CUDA out of memory. Tried\nmore"), "x ran out of memory: CUDA out of memory. Tried; give it less"),
    (ModuleNotFoundError("No module named 'torch'", name="torch"), "x needs the package torch, which is not installed"),
    (DistError("no\nmore"), "x lost the other ranks: no; "),
    (RuntimeError("[gloo/pair.cc:553] Connection closed by peer [::1]:1"), "x lost the other ranks: [gloo/pair.cc"),
]  # fmt: skip


@pytest.mark.parametrize("error, says", MISTAKES, ids=lambda value: type(value).__name__)
def test_mistake_is_one_line(error: Exception, says: str, capsys: Captured) -> None:
    assert guarded(raising(error), "x") == BAD_INPUT
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {says}") and said.err.count("\n") == 1


def test_notes_of_an_error_are_printed(capsys: Captured) -> None:
    error = ConfigError("full")
    error.add_note("20 documents are kept")
    guarded(raising(error), "x")
    assert capsys.readouterr().err == "error: full; 20 documents are kept\n"


def bug() -> int:
    return importlib.import_module("megalite.config.numbers").parse_byte_size(None)


def test_bug_is_one_line_with_its_location(capsys: Captured) -> None:
    assert guarded(bug, "megalite plan") == BUG
    said = capsys.readouterr().err
    assert said.startswith("error: megalite plan has a bug: TypeError: expected string")
    assert "in megalite/config/numbers.py:" in said and "(parse_byte_size)" in said
    assert "run it again with --debug" in said and said.count("\n") == 1
    assert guarded(raising(ModuleNotFoundError("megalite.x", name="megalite.x")), "x") == BUG


def test_long_running_command_raises_bugs(capsys: Captured) -> None:
    with pytest.raises(TypeError):
        guarded(bug, "x", long_running=True)
    with pytest.raises(OSError, match="Input/output error"):
        guarded(raising(OSError(errno.EIO, "Input/output error", "b")), "x", long_running=True)
    assert guarded(raising(ConfigError("a")), "x", long_running=True) == BAD_INPUT
    assert guarded(raising(KeyboardInterrupt()), "x", long_running=True) == INTERRUPTED
    assert capsys.readouterr().err == "error: a\ninterrupted\n"
    error = IsADirectoryError(errno.EISDIR, "Is a directory", "b")
    assert guarded(raising(error), "x", long_running=True) == BAD_INPUT
    assert capsys.readouterr().err == "error: b: Is a directory; give a file, not a folder\n"


def test_debug_prints_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    seen = []

    def run(argv: list[str]) -> int | None:
        with guarding("x", argv) as end:
            seen.append(end.words)
            raise ConfigError("mistake")
        return end.status

    assert run(["--a", "--debug", "b"]) == run(["c"]) == BAD_INPUT
    first, second = capsys.readouterr().err.split("Traceback (most recent call last):\n")
    assert first == "error: mistake\n" and second.endswith("ConfigError: mistake\nerror: mistake\n")
    assert seen == [["--a", "b"], ["c"]] and DEBUG_VARIABLE not in os.environ
    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv(DEBUG_VARIABLE, value)
        run([])
        assert ("Traceback" in capsys.readouterr().err) == shown
    run(["--debug"])
    assert os.environ[DEBUG_VARIABLE] == "", "as it was"


def test_other_exit_statuses(capsys: Captured) -> None:
    assert guarded(lambda: None, "x") == 0
    assert guarded(lambda: 3, "x") == 3
    assert guarded(raising(SystemExit(0)), "x") == guarded(raising(SystemExit()), "x") == 0
    assert guarded(raising(SystemExit(4)), "x") == 4
    assert guarded(raising(SystemExit("no")), "x") == BAD_INPUT
    assert capsys.readouterr().err == ""
    assert guarded(raising(KeyboardInterrupt()), "x") == 130
    assert guarded(raising(Stopped(signal.SIGTERM)), "x") == 143
    assert capsys.readouterr().err == "interrupted\nterminated\n"


def test_common_error_of_ranks_is_printed_once(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setenv("RANK", "1")
    for error, reports in ((ConfigError("all"), 0), (RankError("mine"), 1), (OSError("disk"), 1), (KeyError("k"), 1)):
        guarded(raising(error), "x")
        assert capsys.readouterr().err.count("error: ") == reports, error
    guarded(raising(KeyboardInterrupt()), "x")
    assert capsys.readouterr().err == "" and waited == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert guarded(raising(ConfigError("all")), "x") == BAD_INPUT
    assert waited == [5.0], "rank 0 must end first"
    monkeypatch.setenv("RANK", "0")
    guarded(raising(ConfigError("all")), "x")
    assert capsys.readouterr().err == "error: all\n" and waited == [5.0]
    monkeypatch.setenv("RANK", "many")
    guarded(raising(ConfigError("RANK is no number")), "x")
    assert capsys.readouterr().err == "error: RANK is no number\n"


def closed_pipe() -> int:
    """A pipe without a reader."""
    reading, writing = os.pipe()
    os.close(reading)
    return writing


@pytest.mark.parametrize("write", [lambda text: print(text), show], ids=["print", "show"])
def test_closed_stdout_pipe_is_not_an_error(
    write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for text in ("short", "long" * (1 << 16)):
        with os.fdopen(closed_pipe(), "w") as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert guarded(lambda text=text: write(text), "x") == 0  # type: ignore[misc]
    assert capsys.readouterr().err == ""


def test_other_broken_pipe_is_an_error(capsys: Captured) -> None:
    assert guarded(raising(BrokenPipeError(errno.EPIPE, "Broken pipe")), "x") == BAD_INPUT
    assert capsys.readouterr().err == "error: Broken pipe\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("write", [lambda text: print(text), show], ids=["print", "show"])
def test_unwritable_output_is_an_error(
    write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    with Path("/dev/full").open("w", buffering=1) as out, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert guarded(lambda: write("answer"), "x") == BAD_INPUT
    assert "No space left on device; make room" in capsys.readouterr().err


def test_name_that_is_not_utf8_is_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for encoding in ("utf-8", "ascii"):
        path = tmp_path / encoding
        with path.open("w", encoding=encoding) as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert guarded(lambda: show("a\udcffb · c"), "x") == 0
        assert path.read_bytes().startswith(b"a\\udcffb ")


def test_closed_streams_are_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert guarded(lambda: None, "x") == 0
    assert guarded(raising(ConfigError("a")), "x") == BAD_INPUT


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_guarded(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """tools/ and `python -m` call a command's own main."""
    assert COMMANDS[name](["--no-such-flag", "--debug"]) == BAD_INPUT
    assert DEBUG_VARIABLE not in os.environ and "error: " in capsys.readouterr().err


def test_torchrun_gets_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """torchrun's report then ends with the error instead of a hint about tracebacks."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    assert main(["train", "--tp", "x", "--lr", "y"]) == BAD_INPUT
    failure = ProcessFailure(0, 1, BAD_INPUT, str(file))
    said = failure.message["extraInfo"]["py_callstack"]  # type: ignore[index]
    assert said == capsys.readouterr().err.rstrip("\n") and "- --lr: lr takes a number" in said
    assert failure.timestamp > 0
    monkeypatch.setenv("RANK", "1")
    file.unlink()
    assert main(["train", "--tp", "x"]) == BAD_INPUT
    assert not file.exists(), "one rank has reported it"


def test_torchrun_gets_unexpected_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/e2e/test_kill` runs torchrun itself."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setenv(UNDER_TORCHRUN, "1")
    monkeypatch.setattr(Stepper, "step", lambda *_, **__: raising(KeyError("boom on purpose"))())
    model = "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 64 --mock-data"
    with pytest.raises(KeyError, match="boom on purpose"):
        main(["train", *model.split(), "--train-iters", "1", "--device", "cpu"])
    assert "boom on purpose" in file.read_text()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_full_disk_under_the_log_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The full disk neither ends a run nor changes the exit status."""
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    path = tmp_path / "log"
    path.touch()
    full = os.open("/dev/full", os.O_WRONLY)
    with path.open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        line = RunLog()

        with guarding("megalite train", [], long_running=True) as end:
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
    day, *stamped = path.read_text().splitlines()
    time.strptime(day, "%Y-%m-%d %Z")
    assert all(time.strptime(line[:9], "%H:%M:%S ") for line in stamped)
    lines = [line[9:] for line in stamped]
    assert lines[0] == "before" and lines[-1] == ("the log is written again; up to 2 lines before this one are missing")
    assert "after" in lines
    assert (
        said.getvalue().splitlines()
        == ["warning: cannot write the log: No space left on device; training continues"] * 2
    )
