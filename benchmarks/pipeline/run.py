"""Accuracy of the pipeline's simulator and executor, on gloo ranks of this machine.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline.run [--fidelity] [--dapple] [--quick] [--json FILE]

By default both parts run.

--fidelity  8 ranks that sleep instead of computing run every schedule through the real executor and gloo: step times compared with the
            simulator's, which gets the durations of single operations and messages.
--dapple    DAPPLE's headline: the paper's numbers and simulated ones."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.pipeline.fidelity import SCHEDULES, bench_dapple, bench_fidelity, dapple_table, fidelity_table
from megalite.parity.pool import RankPool

FIDELITY_RANKS = 8
OPERATION_SECONDS = 0.04  # F, I and W per rank; each of its two stages has half of it
TABLES = {"fidelity": fidelity_table, "dapple": dapple_table}
"""Part -> function that prints its result."""


def fidelity(arguments: argparse.Namespace) -> dict[str, Any]:
    """The part's result, and the load of the machine before and after it."""
    quick, only, before = arguments.quick, arguments.only, os.getloadavg()[0]
    names = [name for name in SCHEDULES if not only or name in only]
    sizes = {"ranks": FIDELITY_RANKS, "microbatches": 16 if quick else 32, "steps": 1 if quick else arguments.steps}
    with RankPool(FIDELITY_RANKS) as pool:
        result = bench_fidelity(pool, **sizes, seconds=OPERATION_SECONDS, names=names)
    return {**result, "load_before_and_after": [before, os.getloadavg()[0]]}


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__, json_help="write the raw numbers here")
    for part in TABLES:
        parser.add_argument(f"--{part}", action="store_true", help="this part")
    parser.add_argument("--quick", action="store_true", help="fewer microbatches and steps")
    parser.add_argument("--only", nargs="+", metavar="SCHEDULE", help="of fidelity these schedules alone")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of sleeping ranks (5)")
    arguments = parser.parse_args(words)
    unknown = [name for name in arguments.only or () if name not in SCHEDULES]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: the schedules are {', '.join(sorted(SCHEDULES))}")
    record: dict[str, Any] = {}
    for part in [part for part in TABLES if getattr(arguments, part)] or list(TABLES):
        record[part] = fidelity(arguments) if part == "fidelity" else bench_dapple()
        print(f"\n{part}")
        print(common.markdown(TABLES[part](record[part])))
    common.write_json(arguments.json, "pipeline.run", words, record)


if __name__ == "__main__":
    main()
