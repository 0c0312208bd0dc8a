"""The loop over runs, with short, hanging and failing programs instead of training."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megalite.cli.output import Stopped, first_signal_raises
from megalite.config import files
from megalite.sweep.candidates import Run
from megalite.sweep.execute import LocalRun, Progress, SbatchLauncher, execute, launchable
from megalite.sweep.results import FAILED, OK, OOM, REFUSED, TIMEOUT, Result, Store
from megalite.sweep.spec import SbatchSpec
from megalite.watchdog import processes
from megalite.watchdog.processes import descendants
from tests.support.patience import is_gone, wait_until
from tests.sweep.sweeps import MODEL, read_runs, write_sweep

GOOD = """
for step in 1 2 3; do
  echo "{\\"kind\\": \\"train\\", \\"step\\": $step, \\"ms_per_step\\": 20.0, \\"loss\\": 4.0, \\"memory_bytes\\": 7}"
done > "$0/metrics.jsonl"
"""
OUT_OF_MEMORY = 'echo "torch.OutOfMemoryError: CUDA out of memory."; exit 1'
BROKEN = 'echo "RuntimeError: no such luck"; exit 1'
HANGING = "setsid sleep 600 & echo $! > $0/child; wait"  # the child has its own session, like torchrun's ranks


class StubLauncher:
    """Runs one line of shell per run, in turn, with the run's folder as $0."""

    def __init__(self, *scripts: str, at_once: int = 1) -> None:
        self.at_once = at_once
        self.scripts = list(scripts)
        self.started: list[str] = []
        self.cleared: list[Path] = []
        self.most = 0

    def fault(self, run: Run) -> str | None:
        """No faults."""
        return None

    def start(self, run: Run, folder: Path, *, timeout: float) -> LocalRun:
        """Start the next script."""
        assert files.load(folder / files.CONFIG_NAME).logging.run_dir == str(folder)
        self.started.append(run.key)
        return LocalRun(["/bin/sh", "-c", self.scripts.pop(0), str(folder)], folder / "log.txt", environment=os.environ)

    def clear(self, folder: Path) -> None:
        """Record the call."""
        self.cleared.append(folder)


