#!/usr/bin/env python3
"""Where a step of step_vs_peers.py goes, megalite's beside a peer's, on one rank.

    OMP_NUM_THREADS=1 python benchmarks/step_vs_peers_profile.py [--model wide] [--peer "plain torch"] [--bf16] [--threads 2]

Milliseconds of each kind of operation and of the largest operations alone (the least over some steps that torch's
profiler watched, in turns), how often they ran, CPU seconds of a step that nobody watched, and its page faults: memory that
the C library gave back to the system and got again, to be cleared by the kernel.
"""

import argparse
import resource
import time
from typing import Any

import step_vs_peers
import step_vs_peers_worker as worker
from peer_case import LAYOUTS, Case
from profile_step import category
from torch.profiler import ProfilerActivity, profile

from megalite.parity.pool import RankContext, RankPool


def watched(context: RankContext) -> dict[str, list[float]]:
    """Milliseconds and number of each operation in the next step."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        worker.train(context, 1)
    return {event.key: [event.self_cpu_time_total / 1e3, event.count] for event in profiler.key_averages()}


def unwatched(context: RankContext) -> dict[str, float]:
    """What the next step costs as a whole."""
    before, cpu = resource.getrusage(resource.RUSAGE_SELF), time.process_time()
    worker.train(context, 1)
    cpu, after = time.process_time() - cpu, resource.getrusage(resource.RUSAGE_SELF)
    return {
        "CPU seconds": cpu,
        "of them in the kernel": after.ru_stime - before.ru_stime,
        "page faults": after.ru_minflt - before.ru_minflt,
    }


def measure(case: Case, names: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """The least of each figure over the rounds, by contender."""
    pools = {name: RankPool(1) for name in names}
    found: dict[str, dict[str, Any]] = {name: {"operations": {}, "whole": {}} for name in names}
    try:
        for name, pool in pools.items():
            pool.run(1, worker.build, name, case)
            pool.run(1, worker.train, 2, timeout=600.0)
        for _ in range(rounds):
            for name, pool in pools.items():
                (whole,) = pool.run(1, unwatched, timeout=600.0)
                for key, value in whole.items():
                    found[name]["whole"][key] = min(value, found[name]["whole"].get(key, value))
            for name, pool in pools.items():
                (operations,) = pool.run(1, watched, timeout=600.0)
                for key, value in operations.items():
                    found[name]["operations"][key] = min(value, found[name]["operations"].get(key, value))
    finally:
        for pool in pools.values():
            pool.stop()
    return found


def report(found: dict[str, dict[str, Any]], largest: int) -> str:
    """Kinds of operations, then single ones, those with the largest differences first."""
    names = list(found)
    lines = [f"{'':<58}" + "".join(f"{name:>22}" for name in names)]
    for key in next(iter(found.values()))["whole"]:
        lines.append(f"{key:<58}" + "".join(f"{found[name]['whole'][key]:>22.6g}" for name in names))
    kinds: dict[str, dict[str, float]] = {}
    for name in names:
        for key, (milliseconds, _) in found[name]["operations"].items():
            row = kinds.setdefault(category(key), dict.fromkeys(names, 0.0))
            row[name] += milliseconds
    lines.append("milliseconds of")
    for kind, row in sorted(kinds.items(), key=lambda item: -max(item[1].values())):
        lines.append(f"  {kind:<56}" + "".join(f"{row[name]:>22.1f}" for name in names))
    every = {key for name in names for key in found[name]["operations"]}
    nothing = [0.0, 0]
    rows = {key: [found[name]["operations"].get(key, nothing) for name in names] for key in every}
    shown = sorted(rows, key=lambda key: -max(cell[0] for cell in rows[key]))[:largest]
    for key in sorted(shown, key=lambda key: -abs(rows[key][0][0] - rows[key][-1][0])):
        cells = "".join(f"{milliseconds:>13.1f} in{count:>6.0f}" for milliseconds, count in rows[key])
        lines.append(f"  {key[:56]:<56}{cells}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=step_vs_peers.MODELS, default="small")
    parser.add_argument("--peer", choices=worker.CONTENDERS, default="plain torch")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, watched and not (3)")
    parser.add_argument("--largest", type=int, default=30, help="single operations that are shown (30)")
    arguments = parser.parse_args()
    model = step_vs_peers.MODELS[arguments.model]
    case = Case(
        size=model.size,
        layout=LAYOUTS["1" if arguments.threads == 1 else "1.2threads"],
        family=model.family,
        bf16=arguments.bf16,
    )
    print(report(measure(case, [worker.MEGALITE, arguments.peer], arguments.rounds), arguments.largest))


if __name__ == "__main__":
    main()
