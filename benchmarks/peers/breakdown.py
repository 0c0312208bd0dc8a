"""Compare where the time of a training step goes, in megalite and in a peer, on each rank of a layout.

    OMP_NUM_THREADS=1 python -m benchmarks.peers.breakdown [--model wide] [--layout tp2] [--peer "plain torch"] [--bf16]

Reports, each as the minimum over some steps in alternation: milliseconds and number of calls per kind of operation and of
the largest operations, by torch's profiler; wall and CPU seconds of a step without the profiler (the difference is waiting,
or a core used by others); page faults (memory that the C library returned to the system and got back, cleared by the
kernel); calls of Python functions and from Python into C, which dominate a step of `--model tiny`."""

import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks import common
from benchmarks.gpu.breakdown import category_of_operation, profiled
from benchmarks.peers import worker
from benchmarks.peers.case import LAYOUTS, Case
from benchmarks.peers.run import MODELS
from megalite.parity.pool import RankContext, RankPool

WHOLE = ("seconds", "CPU seconds", "of them in the kernel", "page faults")
CALLS = {"call": "Python calls", "c_call": "calls from Python into C"}
Figures = dict[str, tuple[float, int]]  # name -> (amount, calls)


def profiled_step(context: RankContext) -> Figures:
    """Run a step under the profiler: milliseconds and calls of each kind of operation and of each operation."""
    operations = profiled(lambda: worker.train(context, 1))[2]
    kinds: Figures = {}
    for name, (milliseconds, calls) in operations.items():
        kind = f"ms of {category_of_operation(name)}"
        before = kinds.get(kind, (0.0, 0))
        kinds[kind] = (before[0] + milliseconds, before[1] + calls)
    return {**kinds, **operations}


def timed_step(context: RankContext) -> Figures:
    """Run a step without the profiler: its total costs."""
    before, cpu, wall = resource.getrusage(resource.RUSAGE_SELF), time.process_time(), time.perf_counter()
    worker.train(context, 1)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    after = resource.getrusage(resource.RUSAGE_SELF)
    amounts = (wall, cpu, after.ru_stime - before.ru_stime, float(after.ru_minflt - before.ru_minflt))
    return {name: (amount, 1) for name, amount in zip(WHOLE, amounts, strict=True)}


def counted_step(context: RankContext) -> Figures:
    """Run a step and count its calls."""
    counts: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: counts.update((event,)))
    try:
        worker.train(context, 1)
    finally:
        sys.setprofile(None)
    return {name: (float(counts[event]), 1) for event, name in CALLS.items()}


def measure(case: Case, names: Sequence[str], rounds: int) -> dict[str, Figures]:
    """Return the minimum of each figure over the rounds, by contender and rank."""
    ranks, found = case.layout.ranks, dict[str, Figures]()
    pools = {name: RankPool(ranks) for name in names}
    try:
        for name, pool in pools.items():
            pool.run(ranks, worker.build, name, case)
            pool.run(ranks, worker.train, 2, timeout=600.0)
        for work in (timed_step, profiled_step, counted_step) * rounds:
            for name, pool in pools.items():
                for rank, figures in enumerate(pool.run(ranks, work, timeout=600.0)):
                    least = found.setdefault(f"{name}, rank {rank}" if ranks > 1 else name, {})
                    least.update({key: min(value, least.get(key, value)) for key, value in figures.items()})
    finally:
        for pool in pools.values():
            pool.stop()
    return found


def report(found: dict[str, Figures], largest: int) -> str:
    """Table of totals, kinds of operations and the largest operations, sorted by their difference."""
    keys = list(dict.fromkeys(key for side in found.values() for key in side))
    rows = {key: [side.get(key, (0.0, 0)) for side in found.values()] for key in keys}
    summed = [key for key in keys if key.startswith(("ms of ", *WHOLE, *CALLS.values()))]
    single = [key for key in keys if key not in summed]
    single = sorted(single, key=lambda key: -max(amount for amount, _ in rows[key]))[:largest]
    single.sort(key=lambda key: -abs(rows[key][0][0] - rows[key][-1][0]))
    table: list[list[str]] = [["", *found]]
    for key in [*summed, *single]:
        table.append([key[:56], *(f"{amount:.6g} in {calls}" for amount, calls in rows[key])])
    return common.markdown(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--peer", choices=worker.CONTENDERS, default="plain torch")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--layout", choices=LAYOUTS, default="1")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each, with and without the profiler (3)")
    parser.add_argument("--largest", type=int, default=30, help="single operations in the table (30)")
    flags = parser.parse_args(words)
    model = MODELS[flags.model]
    case = Case(size=model.size, layout=LAYOUTS[flags.layout], family=model.family, bf16=flags.bf16)
    found = measure(case, [worker.MEGALITE, flags.peer], flags.rounds)
    print(report(found, flags.largest))
    common.write_json(flags.json, "peers.breakdown", words, found)


if __name__ == "__main__":
    main()
