"""The watch process over small programs in place of ranks: culprits, leftover files, and when it does not interfere."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megalite.config.errors import HUNG
from megalite.watchdog.processes import start_time, started_at
from megalite.watchdog.watch import WatchedRank, WatchPlan
from tests.support.patience import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

RANK = """
import os, signal, sys, time
from pathlib import Path
from types import SimpleNamespace
from megalite.watchdog.heartbeat import FileHeartbeat
from megalite.watchdog.processes import Handlers

folder, rank, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
beats = FileHeartbeat(folder / f"rank-{rank}.beat", rank=rank)
handlers = None if fault == "deaf" else Handlers(folder / f"rank-{rank}.stacks")
lane = beats.lane("tp", (0, 1))
for step in (1, 2):
    beats.begin_step(step)
lane.start(lambda: SimpleNamespace(wait=int), "all_reduce", 8).wait()
print("ready", flush=True)

def sleep_in_here():
    while True:
        time.sleep(1000)

if fault == "wait":
    lane.start(lambda: SimpleNamespace(wait=sleep_in_here), "all_reduce", 8).wait()
elif fault == "beat":
    while True:
        beats.beat()
        time.sleep(0.02)
elif fault == "save":
    beats.phase("saving", patient=True)
elif fault == "stop":
    os.kill(os.getpid(), signal.SIGSTOP)
