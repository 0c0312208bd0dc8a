"""The watch process of a run: one per host, gone when the run ends."""

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.config.errors import ConfigError, RankError
from megalite.config.parallel import ParallelConfig
from megalite.topology.group import Group
from megalite.topology.topology import Launch
from megalite.training import hang_watch
from megalite.training.hang_watch import HangWatch, begin_watch
from megalite.watchdog.heartbeat import UNWATCHED
from megalite.watchdog.processes import supported
from tests.support.ranks import RankContext, run_ranks

pytestmark = pytest.mark.skipif(not supported(), reason="the watch needs Linux")

CPU = torch.device("cpu")


def begin(
    world: Group | None = None,
    *,
    minutes: float | None = None,
    local_rank: int = 0,
    said: list[str] | None = None,
    warned: list[str] | None = None,
) -> HangWatch:
    world = world or Group.solo("world")
    launch = Launch(rank=world.rank, world_size=world.size, local_rank=local_rank)
    return begin_watch(
        ParallelConfig(hang_timeout_minutes=minutes),
        launch=launch,
        world=world,
        run_dir=None,
        log=(said if said is not None else []).append,
        say=(warned if warned is not None else []).append,
    )


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("agreed", [True, False])
def test_watch_removes_its_files_and_process(private: Path, agreed: bool) -> None:
    watch = begin()
    assert watch._watcher is not None and watch._watcher.process is not None
    (folder,) = private.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in folder.iterdir()} == {"rank-0.beat", "rank-0.stacks"}
    watch.close(agreed=agreed)
    assert watch._watcher.process.returncode == 0 and list(private.iterdir()) == []


def test_no_watch_with_timeout_zero(private: Path) -> None:
    watch = begin(minutes=0)
    assert watch.heartbeat is UNWATCHED and list(private.iterdir()) == []
    watch.close(agreed=True)


@pytest.mark.parametrize(
    ("settings", "hang", "save"),
    [
        ({}, 8.0, 9.0),
        ({"distributed_timeout_minutes": 1.0}, 0.8, 0.9),
        ({"distributed_timeout_minutes": 60.0}, 48.0, 54.0),
        ({"hang_timeout_minutes": 1.0}, 1.0, 6.0),
        ({"hang_timeout_minutes": 9.5}, 9.5, 9.5),
        ({"hang_save_timeout_minutes": 8.5}, 8.0, 8.5),
    ],
)
def test_hang_timeouts_are_below_the_collective_timeout(settings: dict[str, Any], hang: float, save: float) -> None:
    config = ParallelConfig(**settings)
    assert (config.hang_timeout, config.hang_save_timeout) == pytest.approx((hang, save))


def test_watch_is_refused_outside_linux_if_requested(monkeypatch: pytest.MonkeyPatch, private: Path) -> None:
    monkeypatch.setattr(hang_watch, "supported", lambda: False)
    with pytest.raises(ConfigError, match=r"^hang_timeout_minutes 5 needs Linux and this is "):
        begin(minutes=5)
    assert begin().heartbeat is UNWATCHED


def test_run_without_temporary_folder_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**named: Any) -> str:
        raise OSError(28, "No space left on device", "/tmp/megalite-x")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    said: list[str] = []
    assert begin(said=said).heartbeat is UNWATCHED
    assert said == [
        f"warning: {os.uname().nodename} is not watched, rank 0 cannot write to /tmp/megalite-x: No space left on device"
    ]


def test_unwritable_heartbeat_is_an_error_of_its_rank(monkeypatch: pytest.MonkeyPatch, private: Path) -> None:
    def full(path: Path, *, rank: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hang_watch, "FileHeartbeat", full)
    with pytest.raises(
        RankError, match=r"^rank 0 cannot write its heartbeat to .*: No space left on device; set TMPDIR"
    ):
        begin()
    assert list(private.iterdir()) == []


def test_one_watch_process_per_host(tmp_path: Path) -> None:
    """Two launchers on one host count local ranks from 0."""
    assert run_ranks(2, watched_together, str(tmp_path)) == [True, False]
    assert list(tmp_path.iterdir()) == []


def watched_together(context: RankContext, folder: str) -> bool:
    world = context.topology(dp=2).world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        watch = begin(world)
        world.all_reduce(torch.ones(1))
        (private,) = Path(folder).iterdir()
        beats = {path.name for path in private.glob("*.beat")}
        assert beats == {"rank-0.beat", "rank-1.beat"}
        world.all_reduce(torch.ones(1))
        watch.close(agreed=True)
        world.all_reduce(torch.ones(1))
    return watch._watcher is not None


def test_rank_that_leaves_alone_does_not_wait(tmp_path: Path) -> None:
    run_ranks(2, leave_alone, str(tmp_path))


def leave_alone(context: RankContext, folder: str) -> None:
    world = context.topology(dp=2).world
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        watch = begin(world, local_rank=context.rank)
        world.all_reduce(torch.ones(1))
        if watch._watcher is not None:
            watch.close(agreed=False)
            pid = watch._watcher.process.pid
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # it continues for rank 1
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        else:
            watch.close(agreed=True)


@pytest.mark.parametrize(("number", "what"), [(signal.SIGKILL, "has ended"), (signal.SIGSTOP, "is stopped")])
def test_killed_or_stopped_watch_is_reported_once(
    private: Path, monkeypatch: pytest.MonkeyPatch, number: int, what: str
) -> None:
    monkeypatch.setattr(hang_watch, "_CHECK_SECONDS", 0.05)
    warned: list[str] = []
    watch = begin(warned=warned)
    assert watch._watcher is not None
    os.kill(watch._watcher.process.pid, number)
    watch._watcher._thread.join(30)
    words = f"warning: the process that watches the ranks of this host {what}: {hang_watch._UNNOTICED}"
    assert warned == [words]
    if number == signal.SIGSTOP:
        os.kill(watch._watcher.process.pid, signal.SIGKILL)
    watch.close(agreed=True)
    assert list(private.iterdir()) == []
