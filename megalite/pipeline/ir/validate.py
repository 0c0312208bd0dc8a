"""Prove that a program is complete, correctly wired, free of deadlock and within a memory limit."""

from dataclasses import dataclass

import numpy as np

from megalite.config.byte_size import readable_bytes
from megalite.pipeline.ir.actions import RECVS, SENDS, ScheduleError
from megalite.pipeline.ir.deadlock import prove_no_deadlock
from megalite.pipeline.ir.memory import Peak, Sizes, activation_peaks, exceeds, sufficient, table_peaks
from megalite.pipeline.ir.render import render_lists
from megalite.pipeline.ir.schedule import Program, Schedule
from megalite.pipeline.ir.table import Fault, Table
from megalite.pipeline.ir.wiring import check_computation, wire


@dataclass(frozen=True)
class ValidationReport:
    """Resources of a valid program, per rank. Exact, since they depend on the order of actions only."""

    peak_activations: tuple[int, ...]  # peak number of (stage, microbatch) pairs with live activations
    peak_receives: tuple[int, ...]  # peak number of receive buffers posted and not yet consumed
    sends: tuple[int, ...]  # messages sent in a step
    peak_bytes: tuple[Peak, ...] | None = None
    """Peak memory in the unit of the sizes; None without sizes."""


def validate(program: Program, *, sizes: Sizes | None = None, limit: float | None = None) -> ValidationReport:
    """Prove that the program runs to its end and computes the right results, in time linear in its length.

    Checks: each (stage, microbatch) has one F and, unless forward-only, either one B or one I and one W, and at most
    one R; ids are in range, each action is on the rank of its stage and occurs once; the results that an action reads
    are produced before it; each dependency between ranks has one send after the producer and one receive before the
    consumer, and nothing else is sent; both ends of a channel agree on the order; no rank waits forever, whether a send
    completes at once or only when its receive is posted; each stage has one REDUCE_GRAD, after its B and W; memory.

    `limit`: maximum memory of a rank, in the unit of `sizes`.

    Raises ScheduleError for the first fault. The message names rank, position and action, or the shortest cycle of
    waits, and shows the lists around them."""
    assert limit is None or sizes is not None, "a limit needs sizes"
    try:
        wiring = wire(program)
        prove_no_deadlock(wiring)
        table = wiring.table
        peaks = None if sizes is None else table_peaks(table, sizes, program.send_window)
        if peaks is not None and limit is not None:
            _check_limit(table, peaks, limit)
    except Fault as fault:
        raise ScheduleError(f"{fault}\n{render_lists(program.actions, fault.marks)}") from None
    posted = table.is_kind(*RECVS).astype(np.int64) - table.receives
    return ValidationReport(
        peak_activations=activation_peaks(table, program.send_window),
        peak_receives=tuple(int(np.cumsum(part).max(initial=0)) for part in np.split(posted, table.first[1:-1])),
        sends=tuple(np.bincount(table.rank[table.is_kind(*SENDS)], minlength=len(table.rows)).tolist()),
        peak_bytes=peaks,
    )


def validate_written(schedule: Schedule) -> None:
    """Check the computations of a user's schedule; raise ScheduleError with positions in the user's file.

    Call it before lowering. `validate` then finds the faults that involve messages: deadlock and memory.
    """
    try:
        check_computation(schedule)
    except Fault as fault:
        lists = render_lists(schedule.actions, fault.marks)
        raise ScheduleError(
            f"{fault}\n{lists}\n(rank 0 is the first line; positions count the actions of a line from 0)"
        ) from None


def _check_limit(table: Table, peaks: tuple[Peak, ...], limit: float) -> None:
    above = [rank for rank, peak in enumerate(peaks) if exceeds(peak.size, limit)]
    if not above:
        return
    rank = max(above, key=lambda rank: peaks[rank].size)
    size, position = peaks[rank]
    others = f"; {len(above)} of {len(peaks)} ranks need more than the limit" if len(above) > 1 else ""
    table.fail(
        table.first[rank] + position,
        f"here the rank holds {readable_bytes(size)}, above the limit of {readable_bytes(limit)}{others}; a limit of "
        f"{sufficient(max(peak.size for peak in peaks))} works",
    )