sleep_in_here()
"""


class Run:
    """Two programs in place of ranks, and their watch processes."""

    def __init__(self, folder: Path, seconds: float, faults: tuple[str, ...]) -> None:
        self.folder, self.seconds = folder / "private", seconds
        self.reports = folder / "run"
        self.folder.mkdir()
        self.errors = [folder / f"error-{rank}.json" for rank in range(len(faults))]
        self.ranks = [
            subprocess.Popen([sys.executable, "-c", RANK, str(self.folder), str(rank), fault], stdout=subprocess.PIPE)
            for rank, fault in enumerate(faults)
        ]
        self.watchers: list[subprocess.Popen[str]] = []
        for process in self.ranks:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"

    def plan(self, **changes: Any) -> WatchPlan:
        ranks = tuple(
            WatchedRank(rank, process.pid, start_time(process.pid) or 0, str(self.errors[rank]))
            for rank, process in enumerate(self.ranks)
        )
        plan = WatchPlan(
            folder=str(self.folder),
            seconds=self.seconds,
            patient_seconds=6 * self.seconds,
            host="a",
            hosts=("a",),
            ranks=ranks,
            world_size=len(ranks),
            report_folder=str(self.reports),
            run="r",
        )
        return dataclasses.replace(plan, **changes)

    def watch(self, plan: WatchPlan | None = None) -> subprocess.Popen[str]:
        watcher = subprocess.Popen(
            [sys.executable, "-m", "megalite.watchdog.watch"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.watchers.append(watcher)
        assert watcher.stdin is not None
        watcher.stdin.write(json.dumps(dataclasses.asdict(plan or self.plan())) + "\n")
        watcher.stdin.flush()
        return watcher

    def statuses(self) -> list[int]:
        return [process.wait(60) for process in self.ranks]

    def report(self) -> dict[str, Any]:
        (path,) = self.reports.glob("hang-*.json")
        return json.loads(path.read_text())

    def stop(self) -> None:
        for process in (*self.ranks, *self.watchers):
            process.kill()
            process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    runs: list[Run] = []

    def begin(*faults: str, seconds: float = 0.4) -> Run:
        (tmp_path / str(len(runs))).mkdir()
        runs.append(Run(tmp_path / str(len(runs)), seconds, faults))
        return runs[-1]

    yield begin
    for run in runs:
        run.stop()


def send_line(watcher: subprocess.Popen[str], line: str) -> None:
    assert watcher.stdin is not None
    watcher.stdin.write(line)
    watcher.stdin.flush()


WHY = {"sleep": "it waits for no other rank", "stop": "its process is stopped", "deaf": "it waits for no other rank"}


@pytest.mark.parametrize("fault", WHY)
def test_hanging_rank_is_named_and_all_are_ended(start: Any, fault: str) -> None:
    run = start("wait", fault)
    began = time.monotonic()
    watcher = run.watch()
    assert run.statuses() == [HUNG, -HUNG if fault == "deaf" else HUNG]
    assert time.monotonic() - began < run.seconds + 20
    _, said = watcher.communicate(timeout=60)
    assert watcher.returncode == 0 and not run.folder.exists()
    assert f"megalite: rank 1 stands still: {WHY[fault]}" in said, said
    waits = "waits in all_reduce 2 of tp [0, 1], which rank 1 has not begun"
    assert f"rank 0 {waits}: step 2, last all_reduce 2 of tp [0, 1]" in said
    report = run.report()
    assert report["culprits"] == [1] and report["exit_status"] == HUNG
    assert report["limit_seconds"] == pytest.approx(run.seconds)
    assert {row["rank"]: row["process"] for row in report["ranks"]}[1] == ("stopped" if fault == "stop" else "running")
    text = next(run.reports.glob("hang-*.txt")).read_text()
    assert f"stacks of all ranks: {next(run.reports.glob('hang-*.txt'))}" in said
    if fault != "deaf":
        assert all("sleep_in_here" in report["stacks"]["0"] for _ in (0, 1))
        assert text.count("most recent call first") >= 2
    # torchrun reports the earliest as root cause
    (first, second), shown = zip(*(read_error(path) for path in run.errors), strict=True)
    assert second < first
    assert shown[1].startswith(f"rank 1 stood still: {WHY[fault]}") and "step 2" in shown[1]
    assert shown[0].startswith(f"rank 0 did not cause the hang (culprit: 1): it {waits}")


def read_error(path: Path) -> tuple[int, str]:
    message = json.loads(path.read_text())["message"]
    assert message["extraInfo"]["py_callstack"].startswith(message["message"])
    return int(message["extraInfo"]["timestamp"]), message["message"]


def test_beating_rank_keeps_all_alive_until_the_end(start: Any) -> None:
    run = start("wait", "beat", seconds=0.5)
    watcher = run.watch()
    time.sleep(1.5)
    assert watcher.poll() is None and all(process.poll() is None for process in run.ranks)
    send_line(watcher, "done\n")
    assert watcher.wait(60) == 0
    assert not run.folder.exists() and not run.reports.exists()
    assert all(process.poll() is None for process in run.ranks)


def test_watch_ends_with_killed_ranks(start: Any) -> None:
    run = start("sleep", "sleep", seconds=600)
    watcher = run.watch()
    for process in run.ranks:
        process.kill()
    assert watcher.stdin is not None
    watcher.stdin.close()  # as when the rank at the other end ends
    watcher.stdin = None
    assert watcher.wait(60) == 0
    assert not run.folder.exists() and not run.reports.exists()


def test_watch_ends_without_a_plan(start: Any) -> None:
    watcher = subprocess.run([sys.executable, "-m", "megalite.watchdog.watch"], input="", timeout=60)
    assert watcher.returncode == 0


def test_rank_that_has_left_is_not_ended(start: Any) -> None:
    run = start("sleep", "wait")
    watcher = run.watch()
    send_line(watcher, "left 0\n")
    assert run.ranks[1].wait(60) == HUNG
    watcher.wait(60)
    assert run.ranks[0].poll() is None and not run.errors[0].exists()


def test_suspended_run_is_not_a_hang(start: Any) -> None:
    run = start("stop", "stop")
    watcher = run.watch()
    time.sleep(1.5)
    assert watcher.poll() is None
    run.ranks[0].send_signal(signal.SIGCONT)
    assert run.statuses() == [HUNG, HUNG]
    assert run.report()["culprits"] == [1]


def test_saves_have_a_longer_timeout(start: Any) -> None:
    run = start("wait", "save")
    began = time.monotonic()
    run.watch()
    assert run.statuses() == [HUNG, HUNG]
    assert time.monotonic() - began > 6 * run.seconds - 0.1
    assert run.report()["limit_seconds"] == pytest.approx(6 * run.seconds)


@pytest.mark.parametrize("folder", [None, "/proc/no"])
def test_full_report_is_printed_without_a_folder(start: Any, folder: str | None) -> None:
    run = start("sleep")
    watcher = run.watch(run.plan(report_folder=folder))
    assert run.statuses() == [HUNG]
    _, said = watcher.communicate(timeout=60)
    assert "===== all threads of rank 0 =====" in said and "sleep_in_here" in said
    assert ("the report cannot be written" in said) == (folder is not None)


def test_watchers_of_hosts_exchange_states(start: Any) -> None:
    """One process watches rank 0, the other rank 1."""
    run = start("wait", "sleep", seconds=1.0)
    both = run.plan(hosts=("a", "b"))
    second = run.folder.with_name("second")
    second.mkdir()
    (run.folder / "rank-1.beat").rename(second / "rank-1.beat")
    (run.folder / "rank-1.stacks").rename(second / "rank-1.stacks")
    watchers = [
        run.watch(dataclasses.replace(both, ranks=both.ranks[:1])),
        run.watch(dataclasses.replace(both, ranks=both.ranks[1:], host="b", folder=str(second))),
    ]
    assert run.statuses() == [HUNG, HUNG]
    said = [watcher.communicate(timeout=60)[1] for watcher in watchers]
    assert all("megalite: rank 1 stands still: it waits for no other rank" in text for text in said), said
    assert sorted(path.name.split("-")[-1] for path in run.reports.iterdir()) == [
        *("host0.json", "host0.txt", "host1.json", "host1.txt")
    ]


def test_network_timeout_comes_first_between_hosts(start: Any) -> None:
    """Both ranks wait in one collective: its timeout names the unreachable rank; after that the watch ends the run."""
    run = start("wait", "wait", seconds=0.4)
    began = time.monotonic()
    run.watch(run.plan(network_seconds=1.5))
    assert run.statuses() == [HUNG, HUNG]
    assert time.monotonic() - began >= 1.5


def test_watcher_reports_alone_if_the_other_host_is_silent(start: Any) -> None:
    run = start("wait", seconds=0.4)
    watcher = run.watch(run.plan(hosts=("a", "b")))
    assert run.statuses() == [HUNG]
    _, said = watcher.communicate(timeout=60)
    assert "nothing was heard of b: the culprit may be there" in said
    assert not list(run.reports.glob(".hang*"))


def ignored_signals(pid: int) -> set[int]:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    mask = int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def test_watch_ignores_signals_of_a_scheduler(start: Any) -> None:
    run = start("beat", seconds=60)
    watcher = run.watch()
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    wait_until(lambda: ignored_signals(watcher.pid) >= {int(number) for number in numbers})
    for number in numbers:
        os.kill(watcher.pid, number)
    time.sleep(0.2)
    assert watcher.poll() is None
    send_line(watcher, "done\n")
    assert watcher.wait(60) == 0


def test_start_time_of_a_process() -> None:
    before = time.time()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    after = time.time()
    found = started_at(process.pid)
    process.communicate(b"\n")
    assert found is not None and before - 0.05 < found < after + 0.05
    assert started_at(process.pid) is None
