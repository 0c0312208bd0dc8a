"""What the pipeline's simulator, executor and memory replay are worth, measured on gloo ranks of this machine.

    OMP_NUM_THREADS=1 python -m benchmarks.pipeline.run [--fidelity] [--memory] [--dapple] [--quick] [--json FILE]

Without a part's name all three run.

--fidelity  8 ranks whose work is sleep run every schedule through the real executor and gloo: step times beside the
            simulator's, which is given what operations and messages take when they are alone.
--memory    live bytes of gpipe and 1f1b at 16 microbatches beside the validator's replay.
--dapple    DAPPLE's headline: the paper, simulated, and on two real ranks that sleep.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from benchmarks.pipeline.fidelity import SCHEDULES, bench_dapple, bench_fidelity, dapple_table, fidelity_table
from benchmarks.pipeline.gpt import bench_memory, memory_table
from megalite.parity.pool import RankPool

FIDELITY_RANKS = 8
TABLES = {"fidelity": fidelity_table, "memory": memory_table, "dapple": dapple_table}
"""Of each part, how its result is shown."""


def measure(part: str, pool: RankPool, arguments: argparse.Namespace) -> dict[str, Any]:
    """One part's result, with the load of the machine around it."""
    quick, only, before = arguments.quick, arguments.only, os.getloadavg()[0]
    steps = 1 if quick else arguments.steps
    if part == "fidelity":
        names = [name for name in SCHEDULES if not only or name in only]
        count = 16 if quick else 32
        result = bench_fidelity(pool, ranks=FIDELITY_RANKS, microbatches=count, steps=steps, names=names)
    else:
        result = bench_memory(pool, microbatches=4 if quick else 16) if part == "memory" else bench_dapple(pool, steps=steps)
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
    parts = [part for part in TABLES if getattr(arguments, part)] or list(TABLES)
    record: dict[str, Any] = {}
    with RankPool(FIDELITY_RANKS if "fidelity" in parts else 2) as pool:
        for part in parts:
            record[part] = measure(part, pool, arguments)
            print(f"\n{part}, load {record[part]['load_before_and_after']}")
            print(common.markdown(TABLES[part](record[part])))
    common.write_json(arguments.json, "pipeline.run", words, record)


if __name__ == "__main__":
    main()
