"""Results of a sweep: read from a run's output, stored as JSON lines, and exported as CSV."""

import contextlib
import csv
import dataclasses
import io
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import lock_folder, replace_durably, sync_folder, write_all, write_durably
from megalite.config.errors import BAD_INPUT, ConfigError
from megalite.config.reading import read_text
from megalite.sweep.candidates import Run
from megalite.sweep.spec import SweepSpec
from megalite.training.records import read_records

OK, OOM, TIMEOUT, REFUSED, FAILED = "ok", "oom", "timeout", "refused", "failed"
RESULTS, TABLE, IDENTITY, RUNS = "results.jsonl", "results.csv", "sweep.json", "runs"


@dataclass(frozen=True, kw_only=True)
class Result:
    key: str
    settings: Mapping[str, Any]
    ranks: int
    status: str
    error: str | None = None  # first line with the reason, unless ok
    launched: bool = True  # false: refused before its launch
    seconds: float | None = None  # of the whole run, including its start
    steps: int = 0  # measured steps
    step_seconds: float | None = None  # median of the measured steps
    step_seconds_low: float | None = None
    step_seconds_high: float | None = None  # fastest and slowest measured step
    tokens_per_second: float | None = None
    memory_bytes: int | None = None  # peak of rank 0: allocated on the GPU, or resident on a CPU
    loss: float | None = None  # of the last step


_FIELDS = [each.name for each in dataclasses.fields(Result)]
_MEASURED = [name for name in _FIELDS if name not in ("key", "settings", "ranks", "launched")]


@dataclass
class Store:
    """The folder of a sweep, locked until `close`. `append` returns after its line is on the disk; truncated lines are
    ignored."""

    folder: Path
    results: dict[str, Result] = field(default_factory=dict)  # key -> latest result
    _lock: int | None = None
    _file: int = -1

    @classmethod
    def open(cls, folder: Path, spec: SweepSpec, launcher: str) -> "Store":
        """Open or create the store. Raises ConfigError if the folder has another sweep, is in use, or is not writable."""
        store = cls(folder)
        try:
            store._open(_identity(spec, launcher))
        except (ConfigError, OSError) as error:
            store.close()
            if isinstance(error, ConfigError):
                raise
            name = error.filename or folder
            raise ConfigError(f"cannot write {name}: {error.strerror}; use another folder with --output") from None
        return store

    def _open(self, identity: dict[str, Any]) -> None:
        folder = self.folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = lock_folder(folder)
        except BlockingIOError:
            raise ConfigError(f"another sweep uses {folder}; wait for it, or use another --output") from None
        known = folder / IDENTITY
        if known.exists():
            _refuse_other(known, identity)
        elif any(not each.name.startswith(".") for each in folder.iterdir()):
            raise ConfigError(f"{folder} contains files but no sweep; use an empty folder with --output")
        else:
            replace_durably(known, (json.dumps(identity, indent=2) + "\n").encode())
        path = folder / RESULTS
        if not path.exists():
            write_durably(path, b"")
            sync_folder(folder)
        self.results = {result.key: result for result in read_results(path)}
        cut_off = path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        if cut_off:
            write_all(self._file, memoryview(b"\n"))

    def append(self, result: Result) -> None:
        """Store a result, unless it equals the stored one."""
        if self.results.get(result.key) == result:
            return
        line = json.dumps(dataclasses.asdict(result)) + "\n"
        write_all(self._file, memoryview(line.encode()))
        os.fsync(self._file)
        self.results[result.key] = result

    def is_done(self, key: str, *, retry: bool = False) -> bool:
        result = self.results.get(key)
        return result is not None and result.launched and (result.status == OK or not retry)

    def run_folder(self, run: Run) -> Path:
        name = "".join(letter if letter.isalnum() or letter in ".-" else "_" for letter in run.label)
        return self.folder / RUNS / f"{name[:60]}-{run.key}"

    def write_table(self, runs: Sequence[Run]) -> None:
        replace_durably(self.folder / TABLE, table(runs, self.results).encode())

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor is not None and descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._file, self._lock = -1, None


def _identity(spec: SweepSpec, launcher: str) -> dict[str, Any]:
    """Return the settings that must not change when a sweep is continued; configurations may be added."""
    return {
        "preset": spec.preset,
        "base": [str(path.resolve()) for path in spec.base],
        "settings": json.loads(json.dumps(dict(spec.settings))),
        "steps": spec.steps,
        "warm_up_steps": spec.warm_up_steps,
        "environment": dict(spec.environment),
        "program": None if spec.program is None else str(spec.program.resolve()),
        "launcher": launcher,
    }


