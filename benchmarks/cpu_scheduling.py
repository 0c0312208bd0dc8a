"""What an all-reduce between CPU ranks takes under Linux's usual policy and as batch jobs.

OMP_NUM_THREADS=1 python benchmarks/cpu_scheduling.py [--ranks 2 4 8] [--rounds N] [--json FILE]

1 KiB over gloo on this machine, 100 in a row, in turns of both policies; medians over the rounds, in wall time and in CPU
time of a rank with all of its threads.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from megalite.parity.pool import RankContext, RankPool

POLICIES = {"usual": "SCHED_OTHER", "batch": "SCHED_BATCH"}
CALLS = 100


def turns(context: RankContext, ranks: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Policy -> (wall, CPU) milliseconds of a call, round by round."""
    world, number = context.topology(dp=ranks).world, torch.zeros(256)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    for _ in range(rounds):
        for name, policy in POLICIES.items():
            for thread in Path("/proc/self/task").iterdir():
                os.sched_setscheduler(int(thread.name), getattr(os, policy), os.sched_param(0))
            for _ in range(5):
                world.all_reduce(number)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                world.all_reduce(number)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            found[name].append((1e3 * wall / CALLS, 1e3 * cpu / CALLS))
    return found


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    """A row of the table."""
    pool = RankPool(ranks)
    try:
        found = pool.run(ranks, turns, ranks, rounds)[0]
    finally:
        pool.stop()
    row: dict[str, Any] = {"ranks": ranks}
    for name, times in found.items():
        wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
        row[name] = {"wall_ms": round(wall, 3), "cpu_ms": round(cpu, 3)}
    row["faster"] = round(row["usual"]["wall_ms"] / row["batch"]["wall_ms"], 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    rows = []
    print(f"{'ranks':>5} {'usual':>20} {'batch':>20} {'faster':>7}")
    for ranks in arguments.ranks:
        rows.append(row := measure(ranks, arguments.rounds))
        cells = (f"{row[name]['wall_ms']:.2f} ms, {row[name]['cpu_ms']:.2f} CPU" for name in POLICIES)
        print(f"{ranks:>5} {next(cells):>20} {next(cells):>20} {row['faster']:>6.2f}x", flush=True)
    if arguments.json is not None:
        about = {
            "command": "OMP_NUM_THREADS=1 python benchmarks/cpu_scheduling.py",
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}",
            "torch": torch.__version__,
        }
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
