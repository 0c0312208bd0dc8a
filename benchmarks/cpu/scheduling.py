"""What an all-reduce between CPU ranks takes under Linux's usual policy and as batch jobs.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu.scheduling [--ranks 2 4 8] [--rounds N] [--json FILE]

1 KiB over gloo on this machine, 100 in a row, in turns of both policies; medians over the rounds, in wall time and in CPU
time per rank with all of its threads.
"""

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from megalite.parity.pool import RankContext, RankPool

POLICIES = {"usual": os.SCHED_OTHER, "batch": os.SCHED_BATCH}
CALLS = 100


def set_policy(policy: int) -> None:
    """Of all threads of this process; threads to come inherit it."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))


def turns(context: RankContext, ranks: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Policy -> (wall, CPU) milliseconds of a call, round by round."""
    world, number = context.topology(dp=ranks).world, torch.zeros(256)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in POLICIES}
    for order in common.shuffled(list(POLICIES), rounds):
        for name in order:
            set_policy(POLICIES[name])
            for _ in range(5):
                world.all_reduce(number)
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                world.all_reduce(number)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            found[name].append((1e3 * wall / CALLS, 1e3 * cpu / CALLS))
    return found


def measure(ranks: int, rounds: int) -> dict[str, Any]:
    with RankPool(ranks) as pool:
        found = pool.run(ranks, turns, ranks, rounds)[0]
    row: dict[str, Any] = {"ranks": ranks}
    for name, times in found.items():
        wall, cpu = (statistics.median(values) for values in zip(*times, strict=True))
        row[name] = {"wall_ms": round(wall, 3), "cpu_ms": round(cpu, 3)}
    return {**row, "faster": round(row["usual"]["wall_ms"] / row["batch"]["wall_ms"], 2)}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(words)
    rows = []
    print(f"{'ranks':>5} {'usual':>20} {'batch':>20} {'faster':>7}")
    for ranks in arguments.ranks:
        rows.append(row := measure(ranks, arguments.rounds))
        cells = (f"{row[name]['wall_ms']:.2f} ms, {row[name]['cpu_ms']:.2f} CPU" for name in POLICIES)
        print(f"{ranks:>5} {next(cells):>20} {next(cells):>20} {row['faster']:>6.2f}x", flush=True)
    common.write_json(arguments.json, "cpu.scheduling", words, {"rows": rows})


if __name__ == "__main__":
    main()
