"""DAPPLE's headline (arXiv 2007.01045): 1.6 times GPipe's throughput in 12 % less memory, simulated and on real ranks.

The gain is more microbatches under a fixed memory cap. With two stages, a microbatch of t seconds and a fixed time a
step, T(M) = (M + 1)·t + overhead, and a stage holds W + A·(graphs alive): GPipe holds M graphs, 1F1B at most 2. What A,
W, t and the overhead are follows from the paper's own rows for BERT-48 (two stages, microbatches of 2, 16 GB).
"""

import statistics
import sys
import time
from typing import Any, NamedTuple

from pipeline_sleep import CappedMemory, Durations, SleepingRank, step_times, timed_steps

from megalite.parity.pool import RankContext, RankPool
from megalite.pipeline.ir.errors import ScheduleError
from megalite.pipeline.ir.generators.registry import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate

RANKS, MICRO = 2, 2
ACTIVATION_GB, WEIGHTS_GB, CAP_GB = 3.0, 6.1, 16.0
MICROBATCH_SECONDS, OVERHEAD_SECONDS = 0.226, 0.07

SCALE = 0.5
"""Real ranks sleep this part of the times."""


class Row(NamedTuple):
    """A run of the paper's table, or one that it leaves out."""

    system: str
    schedule: str
    microbatches: int
    paper_throughput: float | None
    """Samples/s; None: the paper has no such run, or it ran out of memory."""
    paper_gb: float | None


ROWS = (
    Row("GPipe", "gpipe", 2, 5.10, 12.1),
    Row("GPipe", "gpipe", 3, None, None),
    Row("GPipe", "gpipe", 8, None, None),
    Row("DAPPLE", "1f1b", 2, 5.10, 10.6),
    Row("DAPPLE", "1f1b", 8, 7.60, 10.6),
    Row("DAPPLE", "1f1b", 16, 8.18, 10.6),
)
"""Throughput and memory (mean of the two devices) of BERT-48."""


def program_of(schedule: str, microbatches: int) -> Program:
    """Two stages, lowered."""
    return lower(build_schedule(schedule, num_ranks=RANKS, num_chunks=1, num_microbatches=microbatches))


def memory_gb(program: Program) -> tuple[float, ...] | None:
    """Per rank what the validator's replay says is held; None if it refuses the program for the cap."""
    sizes = Sizes.uniform(RANKS, activation=ACTIVATION_GB)
    try:
        report = validate(program, sizes=sizes, limit=CAP_GB - WEIGHTS_GB)
    except ScheduleError:
        return None
    assert report.peak_bytes is not None
    return tuple(WEIGHTS_GB + peak.size for peak in report.peak_bytes)


def simulated_seconds(program: Program) -> float:
    """A step with the paper's costs."""
    third = MICROBATCH_SECONDS / 3
    return (
        simulate(program, Costs.uniform(RANKS, forward=third, backward=2 * third)).makespan + OVERHEAD_SECONDS
    )


def throughput(microbatches: int, seconds: float) -> float:
    """Samples/s."""
    return microbatches * MICRO / seconds


def most_microbatches(schedule: str, limit: int = 64) -> int:
    """The largest number, up to `limit`, that the cap allows."""
    return max(m for m in range(1, limit + 1) if memory_gb(program_of(schedule, m)) is not None)


def run_rank(context: RankContext, row: Row, steps: int) -> tuple[list[tuple[float, float]], float]:
    """Steps on one rank with sleeping stages, and the most that its memory held."""
    topology = context.topology(pp=RANKS)
    third = SCALE * MICROBATCH_SECONDS / 3
    memory = CappedMemory(WEIGHTS_GB, ACTIVATION_GB, CAP_GB)
    program = program_of(row.schedule, row.microbatches)
    me = SleepingRank(program, context.rank, topology.edges, Durations.equal(third), memory=memory)

    def step() -> None:
        me.executor.run()
        time.sleep(SCALE * OVERHEAD_SECONDS)

    return timed_steps(topology.world, step, steps + 1)[1:], memory.peak


def bench_dapple(pool: RankPool, *, steps: int) -> dict[str, Any]:
    """Every row simulated and, where it fits, run; then the ratios that the paper's abstract states."""
    rows = []
    for row in ROWS:
        program = program_of(row.schedule, row.microbatches)
        replayed = memory_gb(program)
        found: dict[str, Any] = {
            **row._asdict(),
            "fits": replayed is not None,
            "simulated_throughput": throughput(row.microbatches, simulated_seconds(program)),
        }
        if replayed is not None:
            ranks = pool.run(RANKS, run_rank, row, steps)
            seconds = statistics.median(step_times([times for times, _ in ranks])) / SCALE
            found["simulated_gb"] = statistics.mean(replayed)
            found["measured_gb"] = statistics.mean(peak for _, peak in ranks)
            found["measured_throughput"] = throughput(row.microbatches, seconds)
        rows.append(found)
        print(found, file=sys.stderr)
    return {
        "activation_gb": ACTIVATION_GB,
        "weights_gb": WEIGHTS_GB,
        "cap_gb": CAP_GB,
        "microbatch_s": MICROBATCH_SECONDS,
        "overhead_s": OVERHEAD_SECONDS,
        "scale_of_measured_times": SCALE,
        "gpipe_most_microbatches": most_microbatches("gpipe"),
        "rows": rows,
        "ratios": {way: ratios(rows, way) for way in ("paper", "simulated", "measured")},
    }


def ratios(rows: list[dict[str, Any]], way: str) -> dict[str, float | None]:
    """What the headline compares, by the figures of one way of knowing them."""
    by_run = {(row["schedule"], row["microbatches"]): row for row in rows}
    two, three, best = by_run["gpipe", 2], by_run["gpipe", 3], by_run["1f1b", 16]
    speed, memory = f"{way}_throughput", f"{way}_gb"
    return {
        "throughput: DAPPLE M=16 / GPipe M=2": best[speed] / two[speed],
        "throughput: DAPPLE M=16 / GPipe M=2 of the paper": best[speed] / two["paper_throughput"],
        "throughput: DAPPLE M=16 / GPipe M=3": best[speed] / three[speed] if three[speed] else None,
        "memory: DAPPLE / GPipe M=2, change": best[memory] / two[memory] - 1.0,
    }


def dapple_table(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows: runs, then ratios."""

    def shown(row: dict[str, Any], key: str, form: str) -> str:
        value = row.get(key)
        return "-" if value is None else format(value, form)

    ways = ("paper", "simulated", "measured")
    table = [["", *ways]]
    for row in result["rows"]:
        name = f"{row['system']} M={row['microbatches']}"
        if not row["fits"]:
            table.append([f"{name}, {CAP_GB:g} GB", "-", "refused", "not started"])
            continue
        table.append([f"{name}, samples/s", *(shown(row, f"{way}_throughput", ".2f") for way in ways)])
        table.append([f"{name}, GB", *(shown(row, f"{way}_gb", ".1f") for way in ways)])
    for name in result["ratios"]["paper"]:
        form = ".1%" if name.startswith("memory") else ".3f"
        table.append([name, *(shown(result["ratios"][way], name, form) for way in ways)])
    return table
