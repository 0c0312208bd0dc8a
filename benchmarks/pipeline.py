#!/usr/bin/env python3
"""What the pipeline's simulator, executor and memory replay are worth, measured on gloo ranks of this machine.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py [--fidelity] [--peer] [--memory] [--dapple] [--quick] [--json FILE]

Without a part's name all four run.

--fidelity  8 ranks whose work is sleep run every schedule through the real executor and gloo: step times beside the
            simulator's, which is given what operations and messages take when they are alone.
--peer      a small GPT on 2 and 4 ranks beside torch.distributed.pipelining: the same stages, in turns, with the number
            of matrix products that backwards make.
--memory    live bytes of gpipe and 1f1b at 16 microbatches beside the validator's replay.
--dapple    DAPPLE's headline: the paper, simulated, and on two real ranks that sleep.
"""

import argparse
import json
import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from pipeline_dapple import bench_dapple, dapple_table
from pipeline_fidelity import SCHEDULES, bench_fidelity, fidelity_table
from pipeline_memory import bench_memory, memory_table
from pipeline_peer import PAIRS, bench_peer, peer_table

from megalite.parity.pool import RankPool

FIDELITY_RANKS = 8
TABLES = {
    "fidelity": fidelity_table,
    "peer": peer_table,
    "memory": memory_table,
    "dapple": dapple_table,
}
"""Of each part, how its result is shown."""


def measure(part: str, pool: RankPool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part's result, with the load of the machine around it."""
    quick = arguments.quick
    before = os.getloadavg()[0]
    if part == "fidelity":
        result = bench_fidelity(
            pool,
            ranks=FIDELITY_RANKS,
            microbatches=16 if quick else 32,
            steps=1 if quick else arguments.steps,
            names=[name for name in SCHEDULES if not arguments.only or name in arguments.only],
        )
    elif part == "peer":
        result = bench_peer(
            pool,
            rounds=2 if quick else arguments.rounds,
            ranks=[2] if quick else [2, 4],
            names=[name for name in PAIRS if not arguments.only or name in arguments.only],
        )
    elif part == "memory":
        result = bench_memory(pool)
    else:
        result = bench_dapple(pool, steps=1 if quick else arguments.steps)
    return {**result, "load_before_and_after": [before, os.getloadavg()[0]]}


def print_table(rows: list[list[str]]) -> None:
    """As Markdown, columns aligned."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in rows]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    print("\n".join([lines[0], rule, *lines[1:]]))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for part in TABLES:
        parser.add_argument(f"--{part}", action="store_true", help="this part")
    parser.add_argument("--quick", action="store_true", help="fewer microbatches, steps, rounds and ranks")
    parser.add_argument(
        "--only", nargs="+", help="of the fidelity and peer parts these schedules alone", metavar="SCHEDULE"
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps of sleeping ranks (5)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the comparison with torch (15)")
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    arguments = parser.parse_args()
    known = {*SCHEDULES, *PAIRS}
    unknown = [name for name in arguments.only or () if name not in known]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: the schedules are {', '.join(sorted(known))}")
    parts = [part for part in TABLES if getattr(arguments, part)] or list(TABLES)
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/pipeline.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    with RankPool(FIDELITY_RANKS) as pool:
        for part in parts:
            record[part] = measure(part, pool, arguments)
            print(f"\n{part}, load {record[part]['load_before_and_after']}")
            print_table(TABLES[part](record[part]))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
