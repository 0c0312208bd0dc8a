"""Stops: signals and other requests, when ranks exit at once; a stopped run continues as if it had not stopped."""

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import megalite.training.stopping as stopping
from megalite.config.describe import replace
from megalite.config.errors import NO_PROGRESS, CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.training.non_finite import NonFiniteError
from megalite.training.save_folder import RestartLoopError
from megalite.training.saving import SaveError
from megalite.training.step import Stepper
from megalite.training.stopping import FILE_NAME, Ending, StopRequest, StopRequests, StopRun, write_ending
from megalite.training.trainer import Trainer
from tests.e2e.programs import records
from tests.faults.compare import check_state, open_sound, steps_in
from tests.support.fork_server import fork_server
from tests.support.patience import is_gone, wait_until
from tests.support.ranks import RankContext, run_ranks
from tests.support.tiny import TINY, build, tiny_config, words
from tests.support.trainer import ReplicaTrainer, fit


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_waits_for_the_agreement_of_ranks(number: signal.Signals) -> None:
    stops = StopRequests(signals=["SIGTERM", "SIGUSR1"])
    before = signal.getsignal(number)
    with stops.listen():
        stops.started()
        assert (stops.number, stops.request) == (0, None)
        send(number)
        send(number)
        assert stops.request == StopRequest(100 + number)
        assert stops.request.cause == number.name
    assert signal.getsignal(number) is before


def test_signal_before_the_first_step_interrupts_the_setup() -> None:
    stops = StopRequests(signals=["SIGTERM"])
    with stops.listen():
        with pytest.raises(StopRun) as caught:
            send(signal.SIGTERM)
            time.sleep(1.0)
        assert caught.value.request.cause == "SIGTERM"
        send(signal.SIGTERM)  # the process is already leaving
    assert not isinstance(caught.value, Exception), "it must not count as an error"


def test_signal_received_before_started_stops_the_run() -> None:
    stops = StopRequests(signals=["SIGTERM"])
    stops._received[signal.SIGTERM] = time.monotonic()
    with pytest.raises(StopRun):
        stops.started()


def test_ignored_signals_stay_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        stops = StopRequests(signals=["SIGTERM", "SIGUSR1"])
        with stops.listen():
            stops.started()
            send(signal.SIGUSR1)
            assert stops.request is None
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_time_limit_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    stops = StopRequests(minutes=2.0)
    now[0] += 119.0
    assert stops.number == 0
    now[0] += 1.0
    assert stops.request is not None and stops.request.cause == "exit_duration_in_mins is over"


def test_exit_file_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    stops = StopRequests(file=tmp_path / "STOP")
    assert stops.number == 0
    (tmp_path / "STOP").touch()
    assert stops.number == 0, "it is not checked at every step"
    now[0] += 1.0
    assert stops.request == StopRequest(1)
    (tmp_path / "STOP").unlink()
    assert stops.request == StopRequest(1), "once seen it is kept"
    (tmp_path / "STOP").touch()
    with pytest.raises(ConfigError, match=r"STOP exists already.*remove it to train, or give another --exit-file"):
        StopRequests(file=tmp_path / "STOP").refuse_old_file()


# ---- processes that block in C code, where no Python handler can run


def hold() -> None:
    lib, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)


def held(note: str, patience: float) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore it
    stops = StopRequests(signals=["SIGTERM"], patience=patience)
    stops.before_forced_exit = lambda request, text: Path(note).write_text(f"{request.cause}: {text}")
    with stops.listen():
        stops.started()
        Path(f"{note}.ready").touch()
        hold()


def status_of(tmp_path: Path, act: Callable[[int], None], patience: float = 60.0) -> tuple[int | None, str]:
    """Return exit status and last words of a blocked process after an action."""
    note = tmp_path / "note"
    process = fork_server().Process(target=held, args=(str(note), patience))
    process.start()
    try:
        wait_until(Path(f"{note}.ready").exists, seconds=30.0)
        assert process.pid is not None
        act(process.pid)
        process.join(20.0)
        return process.exitcode, note.read_text() if note.exists() else ""
    finally:
        process.kill()
        process.join()


def ended(process: int, *, seconds: float) -> bool:
    """Check that it ends within that time; its parent may have reaped it already."""
    end = time.monotonic() + seconds
    while not is_gone(process) and time.monotonic() < end:
        time.sleep(0.05)
    return is_gone(process)


