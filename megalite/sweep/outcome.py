"""How a run ended, from what it left behind: its metrics, or the first line of its log that says why not."""

import json
import math
import re
import statistics
from pathlib import Path
from typing import Any

from megalite.sweep.check import Run
from megalite.sweep.results import FAILED, OK, OOM, REFUSED, TIMEOUT, Result
from megalite.training.sinks import parse_record

LOG, METRICS = "log.txt", "metrics.jsonl"
BAD_INPUT = 2
"""Exit status of a training program that refuses its settings."""

_OUT_OF_MEMORY = re.compile(
    r"OutOfMemoryError|CUDA out of memory|HIP out of memory|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory|Cannot allocate memory|std::bad_alloc|\bMemoryError\b"
    r"|oom[-_]kill|OUT_OF_MEMORY",
    re.IGNORECASE,
)
_KILLED = re.compile(r"Signal 9 \(SIGKILL\) received by PID|exitcode\s*:\s*-9\b")
_TIME_LIMIT = re.compile(r"DUE TO TIME LIMIT")
_REFUSED = re.compile(r"exitcode\s*:\s*2\b")
_OURS = re.compile(r"error: \S.*")
_RAISED = re.compile(r"(?:\[[\w:-]+\]:?\s*)?((?:\w+\.)*\w*(?:Error|Exception)\b(?::.*|))$")
_MOST_CHARACTERS = 500
"""Of an error, in a table."""


def outcome(
    run: Run, folder: Path, *, status: int, timed_out: float | None, seconds: float, warm_up: int
) -> Result:
    """The result of a run that has ended.

    Args:
        folder: of the run.
        status: exit status of its launcher.
        timed_out: the seconds that it had, if it was ended for having used them up.
        seconds: that it took.
        warm_up: first steps that are not measured.
    """
    measured = measure(folder / METRICS, warm_up=warm_up)
    plain: dict[str, Any] = {"key": run.key, "settings": dict(run.settings), "ranks": run.ranks}
    plain |= {"seconds": round(seconds, 3), **measured}
    log = _lines(folder / LOG)
    if timed_out is not None:
        return Result(**plain, status=TIMEOUT, error=f"had not ended after {timed_out:g} s")
    if status == 0 and measured["steps"]:
        step = measured["step_seconds"]
        return Result(**plain, status=OK, tokens_per_second=run.tokens_per_step / step)
    if status == 0:
        return Result(**plain, status=FAILED, error=f"ended well but wrote no step after the first {warm_up}")
    return Result(**plain, **_failure(log, status))


def measure(path: Path, *, warm_up: int) -> dict[str, Any]:
    """Steps, their seconds, peak memory and last loss of a metrics.jsonl, without the first `warm_up` steps."""
    records = [record for line in _lines(path) if (record := parse_record(line + "\n")) is not None]
    train = [record for record in records if record["kind"] == "train"]
    times = [
        value / 1e3 for record in train[warm_up:] if (value := _number(record, "ms_per_step")) is not None
    ]
    peaks = [int(value) for record in train if (value := _number(record, "memory_bytes")) is not None]
    return {
        "steps": len(times),
        "step_seconds": statistics.median(times) if times else None,
        "step_seconds_low": min(times, default=None),
        "step_seconds_high": max(times, default=None),
        "memory_bytes": max(peaks, default=None),
        "loss": _number(train[-1], "loss") if train else None,
    }


def steps_made(folder: Path) -> int:
    """Steps that a run under way has written."""
    return sum('"kind": "train"' in line for line in _lines(folder / METRICS))


def _number(record: dict[str, Any], name: str) -> float | None:
    value = record.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _failure(log: list[str], status: int) -> dict[str, Any]:
    """Status and error of a run that did not end well."""
    memory = next((line for line in log if _OUT_OF_MEMORY.search(line)), None)
    if memory is not None:
        return {"status": OOM, "error": _short(memory)}
    if any(_TIME_LIMIT.search(line) for line in log):
        return {"status": TIMEOUT, "error": "ended by the time limit of its job"}
    if any(_KILLED.search(line) for line in log):
        return {
            "status": OOM,
            "error": "a rank was ended by SIGKILL, as the system does when memory runs out",
        }
    ours = next((match[0] for line in log if (match := _OURS.search(line))), None)
    if ours is not None:
        refused = status == BAD_INPUT or any(_REFUSED.search(line) for line in log)
        return {"status": REFUSED if refused else FAILED, "error": _short(ours.removeprefix("error: "))}
    raised = [match[1] for line in log if (match := _RAISED.match(line))]
    # The launcher's own exception says no more than that a rank failed.
    first = next((line for line in raised if "ChildFailedError" not in line), None)
    return {
        "status": FAILED,
        "error": _short(first or f"exit status {status}; {LOG} of the run has no error line"),
    }


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "…"


def refused(run: Run) -> Result:
    """The result of a run that the checks refused."""
    assert run.refused is not None
    return Result(
        key=run.key,
        settings=json.loads(json.dumps(dict(run.settings))),
        ranks=run.ranks,
        status=REFUSED,
        error=_short(run.refused),
        launched=False,
    )
