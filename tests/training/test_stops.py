"""A run that is stopped at any time is saved at its step, and continues as if it had not stopped."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.folders import candidates
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.config.errors import NO_PROGRESS, ConfigError
from megalite.optimizers.schedules import Progress
from megalite.training.non_finite import NonFiniteError
from megalite.training.save_folder import RestartLoopError
from megalite.training.step import Stepper
from megalite.training.stopping import Ending, StopRequests
from tests.faults.compare import check_state, open_sound
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import TINY, build, tiny_config
from tests.support.trainer import ReplicaTrainer, fit

RUN: dict[str, Any] = {
    "num_layers": 2,
    "precision": "fp32",
    "global_batch_size": 4,
    "train_iters": 4,
    "lr_warmup_iters": 1,
    "hidden_dropout": 0.1,
    "eval_interval": 2,
    "eval_iters": 2,
    "mock_data": True,
    "eod_mask_loss": False,
    "save_interval": 3,
    "async_save": True,
    "log_interval": 1,
}
TERM = 100 + signal.SIGTERM


class StopAtCheck(StopRequests):
    """Receives a request at the `moment`-th check, counted from 1."""

    def __init__(self, moment: int | None) -> None:
        super().__init__()
        self.moment, self.looks = moment, 0

    @property
    def number(self) -> int:
        self.looks += 1
        return TERM if self.looks == self.moment else 0


Lives = tuple[list[tuple[Ending, int]], list[str]]
"""Ending of each start and its number of checks for a request; the log of this rank."""


def run_starts(
    context: RankContext, world: int, settings: dict[str, Any], folder: str, moments: list[int | None], culprit: int
) -> Lives:
    """Run several starts of a run in turn, each stopped at its moment by one rank."""
    saved = f"{folder}/checkpoints"
    changes = {**RUN, **settings, "run_dir": folder, "save": saved, "load": saved, "fresh_if_missing": True}
    config = tiny_config(world, **changes)
    endings, lines = [], list[str]()
    for moment in moments:
        stops = StopAtCheck(moment if context.rank == culprit else None)
        endings.append((ReplicaTrainer(build(context, config), lines.append, stops).fit(), stops.looks))
    return endings, lines


def records(folder: Path, kind: str) -> list[tuple[Any, ...]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row.get("loss", row.get("valid_loss"))) for row in found if row["kind"] == kind]


def steps_in(folder: Path) -> list[int]:
    try:
        return sorted(candidate.step for candidate in candidates(folder / "checkpoints"))
    except CheckpointMissing:
        return []


LOOKS = 10
"""Checks of a run: two batches of the first evaluation; steps 1, 2; two batches; steps 3, 4; two batches. A resumed run
begins with two batches of an evaluation."""
MOMENTS = {
    # check at which each start is stopped, and its step
    "dp2": ({"dp": 2, "dp_strategy": "distributed-optimizer"}, [2, 4, 4, 4, 5], [0, 1, 2, 3, 4]),
    "tp2": ({"tp": 2}, [6, 4], [2, 3]),
    "pp2": ({"pp": 2}, [6, 4], [2, 3]),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_stop_at_every_check_is_exact(name: str, tmp_path: Path) -> None:
    """In an evaluation, between steps, and during a background save: the state is exactly that of its step."""
    layout, moments, steps = MOMENTS[name]
    whole, folder = tmp_path / "whole", tmp_path / "parts"
    ((ending, looks), *_), _ = run_ranks(2, run_starts, 2, layout, str(whole), [None], 0)[0]
    assert (ending, looks) == (Ending.finished(4), LOOKS)
    (endings, _), (others, _) = run_ranks(2, run_starts, 2, layout, str(folder), [*moments, None], 1)
    assert [one for one, _ in endings] == [one for one, _ in others]
    *stopped, (last, _) = endings
    assert [(one.status, one.exit_code, one.step) for one, _ in stopped] == [("requeue", 75, step) for step in steps]
    assert (last.status, last.step) == ("finished", 4)
    assert steps_in(folder) == sorted({*steps, 3, 4} - {0})
    assert records(folder, "train") == records(whole, "train")
    # A resumed start evaluates, the uninterrupted run does not.
    assert set(records(folder, "valid")) >= set(records(whole, "valid"))
    ours, theirs = (open_sound(path / "checkpoints", 4) for path in (folder, whole))
    assert check_state(ours, theirs, 0.0) > 20
    assert not (folder / "checkpoints" / "attempts.json").exists()


def test_stop_without_save_folder_is_reported(tmp_path: Path) -> None:
    settings = {"dp": 2, "save_interval": None, "async_save": False}
    found = run_ranks(2, without_folder, settings)
    ending, lines = found[0]
    assert ending.exit_code == 75 and ending.step == 1
    assert ending.reason == "SIGTERM; nothing is saved, since neither --save nor --save-interval was given"
    assert f"SIGTERM: stopped at step 1; {ending.reason.partition('; ')[2]}" in lines


def without_folder(context: RankContext, settings: dict[str, Any]) -> tuple[Ending, list[str]]:
    lines: list[str] = []
    config = tiny_config(2, **{**RUN, **settings})
    stops = StopAtCheck(4 if context.rank else None)
    return ReplicaTrainer(build(context, config), lines.append, stops).fit(), lines


APART: dict[str, Any] = {"dp": 2, "dp_strategy": "async-parameter-server", "max_staleness": 1, "hidden_dropout": 0.0}


def test_independent_ranks_stop_at_their_next_meeting(tmp_path: Path) -> None:
    """They check only in evaluations and at saves."""
    whole = run_ranks(2, run_starts, 2, {**APART, "save_interval": 1}, str(tmp_path / "whole"), [None], 0)
    looks = [life[0][0][1] for life in whole]
    assert looks == [9, 9], "three evaluations of two batches, and the saves of steps 1, 2 and 3"
    for moment, step in ((4, 2), (7, 3)):
        folder = tmp_path / str(moment)
        found = run_ranks(2, run_starts, 2, {**APART, "save_interval": 1}, str(folder), [moment], 1)
        for (ending, _), *_ in (life[0] for life in found):
            assert (ending.status, ending.step) == ("requeue", step)
        assert steps_in(folder)[-1] == step


FAILING = {**RUN, "eval_interval": None, "save_interval": 1, "async_save": False, "train_iters": 9}


def test_repeated_failures_of_a_step_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three starts fail in step 3; the fourth is refused with their errors. A higher limit lets it continue."""
    saved = str(tmp_path / "run" / "checkpoints")
    settings = {**TINY, **FAILING, "save": saved, "load": saved, "fresh_if_missing": True}
    step = Stepper.step

    def fails(self: Stepper, *args: Any, before: Progress, **kwargs: Any) -> Any:
        if before.step == 2:
            raise NonFiniteError("step 3: loss nan")
        return step(self, *args, before=before, **kwargs)

    def start(**changes: Any) -> Exception:
        with pytest.raises((NonFiniteError, ConfigError)) as caught:
            fit(**settings, **changes, run_dir=str(tmp_path / "run"))
        return caught.value

    monkeypatch.setattr(Stepper, "step", fails)
    for _ in range(3):
        assert isinstance(start(), NonFiniteError)
    error = start()
    assert isinstance(error, RestartLoopError) and error.exit_code == NO_PROGRESS
    assert str(error).startswith("step 3 has failed in the last 3 starts, and this one would continue from step 2:")
    assert "3. NonFiniteError: step 3: loss nan" in str(error)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["exit_code"] == NO_PROGRESS
    assert isinstance(start(max_failures_at_step=4), NonFiniteError), "other settings"
