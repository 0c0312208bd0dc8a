"""Signals and files by which users and schedulers stop a run: what is saved, the exit status, and exit.json."""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megalite.cli import train
from megalite.data.index_cache import Arrays, Recipe
from tests.e2e.forked import forked, train_forked
from tests.e2e.programs import MODEL, TRAINING, Corpus, finish, ranks_of, reached, start, train_command
from tests.support.patience import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="forks")]

MOCK = ["--mock-data", "--vocab-size", "96", "--device", "cpu", "--save-interval", "1000"]
LONG = [*MODEL, *TRAINING, *MOCK, "--train-iters", "100000"]


def reported(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "exit.json").read_text())
    return found


def newest(run_dir: Path) -> int:
    return int((run_dir / "checkpoints" / "latest").read_text().split("-")[-1])


def ranks(
    count: int, folder: Path, words: list[str | Path], before: Callable[[], None] | None = None
) -> AbstractContextManager[list[BaseProcess]]:
    folder.mkdir(exist_ok=True)
    return forked(count, [*words, "--run-dir", folder], folder, before=before)


def until(condition: Callable[[], bool], processes: list[BaseProcess]) -> None:
    wait_until(condition, running=lambda: all(process.is_alive() for process in processes))


def send(process: BaseProcess, number: int) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


def ends(processes: list[BaseProcess], seconds: float = 20.0) -> list[int | None]:
    for process in processes:
        process.join(seconds)
    return [process.exitcode for process in processes]


def test_torchrun_forwards_a_signal(folder: Path) -> None:
    """The job ends within seconds, whatever status torchrun returns, and the same command resumes."""
    resume = ("--load", folder / "checkpoints", "--fresh-if-missing")
    command = [*LONG, "--tp", "2", "--run-dir", folder, *resume]
    process = start(train_command(2, *command))
    try:
        wait_until(lambda: reached(folder, 2), running=lambda: process.poll() is None)
        workers = ranks_of(process)
    except BaseException:
        process.terminate()
        raise
    process.send_signal(signal.SIGTERM)
    outcome = finish(process, seconds=40)
    assert outcome.status in (1, -signal.SIGABRT), "torchrun sometimes aborts while it ends its workers"
    end = reported(folder)
    assert (end["status"], end["exit_code"]) == ("requeue", 75)
    assert end["reason"] == f"SIGTERM; saved in {folder}/checkpoints"
    assert end["step"] == newest(folder) >= 2
    assert f"SIGTERM: stopped at step {end['step']}; saved in" in outcome.out
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())

    again = [*command[: command.index("100000")], str(end["step"] + 2), *command[command.index("100000") + 1 :]]
    out = train_forked(2, *again).require_success().out
    assert f"step-{end['step']:07} (written by" in out
    assert reported(folder) == {
        "status": "finished",
        "reason": "the last step is made",
        "step": end["step"] + 2,
        "exit_code": 0,
    }


def stop_during_import_of_torch() -> None:
    @contextmanager
    def importing() -> Iterator[None]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield

    train._recorded = importing


def test_signal_before_the_trainer_exists(folder: Path) -> None:
    with ranks(2, folder, [*LONG, "--dp", "2"], before=stop_during_import_of_torch) as processes:
        assert ends(processes) == [75, 75]
    assert reported(folder)["reason"] == "SIGTERM; before the start" and not (folder / "0.err").read_text()


def test_exit_file_stops_the_run(folder: Path) -> None:
    with ranks(1, folder, LONG) as processes:
        until(lambda: reached(folder, 2), processes)
        (folder / "STOP").touch()
        assert ends(processes) == [0]
    end = reported(folder)
    assert end["status"] == "stopped" and end["step"] == newest(folder)
    refused = train_forked(1, *LONG, "--run-dir", folder, "--load", folder / "checkpoints")
    assert refused.status == 2
    assert re.fullmatch(r"error: \S*/STOP exists already, which stops the run: remove it .*\n", refused.err)


def test_time_limit_stops_the_run(folder: Path) -> None:
    limit = ("--exit-duration-in-mins", "0.02", "--run-dir", folder)
    assert train_forked(2, *LONG, "--tp", "2", *limit).status == 75
    end = reported(folder)
    assert end["reason"].startswith("exit_duration_in_mins is over; ")


@dataclass(frozen=True)
class Slow:
    """Make building any index take forever in this process; the marker file shows that building has begun."""

    marker: str

    def __call__(self) -> None:
        def make(recipe: Recipe) -> Arrays:
            Path(self.marker).touch()
            while True:
                time.sleep(0.01)

        Recipe.nbytes = property(lambda recipe: 1 << 26)  # type: ignore[assignment, method-assign]
        Recipe.make = make  # type: ignore[method-assign]


def test_signal_while_an_index_is_built(corpus: Corpus, folder: Path, tmp_path: Path) -> None:
    """One rank builds, the other waits in a collective: both end, and no partial index remains."""
    cache, marker = tmp_path / "cache", tmp_path / "builds"
    flags = [*MODEL, *TRAINING, "--train-iters", "10", *corpus.flags, "--data-cache-path", cache]
    words = [*flags, "--dp", "2", "--device", "cpu"]
    with ranks(2, folder, words, Slow(str(marker))) as processes:
        until(marker.exists, processes)
        assert len(list(cache.iterdir())) == 1
        for process in processes:
            send(process, signal.SIGTERM)
        assert ends(processes) == [75, 75], (folder / "1.err").read_text()
    assert list(cache.iterdir()) == []
    end = reported(folder)
    assert (end["status"], end["step"]) == ("requeue", 0)
