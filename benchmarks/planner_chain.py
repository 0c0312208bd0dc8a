#!/usr/bin/env python3
"""DAPPLE's planner for chains beside PipeDream's: six synthetic models on four clusters, judged by one simulator.

    OMP_NUM_THREADS=1 python benchmarks/planner_chain.py [--models NAME ...] [--clusters NAME ...] [--memory SIZE]
                                                         [--nominal-messages] [--json FILE]

Each row: the planner's step, how many times longer the steps of PipeDream's plan, of pure data parallelism and of a
straight pipeline are, each with the microbatches and the warm-up that suit it best, and the seconds of processor time
that planning took. Without --memory devices hold any amount, as PipeDream's planner assumes. --nominal-messages lets
messages reach the nominal rate of the Ethernet, instead of DAPPLE's constant of 1 GB/s.
"""

import argparse
import dataclasses
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

from megalite.config.byte_size import parse_byte_size
from megalite.planner.chain.cluster import read_cluster
from megalite.planner.chain.judging import Judged
from megalite.planner.chain.planning import BASELINES, plan_chain
from megalite.planner.chain.twins import TWINS, global_batch, twin

CLUSTERS = ("2x8", "4x8", "16x1", "16x1@10")
"""Of the paper: configuration A, twice as much of it, B and C."""


def bench(model: str, where: str, *, memory: float, nominal: bool) -> dict[str, Any]:
    """One model on one cluster."""
    cluster = read_cluster(where)
    if nominal:
        cluster = dataclasses.replace(cluster, message_gb_per_s=cluster.network_gb_per_s)
    began = time.process_time()
    planned = plan_chain(twin(model), cluster, global_batch(model), memory=memory)
    seconds = time.process_time() - began
    return {
        "model": model,
        "cluster": where,
        "global_batch_size": global_batch(model),
        "plan": shown(planned.best),
        "step_s": planned.best.seconds,
        "times_longer": {
            name: plan.seconds / planned.best.seconds for name, plan in planned.baselines.items()
        },
        "fits": {name: max(plan.memory) <= memory for name, plan in planned.baselines.items()},
        "complete": planned.complete,
        "planning_cpu_s": seconds,
    }


def shown(judged: Judged) -> str:
    """`23:25 layers on 8:8, M=8`."""
    stages = judged.plan.stages
    layers = ":".join(str(stage.last - stage.first) for stage in stages)
    if len(stages) > 6:
        layers = f"{len(stages)} stages"
        devices = f"{min(s.replicas for s in stages)} to {max(s.replicas for s in stages)}"
    else:
        layers = f"{layers} layers"
        devices = ":".join(str(stage.replicas) for stage in stages)
    return f"{layers} on {devices}, M={judged.plan.microbatches}"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | cluster | step, s | PipeDream | data parallel | straight | plan | planning, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = " | ".join(
            f"{row['times_longer'][name]:.2f}" + ("" if row["fits"][name] else " (too large)")
            for name in BASELINES
        )
        lines.append(
            f"| {row['model']} | {row['cluster']} | {row['step_s']:.3f} | {times} | {row['plan']} | "
            f"{row['planning_cpu_s']:.1f} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Plan, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=TWINS, default=TWINS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--memory", type=parse_byte_size, default=float("inf"))
    parser.add_argument("--nominal-messages", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.memory is None:
        parser.error("--memory takes a size such as 16GB")
    rows = []
    for where in arguments.clusters:
        for model in arguments.models:
            row = bench(model, where, memory=arguments.memory, nominal=arguments.nominal_messages)
            print(f"{model} on {where}: {row['planning_cpu_s']:.1f} s", file=sys.stderr)
            rows.append(row)
    ratios = [row["times_longer"]["PipeDream"] for row in rows]
    total = sum(row["planning_cpu_s"] for row in rows)
    print(table(rows))
    print(
        f"\nPipeDream's plans take {min(ratios):.2f} to {max(ratios):.2f} times as long; never slower than any of the "
        f"three: {all(min(row['times_longer'].values()) >= 1.0 for row in rows)}; {total:.0f} s of processor time in all"
    )
    if arguments.json is not None:
        result = {
            "command": sys.argv,
            "python": platform.python_version(),
            "rows": rows,
            "planning_cpu_s": total,
        }
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
