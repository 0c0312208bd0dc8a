"""DAPPLE's planner for chains beside PipeDream's: six synthetic models on four clusters, judged by one simulator.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.chain [--models NAME ...] [--clusters NAME ...] [--memory SIZE]
                                                         [--nominal-messages] [--json FILE]

Each row: the planner's step, how many times longer the steps of PipeDream's plan, of pure data parallelism and of a
straight pipeline are, each with the microbatches and the warm-up that suit it best, and the seconds of processor time
that planning took. Without --memory devices hold any amount, as PipeDream's planner assumes. --nominal-messages lets
messages reach the nominal rate of the Ethernet, instead of DAPPLE's constant of 1 GB/s.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import common
from megalite.config.byte_size import parse_byte_size
from megalite.planner.chain.inputs import TWINS, global_batch, read_cluster, twin
from megalite.planner.chain.plan import Judged
from megalite.planner.chain.planning import BASELINES, plan_chain

CLUSTERS = ("2x8", "4x8", "16x1", "16x1@10")  # of the paper: configuration A, twice as much of it, B and C


def bench(model: str, where: str, *, memory: float, nominal: bool) -> dict[str, Any]:
    cluster = read_cluster(where)
    if nominal:
        cluster = dataclasses.replace(cluster, message_gb_per_s=cluster.network_gb_per_s)
    began = time.process_time()
    planned = plan_chain(twin(model), cluster, global_batch(model), memory=memory)
    seconds = time.process_time() - began
    best, others = planned.best, planned.baselines
    row = {"model": model, "cluster": where, "global_batch_size": global_batch(model), "plan": shown(best)}
    row |= {"step_s": best.seconds, "complete": planned.complete, "planning_cpu_s": seconds}
    row["times_longer"] = {name: plan.seconds / best.seconds for name, plan in others.items()}
    return {**row, "fits": {name: max(plan.memory) <= memory for name, plan in others.items()}}


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
    header = ["model", "cluster", "step, s", "PipeDream", "data parallel", "straight", "plan", "planning, s"]
    cells = []
    for row in rows:
        fits = {name: "" if row["fits"][name] else " (too large)" for name in BASELINES}
        times = (f"{row['times_longer'][name]:.2f}{fits[name]}" for name in BASELINES)
        end = (row["plan"], f"{row['planning_cpu_s']:.1f}")
        cells.append([row["model"], row["cluster"], f"{row['step_s']:.3f}", *times, *end])
    return common.markdown([header, *cells])


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=TWINS, default=TWINS)
    parser.add_argument("--clusters", nargs="+", default=CLUSTERS)
    parser.add_argument("--memory", type=parse_byte_size, default=math.inf)
    parser.add_argument("--nominal-messages", action="store_true")
    flags = parser.parse_args(words)
    if flags.memory is None:
        parser.error("--memory takes a size such as 16GB")
    rows = []
    for where in flags.clusters:
        for model in flags.models:
            rows.append(bench(model, where, memory=flags.memory, nominal=flags.nominal_messages))
            print(f"{model} on {where}: {rows[-1]['planning_cpu_s']:.1f} s", file=sys.stderr)
    ratios = [row["times_longer"]["PipeDream"] for row in rows]
    never = all(min(row["times_longer"].values()) >= 1.0 for row in rows)
    total = sum(row["planning_cpu_s"] for row in rows)
    print(table(rows))
    print(
        f"\nPipeDream's plans take {min(ratios):.2f} to {max(ratios):.2f} times as long; never slower than any of the "
        f"three: {never}; {total:.0f} s of processor time in all"
    )
    common.write_json(flags.json, "planner.chain", words, {"rows": rows, "planning_cpu_s": total})


if __name__ == "__main__":
    main()
