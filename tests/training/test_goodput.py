"""The account of a run's time over kills and restarts."""

import os
from pathlib import Path
from typing import Any

import pytest

from megalite.training import records
from megalite.training.records import FINISHED, STOPPED, Goodput, JsonLines, SessionLog, goodput_of, read_sessions


class Clock:
    """Time of day, advanced by the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, now: float = 1000.0) -> None:
        self.now = now
        monkeypatch.setattr(records.time, "time", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def start(folder: Path, clock: Clock, *, step: int = 0, resumes: bool = True) -> SessionLog:
    return SessionLog(folder, started=clock.now, step=step, resumes=resumes, ranks=2, layout="dp 2", log=print)


def make_steps(account: SessionLog, clock: Clock, steps: range, seconds: float) -> None:
    """Make steps as a run does: metrics.jsonl drops the repeated ones only after the account was opened."""
    assert account._folder is not None
    sink = JsonLines(account._folder / "metrics.jsonl", step=steps.start - 1)
    account.ready()
    for step in steps:
        clock.now += seconds
        sink.write({"kind": "train", "step": step, "consumed_samples": step, "ms_per_step": 1e3 * seconds})
        account.step(step, seconds)
    sink.close()


def test_goodput_of_one_session(tmp_path: Path, clock: Clock) -> None:
    account = start(tmp_path, clock)
    clock.now += 5.0
    account.spend("evaluation", 1.0)  # before the first step
    make_steps(account, clock, range(1, 11), 0.5)
    account.spend("save", 2.0)
    clock.now += 3.0
    found = account.close(FINISHED)
    assert (found.startup, found.steps, found.evaluation, found.save) == (4.0, 5.0, 1.0, 2.0)
    assert (found.wall, found.other, found.starts) == (13.0, 1.0, 1)
    assert found.fraction == pytest.approx(5 / 13)
    assert found.in_words() == (
        "goodput 38.5%: 5.0 s of steps in 13.0 s since the first start; start-up 4.0 s, evaluation 1.0 s, saving 2.0 s, "
        "other 1.0 s"
    )
    (session,) = read_sessions(tmp_path)
    assert (session.ended, session.pid, session.last_step, session.layout) == (FINISHED, os.getpid(), 10, "dp 2")


def test_goodput_after_a_killed_session(tmp_path: Path, clock: Clock) -> None:
    """A run killed at step 10, long after its last write; its last checkpoint is of step 6."""
    account = start(tmp_path, clock)
    clock.now += 2.0
    make_steps(account, clock, range(1, 4), 1.0)
    account.note()
    make_steps(account, clock, range(4, 11), 1.0)
    os.utime(tmp_path / "metrics.jsonl", (clock.now, clock.now))
    clock.now += 30.0
    account = start(tmp_path, clock, step=6)
    clock.now += 3.0
    make_steps(account, clock, range(7, 21), 1.0)
    found = account.close(FINISHED)
    assert (found.steps, found.lost, found.lost_steps) == (20.0, 4.0, 4)
    assert (found.startup, found.gaps, found.wall) == (5.0, 30.0, 59.0)
    assert found.other == pytest.approx(0.0)
    assert "4 steps made again 4.0 s, between 2 starts 30.0 s" in found.in_words()


def test_older_checkpoint_loses_steps_of_several_sessions(tmp_path: Path, clock: Clock) -> None:
    for step in (0, 4, 2):
        account = start(tmp_path, clock, step=step)
        make_steps(account, clock, range(step + 1, step + 5), 1.0)
        account.close(STOPPED)
    found = goodput_of(read_sessions(tmp_path))
    assert (found.steps, found.lost_steps) == (6.0, 6)
    assert found.fraction == pytest.approx(0.5)


def test_time_after_the_end_does_not_count(tmp_path: Path, clock: Clock) -> None:
    for first, ended in ((0, FINISHED), (5, STOPPED), (10, FINISHED)):
        account = start(tmp_path, clock, step=first)
        make_steps(account, clock, range(first + 1, first + 6), 1.0)
        account.close(ended)
        clock.now += 100.0
    found = goodput_of(read_sessions(tmp_path))
    assert (found.gaps, found.wall) == (100.0, 115.0), "only before the end of the run"


def test_session_without_steps_is_discarded(tmp_path: Path, clock: Clock) -> None:
    account = start(tmp_path, clock)
    make_steps(account, clock, range(1, 6), 1.0)
    before = account.close(FINISHED)
    clock.now += 100.0
    account = start(tmp_path, clock, step=5)
    assert len(read_sessions(tmp_path)) == 2  # it may be killed while it searches
    assert account.close(FINISHED) == before
    assert len(read_sessions(tmp_path)) == 1


def test_new_run_in_the_folder_starts_a_new_account(tmp_path: Path, clock: Clock) -> None:
    account = start(tmp_path, clock)
    make_steps(account, clock, range(1, 6), 1.0)
    clock.now += 100.0
    account = start(tmp_path, clock, resumes=False)
    assert account.note().wall == 0.0 and len(read_sessions(tmp_path)) == 1


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"sessions": [{}]}', '{"sessions": 3}', "\0\xff"])
def test_damaged_account_is_ignored(tmp_path: Path, clock: Clock, text: str) -> None:
    (tmp_path / "sessions.json").write_text(text)
    assert read_sessions(tmp_path) == []
    start(tmp_path, clock).close(STOPPED)
    assert len(read_sessions(tmp_path)) == 1


def test_account_is_written_at_intervals(tmp_path: Path, clock: Clock) -> None:
    account, seen = start(tmp_path, clock), []
    for _ in range(4):
        clock.now += 2.0
        account.note()
        seen.append(read_sessions(tmp_path)[0].seen - 1000.0)
    assert seen == [0.0, 0.0, 6.0, 6.0]


def test_full_disk_does_not_stop_training(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    account = SessionLog(tmp_path, started=clock.now, step=0, resumes=True, ranks=1, layout="", log=lines.append)

    def full(self: Path, *arguments: Any, **named: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    for _ in range(2):
        clock.now += 60.0
        account.step(1, 1.0)
        assert isinstance(account.note(), Goodput)
    assert lines == [
        "warning: cannot write sessions.json: No space left on device; goodput will not count the missing time"
    ]
