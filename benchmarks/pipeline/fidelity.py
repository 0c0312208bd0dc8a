"""Measured step times of the executor compared with simulated ones, for every schedule."""

import statistics
import sys
from typing import Any, NamedTuple

from benchmarks.pipeline.sleep import (
    Durations,
    SleepingRank,
    costs_of,
    measured_durations,
    message_latency,
    step_times,
    timed_steps,
)
from megalite.parity.pool import RankContext, RankPool
from megalite.pipeline.ir.auto import build_auto
from megalite.pipeline.ir.generators import build_schedule, loop_placement, v_placement
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.memory import Sizes
from megalite.pipeline.ir.schedule import Program, Schedule, ScheduleError
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate

NAMED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpipe": ("gpipe", 1, {}),
    "1f1b": ("1f1b", 1, {}),
    "1f1b, warm-up pb": ("1f1b", 1, {"warm_up": "pb"}),
    "1f1b, recompute ahead": ("1f1b", 1, {"recompute_ahead": True}),
    "interleaved, 2 chunks": ("interleaved", 2, {}),
    "looped-bfs, 2 chunks": ("looped-bfs", 2, {}),
    "zb-h1": ("zb-h1", 1, {}),
    "zb-h2": ("zb-h2", 1, {}),
    "zb-v": ("zb-v", 2, {}),
    "dualpipe-v": ("dualpipe-v", 2, {}),
}
AUTO = {"auto": 1, "auto, V": 2}
SCHEDULES = (*NAMED, *AUTO)


