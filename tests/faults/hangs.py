"""`python -m tests.faults.hangs [N]`: N runs stop at random ranks, steps and layouts, each in its own way.

Of each: whether the right rank was named, and how long after the last step's line the last rank had ended, less the limit.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from megalite.config.exit_codes import HUNG
from tests.e2e.hung_runs import SECONDS, hang

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2": (2, ("--tp", "2")),
    "pp 2": (2, ("--pp", "2")),
    "dp 2": (2, ("--dp", "2")),
    "tp 2, pp 2": (4, ("--tp", "2", "--pp", "2")),
    "ZeRO-1, dp 2": (2, ("--dp", "2", "--dp-strategy", "distributed-optimizer")),
    "tp 2, dp 2": (4, ("--tp", "2", "--dp", "2")),
}
FAULTS = ("sleep", "stop", "hold", "skip")


def main() -> int:
    """Run them; prints a line each and a report in JSON."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.hangs", description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=int, nargs="?", default=10, help="how many; default 10")
    parser.add_argument("--seed", type=int, default=0, help="which ones; default 0")
    arguments = parser.parse_args()
    right: Counter[str] = Counter()
    wrong, slowest = [], 0.0
    for number in range(arguments.runs):
        draw = random.Random(f"{arguments.seed} {number}")
        layout = draw.choice(list(LAYOUTS))
        ranks, flags = LAYOUTS[layout]
        fault, rank, step = draw.choice(FAULTS), draw.randrange(ranks), draw.randint(2, 6)
        with tempfile.TemporaryDirectory() as folder:
            end = hang(Path(folder), fault, rank, flags, ranks, step)
        late = end.seconds - SECONDS
        good = end.report.get("culprits") == [rank] and end.statuses == [HUNG] * ranks and late < 5
        right[fault] += good
        slowest = max(slowest, late)
        line = f"{number:3}  {layout:<14} rank {rank} {fault:<6} step {step}: T + {late:.1f} s"
        print(line if good else f"{line}; WRONG: {end.report.get('culprits')}, {end.statuses}", flush=True)
        if not good:
            wrong.append({"run": number, "said": end.said})
            print(end.said, flush=True)
    report = {"runs": arguments.runs, "right": dict(right), "slowest": round(slowest, 2), "wrong": wrong}
    print(json.dumps(report))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