def _refuse_other(path: Path, wanted: Mapping[str, Any]) -> None:
    try:
        stored = json.loads(read_text(path))
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(f"{path} is damaged; use another folder with --output")
    for name, value in wanted.items():
        if stored.get(name) != value:
            raise ConfigError(f"{path.parent} has a sweep with {name} {stored.get(name)}, not {value}; change --output")


def read_results(path: Path) -> list[Result]:
    """Read all results in the order of writing; damaged lines are skipped."""
    found = []
    for line in read_text(path, errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and {"key", "settings", "ranks", "status"} <= set(record) <= set(_FIELDS):
            found.append(Result(**record))
    return found


_PREDICTED = ["predicted_step_seconds", "predicted_tokens_per_second", "predicted_memory_bytes"]


def table(runs: Sequence[Run], results: Mapping[str, Result]) -> str:
    """Return a CSV table: a column per varying setting, then predictions and measurements."""
    varying = list(runs[0].settings) if runs else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["key", *varying, "ranks", *_PREDICTED, *_MEASURED])
    for run in runs:
        result = results.get(run.key)
        step = run.predicted.step_seconds if run.predicted else None
        predicted = [
            step,
            run.tokens_per_step / step if step else None,
            run.predicted.memory_bytes if run.predicted else None,
        ]
        measured = [getattr(result, name) if result else None for name in _MEASURED]
        settings = [json.dumps(v) if isinstance(v, list) else v for v in run.settings.values()]
        writer.writerow([run.key, *settings, run.ranks, *predicted, *measured])
    return out.getvalue()


LOG = "log.txt"
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
_MOST_CHARACTERS = 500  # of an error in a table


def outcome(run: Run, folder: Path, *, status: int, timed_out: float | None, seconds: float, warm_up: int) -> Result:
    """Return the result of a run that has ended after `seconds`, with its launcher's exit `status`, or that was stopped
    after `timed_out` seconds. The first `warm_up` steps are not measured."""
    measured = measure(folder, warm_up=warm_up)
    plain: dict[str, Any] = {"key": run.key, "settings": dict(run.settings), "ranks": run.ranks}
    plain |= {"seconds": round(seconds, 3), **measured}
    log = _lines(folder / LOG)
    if timed_out is not None:
        return Result(**plain, status=TIMEOUT, error=f"did not end within {timed_out:g} s")
    if status == 0 and measured["steps"]:
        step = measured["step_seconds"]
        return Result(**plain, status=OK, tokens_per_second=run.tokens_per_step / step)
    if status == 0:
        return Result(**plain, status=FAILED, error=f"exited with status 0 but wrote no step after the first {warm_up}")
    return Result(**plain, **_failure(log, status))


def measure(folder: Path, *, warm_up: int) -> dict[str, Any]:
    """Return steps, their seconds, peak memory and last loss of a run, without the first `warm_up` steps."""
    train = read_records(folder, "train")
    times = [value / 1e3 for record in train[warm_up:] if (value := _number(record, "ms_per_step")) is not None]
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
    """Return the last step that an active run has written, from the end of its file."""
    return max((record["step"] for record in read_records(folder, "train", tail=1 << 14)), default=0)


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
    """Return status and error of a failed run."""
    memory = next((line for line in log if _OUT_OF_MEMORY.search(line)), None)
    if memory is not None:
        return {"status": OOM, "error": _short(memory)}
    if any(_TIME_LIMIT.search(line) for line in log):
        return {"status": TIMEOUT, "error": "ended by the time limit of its job"}
    if any(_KILLED.search(line) for line in log):
        return {"status": OOM, "error": "a rank was killed by SIGKILL, as the system does when memory is exhausted"}
    ours = next((match[0] for line in log if (match := _OURS.search(line))), None)
    if ours is not None:
        refused = status == BAD_INPUT or any(_REFUSED.search(line) for line in log)
        return {"status": REFUSED if refused else FAILED, "error": _short(ours.removeprefix("error: "))}
    raised = [match[1] for line in log if (match := _RAISED.match(line))]
    # The launcher's own exception only reports that a rank failed.
    first = next((line for line in raised if "ChildFailedError" not in line), None)
    return {"status": FAILED, "error": _short(first or f"exit status {status}; {LOG} has no error line")}


def _short(line: str) -> str:
    line = line.strip()
    return line if len(line) <= _MOST_CHARACTERS else line[: _MOST_CHARACTERS - 1] + "…"


def refused(run: Run) -> Result:
    assert run.refused is not None
    return Result(
        key=run.key,
        settings=json.loads(json.dumps(dict(run.settings))),
        ranks=run.ranks,
        status=REFUSED,
        error=_short(run.refused),
        launched=False,
    )
