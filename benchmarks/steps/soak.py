"""Stability of a long run: thousands of steps of a small GPT on two ranks; memory, files and speed, early and late.

    OMP_NUM_THREADS=1 python -m benchmarks.steps.soak [--steps 5000] [--json FILE]

Every half second each rank's resident memory, open files and threads are read from /proc; step times are from the run's own
metrics. The first fifth is warm-up, in which allocators, caches and logs grow. Evaluations and saves are part of the run; the
speed is compared over steps without them."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import common

WARM_UP = 0.2
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "256"),
    *("--seq-length", "32", "--micro-batch-size", "2", "--global-batch-size", "8", "--mock-data"),
    *("--lr", "1e-3", "--save-interval", "500", "--async-save", "--keep-latest", "2"),
    *("--eval-interval", "1000", "--eval-iters", "2", "--log-interval", "500", "--device", "cpu"),
)


class Sample(NamedTuple):
    """State of a process at one time."""

    seconds: float
    resident_bytes: int
    files: int
    threads: int


def children(pid: int) -> list[int]:
    """All descendants of a process."""
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(word) for word in listed.read_text().split()] if listed.exists() else []
    return [*found, *(grandchild for child in found for grandchild in children(child))]


def sample(pid: int) -> Sample:
    """Read a process's state. Raises OSError if it has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return Sample(time.time(), int(status["VmRSS"].split()[0]) * 1024, files, int(status["Threads"]))


def is_rank(pid: int) -> bool:
    """Whether the process is one of the ranks, not torchrun or the watchdog."""
    try:
        return b"pretrain_gpt.py" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def watch(run: subprocess.Popen[bytes]) -> dict[int, list[Sample]]:
    """Samples of each rank until the run ends."""
    found: dict[int, list[Sample]] = {}
    while run.poll() is None:
        for pid in filter(is_rank, children(run.pid)):
            try:
                found.setdefault(pid, []).append(sample(pid))
            except (OSError, KeyError):
                continue
        time.sleep(0.5)
    return found


def early_and_late(values: list[float]) -> tuple[float, float]:
    """Medians of the tenth after the warm-up and of the last tenth."""
    first, tenth = int(len(values) * WARM_UP), max(1, len(values) // 10)
    return statistics.median(values[first : first + tenth]), statistics.median(values[-tenth:])


def step_times(metrics: Path) -> list[float]:
    """Milliseconds of steps without a save or evaluation after them, in order."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [row["ms_per_step"] for row in rows if row["kind"] == "train" and (row["step"] - 1) % 500]


def rank_row(samples: list[Sample], ended: float) -> dict[str, Any]:
    """Resources per rank; samples of the run's last second are excluded, as it is ending."""
    at_work = [one for one in samples if one.seconds < ended - 1.0] or samples
    early, late = early_and_late([float(one.resident_bytes) for one in at_work])
    steady = at_work[len(at_work) // 5 :]
    return {
        "resident_mib": [round(early / 2**20, 2), round(late / 2**20, 2)],
        "growth": round(late / early - 1, 5),
        "open_files": sorted({one.files for one in steady}),
        "threads": sorted({one.threads for one in steady}),
    }


def measure(steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        flags = [*FLAGS, "--train-iters", str(steps), "--run-dir", folder]
        line, log = common.python("pretrain_gpt.py", *flags, ranks=2), Path(folder, "log")
        with log.open("wb") as file:
            run = subprocess.Popen(line, cwd=common.ROOT, env=common.environment(), stdout=file, stderr=file)
            samples = watch(run)
        if run.returncode != 0:
            raise SystemExit(f"the run ended with {run.returncode}:\n{log.read_text()[-2000:]}")
        metrics = Path(folder, "metrics.jsonl")
        milliseconds, ended = early_and_late(step_times(metrics)), metrics.stat().st_mtime
    ranks = [rank_row(each, ended) for each in samples.values()]
    return {"steps": steps, "ms_per_step": [round(value, 3) for value in milliseconds], "ranks": ranks}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args(words)
    found = measure(arguments.steps)
    early, late = found["ms_per_step"]
    print(f"{found['steps']} steps; a step takes {early} ms after the warm-up and {late} ms at the end")
    for number, rank in enumerate(found["ranks"]):
        before, after = rank["resident_mib"]
        print(
            f"rank {number}: {before} MiB resident after the warm-up, {after} MiB at the end "
            f"({rank['growth']:+.2%}); open files {rank['open_files']}, threads {rank['threads']}"
        )
    common.write_json(arguments.json, "steps.soak", words, found)


if __name__ == "__main__":
    main()