class Sweep:
    """Four runs in a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec, self.runs = read_runs(write_sweep(folder, grid={"micro_batch_size": [1, 2, 4, 3]}))
        self.seen: list[Result] = []

    def store(self) -> Store:
        """Open it."""
        return Store.open(self.folder / "out", self.spec, "local")

    def go(
        self, launcher: StubLauncher, *, timeout: float = 30.0, limit: int | None = None, retry: bool = False
    ) -> None:
        """Execute, and close the store."""

        def observe(progress: Sequence[Progress], result: Result | None) -> None:
            launcher.most = max(launcher.most, len(progress))
            if result is not None:
                self.seen.append(result)

        store = self.store()
        try:
            execute(self.runs, store, launcher, warm_up=1, timeout=timeout, limit=limit, retry=retry, observe=observe)
        finally:
            store.close()

    def statuses(self) -> list[str | None]:
        """Statuses of the runs, in order."""
        store = self.store()
        store.close()
        return [store.results[run.key].status if run.key in store.results else None for run in self.runs]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """A sweep with one refused run: 3 does not divide the batch."""
    return Sweep(tmp_path)


def wait_for(path: Path) -> str:
    """The content of a file that will be written soon."""
    wait_until(lambda: path.is_file() and path.read_text(), seconds=10)
    return path.read_text()


def test_every_ending_has_a_result(sweep: Sweep) -> None:
    sweep.go(StubLauncher(GOOD, OUT_OF_MEMORY), limit=2)
    sweep.go(StubLauncher(HANGING), timeout=5.0)
    assert sweep.statuses() == [OK, OOM, TIMEOUT, REFUSED]
    assert [result.status for result in sweep.seen] == [OK, OOM, TIMEOUT]
    assert sweep.seen[0].step_seconds == 0.02
    child = next((sweep.folder / "out" / "runs").glob("*/child")).read_text()
    assert is_gone(int(child)), "a timeout ends the ranks too"


def test_finished_runs_are_not_repeated(sweep: Sweep) -> None:
    first = StubLauncher(GOOD)
    sweep.go(first, limit=1)
    assert sweep.statuses() == [OK, None, None, REFUSED]
    second = StubLauncher(BROKEN, GOOD)
    sweep.go(second)
    assert second.started == [sweep.runs[1].key, sweep.runs[2].key]
    assert sweep.statuses() == [OK, FAILED, OK, REFUSED]
    sweep.go(StubLauncher())
    again = StubLauncher(GOOD)
    sweep.go(again, retry=True)
    assert again.started == [sweep.runs[1].key]
    assert again.cleared[0].name.endswith(sweep.runs[1].key)
    assert sweep.statuses() == [OK, OK, OK, REFUSED]


def test_several_runs_in_parallel(sweep: Sweep) -> None:
    launcher = StubLauncher("sleep 0.5;" + GOOD, "sleep 0.5;" + GOOD, "sleep 0.5;" + GOOD, at_once=2)
    sweep.go(launcher)
    assert launcher.most == 2
    assert sweep.statuses()[:3] == [OK, OK, OK]


def test_ctrl_c_ends_the_run_and_keeps_results(sweep: Sweep) -> None:
    launcher = StubLauncher(GOOD, HANGING)

    def interrupt() -> None:
        runs = sweep.folder / "out" / "runs"
        wait_until(lambda: list(runs.glob("*/child")))
        os.kill(os.getpid(), signal.SIGINT)

    waiting = threading.Thread(target=interrupt)
    waiting.start()
    with pytest.raises(Stopped), first_signal_raises():
        sweep.go(launcher)
    waiting.join()
    child = next((sweep.folder / "out" / "runs").glob("*/child"))
    assert is_gone(int(wait_for(child)))
    assert sweep.statuses() == [OK, None, None, REFUSED]


@pytest.fixture
def ignoring_sigterm(tmp_path: Path) -> str:
    """A command that ignores SIGTERM and has a child in its own session."""
    return f"trap '' TERM; setsid sleep 600 & echo $! > {tmp_path}/child; while :; do sleep 0.1; done"


def test_end_kills_processes_that_ignore_signals(
    ignoring_sigterm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = LocalRun(["/bin/sh", "-c", ignoring_sigterm], tmp_path / "log", environment=os.environ)
    child = int(wait_for(tmp_path / "child"))
    assert not is_gone(child)
    assert child in descendants(os.getpid())
    monkeypatch.setattr(processes, "END_SECONDS", 0.0)  # the guard's own process uses the longer limit
    run.end()
    wait_until(lambda: is_gone(child), seconds=20)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no one becomes the parent of orphans")
def test_orphaned_processes_end_with_their_run(tmp_path: Path) -> None:
    orphan = f"(setsid sleep 600 & echo $! > {tmp_path}/child); exit 3"
    run = LocalRun(["/bin/sh", "-c", orphan], tmp_path / "log", environment=os.environ)
    while run.poll() is None:
        time.sleep(0.02)
    assert run.poll() == 3
    assert is_gone(int(wait_for(tmp_path / "child")))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no one hears of the end of a parent")
def test_run_ends_with_its_sweep(tmp_path: Path) -> None:
    code = "import os, pathlib, sys, time; from megalite.sweep.execute import LocalRun; "
    code += (
        "LocalRun(['/bin/sh', '-c', sys.argv[1]], pathlib.Path(sys.argv[2]), environment=os.environ); time.sleep(600)"
    )
    script = f"setsid sleep 600 & echo $! > {tmp_path}/child; wait"
    parent = subprocess.Popen([sys.executable, "-c", code, script, str(tmp_path / "log")])
    child = int(wait_for(tmp_path / "child"))
    assert not is_gone(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: is_gone(child), seconds=20)


def test_ranks_that_do_not_fill_nodes_are_refused(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, settings=MODEL | {"global_batch_size": 36}, ranks=None, grid={"dp": [4, 6, 9, 12]})
    _, runs = read_runs(path)
    launcher = SbatchLauncher(SbatchSpec(gpus_per_node=8), environment={})
    assert [run.refused for run in launchable(runs, launcher)] == [
        None,
        None,
        "9 ranks cannot be divided evenly over 2 nodes of 8; use e.g. 16",
        None,
    ]
