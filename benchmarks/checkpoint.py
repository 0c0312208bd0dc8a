#!/usr/bin/env python3
"""How fast checkpoints are written and read, beside the bare file system, torch DCP and torch.save.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--rounds 7] [--folder DIR] [--json FILE]

Every round does each once, in another order, on the same bytes of the same training state and with fsync; files are read after the
system was made to forget them. Bandwidths are of the round's raw ones (medians over the rounds).
"""

import argparse
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checkpoint_convert import convert_round
from checkpoint_io import Seconds, saving_round
from checkpoint_stall import stall_round

from megalite.parity.pool import RankPool


def table(rounds: list[tuple[Seconds, Seconds, int]]) -> list[dict[str, Any]]:
    """By way: MB/s and the ratio to the raw one of the same round, medians."""
    size = rounds[0][2]
    rows = []
    for way in sorted(rounds[0][0], key=lambda name: (name != "raw", name)):
        row: dict[str, Any] = {"way": way}
        for name, index in (("save", 0), ("load", 1)):
            if all(way in one[index] for one in rounds):
                row[f"{name} MB/s"] = statistics.median(size / one[index][way] / 1e6 for one in rounds)
                row[f"{name} of raw"] = statistics.median(
                    one[index]["raw"] / one[index][way] for one in rounds
                )
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """As Markdown."""
    columns = ["way", "save MB/s", "save of raw", "load MB/s", "load of raw"]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        print("| " + " | ".join(_cell(cell) for cell in cells) + " |")


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the folder for temporary files")
    parser.add_argument("--json", type=Path, help="write the raw numbers here")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="checkpoint-", dir=arguments.folder))
    result: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
    }
    try:
        with RankPool(2) as pool:
            for ranks in (1, 2):
                rounds = [
                    pool.run(ranks, saving_round, ranks, str(root), seed, timeout=600)[0]
                    for seed in range(arguments.rounds)
                ]
                print(f"\n{ranks} rank(s), {rounds[0][2] / 1e6:.0f} MB")
                show(table(rounds))
                result[f"{ranks} ranks"] = {"rounds": rounds, "table": table(rounds)}
            stalls = [
                pool.run(2, stall_round, 2, str(root), timeout=600)[0]
                for _ in range(max(1, arguments.rounds // 2))
            ]
        stall = {name: statistics.median(one[name] for one in stalls) for name in stalls[0]}
        result["stall"] = {"rounds": stalls, "median": stall}
        print(
            f"\nA save stalls training for {stall['sync call'] / stall['step']:.2f} steps; in the background for "
            f"{stall['async call'] / stall['step']:.2f}, and while it is written ({stall['written']:.2f} s) a step takes "
            f"{stall['step beside'] / stall['step']:.2f} of its time ({stall['step'] * 1e3:.0f} ms)."
        )
        conversions = [convert_round(root) for _ in range(arguments.rounds)]
        result["conversion"] = conversions
        print(
            f"\nConversion of {conversions[0]['bytes'] / 1e6:.0f} MB of weights, of a plain copy with fsync:"
        )
        for name in conversions[0]["seconds"]:
            rate = statistics.median(one["bytes"] / one["seconds"][name] / 1e6 for one in conversions)
            ratio = statistics.median(one["seconds"]["copy"] / one["seconds"][name] for one in conversions)
            print(f"  {name:<28} {rate:6.0f} MB/s  {ratio:.2f}")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    result["load_after"] = os.getloadavg()[0]
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
