"""`exit.json` says how a run ended, whoever ended it."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.config.describe import replace
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.training.non_finite import NonFiniteError
from megalite.training.save_folder import RestartLoopError
from megalite.training.saving import SaveError
from megalite.training.stopping import FILE_NAME, Ending, StopRequest, StopRequests, StopRun, write_ending
from megalite.training.trainer import Trainer


def told(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / FILE_NAME).read_text())
    assert set(found) == {"status", "reason", "step", "exit_code"}
    return found


@pytest.mark.parametrize(
    ("number", "status", "code", "cause"),
    [
        (100 + signal.SIGTERM, "requeue", 75, "SIGTERM"),
        (100 + signal.SIGUSR1, "requeue", 75, "SIGUSR1"),
        (100 + signal.SIGINT, "interrupted", 130, "SIGINT"),
        (1, "stopped", 0, "the exit file is there"),
        (2, "requeue", 75, "exit_duration_in_mins is over"),
    ],
)
def test_requests(tmp_path: Path, number: int, status: str, code: int, cause: str) -> None:
    write_ending(tmp_path, StopRequest(number).ending(7, "saved in s"))
    found = {"status": status, "reason": f"{cause}; saved in s", "step": 7, "exit_code": code}
    assert told(tmp_path) == found


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (ConfigError("no"), 2, "no"),
        (CheckpointError("no"), 2, "no"),
        (NonFiniteError("nan"), 3, "nan"),
        (SaveError("full"), 4, "full"),
        (RestartLoopError("again"), 5, "again"),
        (RuntimeError("gone"), 1, "RuntimeError: gone"),
    ],
)
def test_errors(tmp_path: Path, error: Exception, code: int, reason: str) -> None:
    def fails() -> Ending:
        assert not (tmp_path / FILE_NAME).exists(), "the last run's end is no end of this one"
        raise error

    write_ending(tmp_path, Ending.finished(1))
    with pytest.raises(type(error)):
        end(fails, tmp_path, StopRequests(), step=5, moved=True)
    assert told(tmp_path) == {"status": "failed", "reason": reason, "step": 5, "exit_code": code}


def end(run: Any, folder: Path, stops: StopRequests, *, step: int | None = None, moved: bool = False) -> Ending:
    """A run whose setup is `run`: what it raises is how it ends."""
    trainer = Trainer(replace(RunConfig(), run_dir=str(folder)), log=lambda line: None, stops=stops)
    trainer._step_reached, trainer._moved = step, moved
    trainer._build = lambda stack: run()  # type: ignore[method-assign]
    return trainer.fit()


def test_a_stop_before_the_first_step(tmp_path: Path) -> None:
    def stopped() -> Ending:
        raise StopRun(StopRequest(100 + signal.SIGTERM))

    assert end(stopped, tmp_path, StopRequests(), step=4).exit_code == 75
    assert told(tmp_path)["step"] == 4


def test_a_collective_that_breaks_as_peers_leave_is_a_stop_until_the_first_step(tmp_path: Path) -> None:
    def broken() -> Ending:
        raise RuntimeError("Connection closed by peer")

    asked = StopRequests(minutes=-1.0)
    assert end(broken, tmp_path, asked).status == "requeue"
    with pytest.raises(RuntimeError):
        end(broken, tmp_path, asked, step=1, moved=True)
    with pytest.raises(RuntimeError):
        end(broken, tmp_path, StopRequests())


def test_nobody_is_told_where_there_is_no_folder(tmp_path: Path) -> None:
    write_ending(tmp_path / "nothing", Ending.finished(1))
    write_ending(None, Ending.finished(1))
    assert list(tmp_path.iterdir()) == []