linux = pytest.mark.skipif(sys.platform != "linux", reason="holds a thread in a lock of glibc")


@linux
def test_second_ctrl_c_exits_immediately(tmp_path: Path) -> None:
    def twice(process: int) -> None:
        os.kill(process, signal.SIGINT)
        os.kill(process, signal.SIGINT)  # a launcher repeats the same signal
        time.sleep(0.8)
        assert not is_gone(process), "one press does not count as two"
        # A process that gets no core in the meantime receives several as one: send one more.
        for _ in range(10):
            os.kill(process, signal.SIGINT)
            if ended(process, seconds=2.0):
                return

    status, said = status_of(tmp_path, twice)
    assert (status, said) == (130, "SIGINT: interrupted twice: nothing is saved")


@linux
def test_process_exits_after_its_grace_period(tmp_path: Path) -> None:
    status, said = status_of(tmp_path, lambda process: os.kill(process, signal.SIGTERM), patience=0.3)
    assert status == 75
    assert said.startswith("SIGTERM: SIGTERM came 0.3 s ago and the ranks have not finished their step")


def reported(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / FILE_NAME).read_text())
    assert set(found) == {"status", "reason", "step", "exit_code"}
    return found


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
def test_ending_of_errors(tmp_path: Path, error: Exception, code: int, reason: str) -> None:
    def fails() -> Ending:
        assert not (tmp_path / FILE_NAME).exists(), "the previous run's exit.json must be removed"
        raise error

    write_ending(tmp_path, Ending.finished(1))
    with pytest.raises(type(error)):
        end(fails, tmp_path, StopRequests(), step=5, moved=True)
    assert reported(tmp_path) == {"status": "failed", "reason": reason, "step": 5, "exit_code": code}


def end(run: Any, folder: Path, stops: StopRequests, *, step: int | None = None, moved: bool = False) -> Ending:
    trainer = Trainer(replace(RunConfig(), run_dir=str(folder)), log=lambda line: None, stops=stops)
    trainer._step_reached, trainer._stepped = step, moved
    trainer._build = lambda stack: run()  # type: ignore[method-assign]
    return trainer.fit()


def test_stop_before_the_first_step(tmp_path: Path) -> None:
    def stopped() -> Ending:
        raise StopRun(StopRequest(100 + signal.SIGTERM))

    assert end(stopped, tmp_path, StopRequests(), step=4).exit_code == 75
    assert reported(tmp_path)["step"] == 4


def test_lost_peer_after_a_stop_request_is_a_stop(tmp_path: Path) -> None:
    def broken() -> Ending:
        raise RuntimeError("Connection closed by peer")

    asked = StopRequests(minutes=-1.0)
    assert end(broken, tmp_path, asked).status == "requeue"
    with pytest.raises(RuntimeError):
        end(broken, tmp_path, asked, step=1, moved=True)
    with pytest.raises(RuntimeError):
        end(broken, tmp_path, StopRequests())


RUN: dict[str, Any] = words(
    "num_layers=2 precision=fp32 global_batch_size=4 train_iters=4 lr_warmup_iters=1 hidden_dropout=0.1 "
    "eval_interval=2 eval_iters=2 mock_data eod_mask_loss=false save_interval=3 async_save log_interval=1"
)
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


def losses(folder: Path, kind: str) -> list[tuple[Any, ...]]:
    return [(row["step"], row.get("loss", row.get("valid_loss"))) for row in records(folder, kind)]


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
    assert steps_in(folder / "checkpoints") == sorted({*steps, 3, 4} - {0})
    assert losses(folder, "train") == losses(whole, "train")
    # A resumed start evaluates, the uninterrupted run does not.
    assert set(losses(folder, "valid")) >= set(losses(whole, "valid"))
    ours, theirs = (open_sound(path / "checkpoints", 4) for path in (folder, whole))
    assert check_state(ours, theirs, 0.0) > 20
    assert not (folder / "checkpoints" / "attempts.json").exists()


@pytest.mark.parametrize("skipped", [[], [1]])
def test_stop_without_save_folder_is_reported(skipped: list[int]) -> None:
    """Also after a step that iterations_to_skip leaves out."""
    settings = {"dp": 2, "save_interval": None, "async_save": False, "iterations_to_skip": skipped}
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
        assert steps_in(folder / "checkpoints")[-1] == step


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