def schedule_of(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    """The schedule of a row of the table."""
    if name in AUTO:
        placement = loop_placement(ranks, 1) if AUTO[name] == 1 else v_placement(ranks)
        return build_auto(placement, microbatches, costs)
    family, chunks, options = NAMED[name]
    sizes = {"num_ranks": ranks, "num_chunks": chunks, "num_microbatches": microbatches}
    return build_schedule(family, **sizes, **options)


def run_rank(context: RankContext, schedule: Schedule, durations: Durations, steps: int) -> list[tuple[float, float]]:
    """Run a warm-up step and `steps` measured ones on one rank."""
    topology = context.topology(pp=schedule.num_ranks, placement=schedule.placement)
    me = SleepingRank(lower(schedule), context.rank, topology.edges, durations)
    return timed_steps(topology.world, me.executor.run, steps + 1)[1:]


def calibrate(context: RankContext, durations: Durations) -> dict[Any, float]:
    """Measure durations of operations on this rank while the others are idle."""
    return measured_durations(durations)


def bench_fidelity(
    pool: RankPool, *, ranks: int, microbatches: int, steps: int, seconds: float, names: list[str]
) -> dict[str, Any]:
    """Simulate each schedule with costs measured on one rank, then run it; an operation of a whole rank takes `seconds`."""
    durations = {chunks: Durations.equal(seconds / chunks) for chunks in (1, 2)}
    took = {chunks: pool.run(1, calibrate, durations[chunks])[0] for chunks in durations}
    p2p = pool.run(2, message_latency, 20 * steps)[0]
    rows = []
    for name in names:
        chunks = AUTO[name] if name in AUTO else NAMED[name][1]

        def costs(split: bool, recomputed: bool, chunks: int = chunks) -> Costs:
            return costs_of(took[chunks], ranks * chunks, split=split, recomputed=recomputed, p2p=p2p)

        schedule = schedule_of(name, ranks, microbatches, costs(split=True, recomputed=False))
        program = lower(schedule)
        validate(program)
        simulated = simulate(program, costs(bool(schedule.split), bool(schedule.recomputed))).makespan
        measured = step_times(pool.run(ranks, run_rank, schedule, durations[chunks], steps))
        middle = statistics.median(measured)
        row = {"schedule": name, "measured_ms": 1e3 * middle, "simulated_ms": 1e3 * simulated}
        rows.append({**row, "ratio": middle / simulated, "steps_ms": [1e3 * value for value in measured]})
        print(f"{name}: {middle:.3f} s, simulated {simulated:.3f} s, {middle / simulated:.4f}", file=sys.stderr)
    operations = {
        f"{chunks} stage{'s' * (chunks > 1)} a rank": {str(kind): 1e3 * seconds for kind, seconds in each.items()}
        for chunks, each in took.items()
    }
    counts = {"ranks": ranks, "microbatches": microbatches, "steps": steps}
    return {**counts, "operation_ms": operations, "message_ms": 1e3 * p2p, "rows": rows}


def fidelity_table(result: dict[str, Any]) -> list[list[str]]:
    table = [["schedule", "measured, ms", "simulated, ms", "measured / simulated"]]
    for row in result["rows"]:
        milliseconds = (f"{row[key]:.0f}" for key in ("measured_ms", "simulated_ms"))
        table.append([row["schedule"], *milliseconds, f"{row['ratio']:.4f}"])
    return table


RANKS, MICRO = 2, 2
WAYS = ("paper", "simulated")
ACTIVATION_GB, WEIGHTS_GB, CAP_GB = 3.0, 6.1, 16.0
MICROBATCH_SECONDS, OVERHEAD_SECONDS = 0.226, 0.07


class Row(NamedTuple):
    """A run of the paper's table, or one that the paper omits."""

    system: str
    schedule: str
    microbatches: int
    paper_throughput: float | None  # samples/s; None if the paper has no such run, or it ran out of memory
    paper_gb: float | None


ROWS = (  # throughput and memory (mean of the two devices) of BERT-48
    Row("GPipe", "gpipe", 2, 5.10, 12.1),
    Row("GPipe", "gpipe", 3, None, None),
    Row("GPipe", "gpipe", 8, None, None),
    Row("DAPPLE", "1f1b", 2, 5.10, 10.6),
    Row("DAPPLE", "1f1b", 8, 7.60, 10.6),
    Row("DAPPLE", "1f1b", 16, 8.18, 10.6),
)


def program_of(schedule: str, microbatches: int) -> Program:
    return lower(build_schedule(schedule, num_ranks=RANKS, num_chunks=1, num_microbatches=microbatches))


def memory_gb(program: Program) -> tuple[float, ...] | None:
    """Memory per rank by the validator's replay; None if it refuses the program for the cap."""
    sizes = Sizes.uniform(RANKS, activation=ACTIVATION_GB)
    try:
        report = validate(program, sizes=sizes, limit=CAP_GB - WEIGHTS_GB)
    except ScheduleError:
        return None
    assert report.peak_bytes is not None
    return tuple(WEIGHTS_GB + peak.size for peak in report.peak_bytes)


def simulated_seconds(program: Program) -> float:
    third = MICROBATCH_SECONDS / 3
    costs = Costs.uniform(RANKS, forward=third, backward=2 * third)
    return simulate(program, costs).makespan + OVERHEAD_SECONDS


def throughput(microbatches: int, seconds: float) -> float:
    return microbatches * MICRO / seconds


def most_microbatches(schedule: str, limit: int = 64) -> int:
    """The largest number, up to `limit`, within the cap."""
    return max(m for m in range(1, limit + 1) if memory_gb(program_of(schedule, m)) is not None)


def bench_dapple() -> dict[str, Any]:
    """Simulate every row, then compute the ratios of the paper's abstract."""
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
            found["simulated_gb"] = statistics.mean(replayed)
        rows.append(found)
    gigabytes = {"activation_gb": ACTIVATION_GB, "weights_gb": WEIGHTS_GB, "cap_gb": CAP_GB}
    times = {"microbatch_s": MICROBATCH_SECONDS, "overhead_s": OVERHEAD_SECONDS}
    by_way = {way: ratios(rows, way) for way in WAYS}
    most = most_microbatches("gpipe")
    return {**gigabytes, **times, "gpipe_most_microbatches": most, "rows": rows, "ratios": by_way}


def ratios(rows: list[dict[str, Any]], way: str) -> dict[str, float | None]:
    """The ratios of the headline, from measured or simulated figures."""
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

    table = [["", *WAYS]]
    for row in result["rows"]:
        name = f"{row['system']} M={row['microbatches']}"
        if not row["fits"]:
            table.append([f"{name}, {CAP_GB:g} GB", "-", "refused"])
            continue
        table.append([f"{name}, samples/s", *(shown(row, f"{way}_throughput", ".2f") for way in WAYS)])
        table.append([f"{name}, GB", *(shown(row, f"{way}_gb", ".1f") for way in WAYS)])
    for name in result["ratios"]["paper"]:
        form = ".1%" if name.startswith("memory") else ".3f"
        table.append([name, *(shown(result["ratios"][way], name, form) for way in WAYS)])
    return table
