"""Processes and clock of the GPU benchmark: every task becomes a row, even if it is killed or hangs."""

import io
import json
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import child as gpu_child
from benchmarks.gpu import legs as gpu_legs
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.legs import Leg, Row, run_legs

STUB = """
import json, os, sys, time
tasks = json.loads(sys.stdin.readline())
def send(message): print("row " + json.dumps(message), flush=True)
for task in tasks:
    send("begin")
    print("something else on stdout")
    if task["do"] == "die":
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), 9)
    if task["do"] == "hang":
        time.sleep(60)
    send({"did": task["do"], "pid": os.getpid()})
    send("end")
    if task["do"] == "leave":
        sys.exit(0)"""


def run_stub(*legs: tuple[str, ...], seconds: float = 20.0, until: float = 60.0) -> list[Row]:
    return run_legs(
        [Leg(str(number), tuple({"part": "stub", "do": do} for do in leg), seconds) for number, leg in enumerate(legs)],
        until=time.monotonic() + until,
        show=lambda row: None,
        command=(sys.executable, "-S", "-c", STUB),
    )


def test_killed_task_is_a_row_and_the_next_tasks_run() -> None:
    rows = run_stub(("a", "die", "b", "leave", "c"), ("d",))
    assert [row.get("did", row.get("failed")) for row in rows] == [
        "a",
        "killed by signal 9: last words",
        "b",
        "leave",
        "c",
        "d",
    ]
    a, b, leave, c, d = (row["pid"] for row in rows if "pid" in row)
    assert b == leave
    assert len({a, b, c, d}) == 4
    assert rows[1]["do"] == "die"


def test_hanging_task_ends_only_its_leg() -> None:
    rows = run_stub(("a", "hang", "b"), ("c",), seconds=2.0)
    assert [row.get("did") for row in rows] == ["a", None, None, "c"]
    assert rows[1]["failed"] == "not done after the leg's 2 s"
    assert rows[2]["failed"] == "not run: the leg's time is spent"


def test_process_that_cannot_start_fails_its_tasks() -> None:
    rows = run_legs(
        [Leg("x", ({"part": "stub"}, {"part": "stub"}), 20.0)],
        until=time.monotonic() + 60.0,
        show=lambda row: None,
        command=(sys.executable, "-S", "-c", "raise SystemExit('no such module')"),
    )
    assert [row["failed"] for row in rows] == ["exit status 1: no such module"] * 2


def test_out_of_memory_step_is_retried_with_half_the_microbatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(task: dict[str, Any]) -> Any:
        if task["microbatch"] > 4:
            raise torch.cuda.OutOfMemoryError
        yield {"microbatch": task["microbatch"], "accumulations": task["accumulations"]}

    task = {"part": "stub", "microbatch": 8, "accumulations": [1, 8]}
    monkeypatch.setitem(sys.modules, "stub_part", SimpleNamespace(rows=rows))
    monkeypatch.setattr(gpu_child, "PARTS", {"stub": "stub_part"})
    monkeypatch.setattr(gpu_child.gc, "collect", lambda: 0)  # takes seconds with the imports of other tests
    monkeypatch.setattr(sys, "argv", ["gpu_child.py", "stub"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps([task])))
    gpu_child.main()
    sent = [json.loads(line.removeprefix(gpu_legs.MARK)) for line in capsys.readouterr().out.splitlines()]
    assert sent == [
        "begin",
        {"part": "stub", "microbatch": 8, "failed": "out of memory"},
        {"microbatch": 4, "accumulations": [2, 16]},
        "end",
    ]


def test_synchronizing_calls_are_errors_before_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed capture, torch draws no random numbers, and every later task would fail."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> None:
        raise RuntimeError(f"called a synchronizing CUDA operation, {modes}")

    with pytest.raises(RuntimeError, match="operation, \\['error'\\]"):
        Clock(torch.device("cpu"), repeats=1)._replayed(waits, None)
    assert modes == ["error", "default"]
