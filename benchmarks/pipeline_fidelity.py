"""Measured step times of the executor beside simulated ones, for every schedule."""

import statistics
import sys
from typing import Any

from pipeline_sleep import (
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
from megalite.pipeline.ir.generators.placements import loop_placement, v_placement
from megalite.pipeline.ir.generators.registry import build_schedule
from megalite.pipeline.ir.lower import lower
from megalite.pipeline.ir.schedule import Schedule
from megalite.pipeline.ir.simulate import Costs, simulate
from megalite.pipeline.ir.validate import validate

OPERATION_SECONDS = 0.04
"""F, I and W of a whole rank; a rank with two stages has half of it in each."""

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


def chunks_of(name: str) -> int:
    """Stages on a rank."""
    return AUTO[name] if name in AUTO else NAMED[name][1]


def schedule_of(name: str, ranks: int, microbatches: int, costs: Costs) -> Schedule:
    """The schedule of one row of the table."""
    if name in AUTO:
        placement = loop_placement(ranks, 1) if AUTO[name] == 1 else v_placement(ranks)
        return build_auto(placement, microbatches, costs)
    family, chunks, options = NAMED[name]
    return build_schedule(
        family, num_ranks=ranks, num_chunks=chunks, num_microbatches=microbatches, **options
    )


def run_rank(
    context: RankContext, schedule: Schedule, durations: Durations, steps: int
) -> list[tuple[float, float]]:
    """A warm-up step and `steps` measured ones on one rank."""
    topology = context.topology(pp=schedule.num_ranks, placement=schedule.placement)
    me = SleepingRank(lower(schedule), context.rank, topology.edges, durations)
    return timed_steps(topology.world, me.executor.run, steps + 1)[1:]


def calibrate(context: RankContext, durations: Durations) -> dict[Any, float]:
    """What operations take on this rank; called on one rank while the others have nothing to do."""
    return measured_durations(durations)


def bench_fidelity(
    pool: RankPool, *, ranks: int, microbatches: int, steps: int, names: list[str]
) -> dict[str, Any]:
    """Each schedule simulated with the costs measured on one rank, then run."""
    durations = {chunks: Durations.equal(OPERATION_SECONDS / chunks) for chunks in (1, 2)}
    took = {chunks: pool.run(1, calibrate, durations[chunks])[0] for chunks in durations}
    p2p = pool.run(2, message_latency, 100)[0]
    rows = []
    for name in names:
        chunks = chunks_of(name)

        def costs(split: bool, recomputed: bool, chunks: int = chunks) -> Costs:
            return costs_of(took[chunks], ranks * chunks, split=split, recomputed=recomputed, p2p=p2p)

        schedule = schedule_of(name, ranks, microbatches, costs(split=True, recomputed=False))
        program = lower(schedule)
        validate(program)
        simulated = simulate(program, costs(bool(schedule.split), bool(schedule.recomputed))).makespan
        measured = step_times(pool.run(ranks, run_rank, schedule, durations[chunks], steps))
        middle = statistics.median(measured)
        rows.append(
            {
                "schedule": name,
                "measured_ms": 1e3 * middle,
                "simulated_ms": 1e3 * simulated,
                "ratio": middle / simulated,
                "steps_ms": [1e3 * value for value in measured],
            }
        )
        print(
            f"{name}: {middle:.3f} s, simulated {simulated:.3f} s, {middle / simulated:.4f}", file=sys.stderr
        )
    return {
        "ranks": ranks,
        "microbatches": microbatches,
        "steps": steps,
        "operation_ms": {
            f"{chunks} stage{'s' * (chunks > 1)} a rank": {
                str(kind): 1e3 * seconds for kind, seconds in took[chunks].items()
            }
            for chunks in took
        },
        "message_ms": 1e3 * p2p,
        "rows": rows,
    }


def fidelity_table(result: dict[str, Any]) -> list[list[str]]:
    """Header and rows."""
    table = [["schedule", "measured, ms", "simulated, ms", "measured / simulated"]]
    table += [
        [
            row["schedule"],
            f"{row['measured_ms']:.0f}",
            f"{row['simulated_ms']:.0f}",
            f"{row['ratio']:.4f}",
        ]
        for row in result["rows"]
    ]
    return table
