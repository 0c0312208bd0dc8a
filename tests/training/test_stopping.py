"""Signals that a rank receives, when it exits at once, and what happens without an agreement."""

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
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.training.non_finite import NonFiniteError
from megalite.training.save_folder import RestartLoopError
from megalite.training.saving import SaveError
from megalite.training.stopping import FILE_NAME, Ending, StopRequest, StopRequests, StopRun, write_ending
from megalite.training.trainer import Trainer
from tests.support.fork_server import fork_server
from tests.support.patience import wait_until


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
    """Wait for a lock that is never released; no signal interrupts the call."""
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
    while time.monotonic() < end:
        try:
            if Path(f"/proc/{process}/stat").read_text().split()[2] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


linux = pytest.mark.skipif(sys.platform != "linux", reason="holds a thread in a lock of glibc")


@linux
def test_second_ctrl_c_exits_immediately(tmp_path: Path) -> None:
    def twice(process: int) -> None:
        os.kill(process, signal.SIGINT)
        os.kill(process, signal.SIGINT)  # a launcher repeats the same signal
        time.sleep(0.8)
        assert Path(f"/proc/{process}/stat").read_text().split()[2] != "Z", "one press does not count as two"
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
    """Use `run` as the setup of a run: its exception is how the run ends."""
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
