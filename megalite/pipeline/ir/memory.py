"""Compute a program's peak memory by replaying each rank's list."""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.pipeline.ir.schedule import GRADIENTS, NEEDS, RECVS, SENDS, Kind, Program
from megalite.pipeline.ir.table import CODES, NOWHERE, IntArray, Table


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Memory of one microbatch on each virtual stage, in bytes or any other unit."""

    activation: tuple[float, ...]
    """Tensors saved by the graph, including the stage's input: from F, or R if it exists, to B or I."""
    deferred: tuple[float, ...]
    """Tensors that W needs: from I to W. They grow while I frees the graph, so I needs only the larger of the two."""
    kept_input: tuple[float, ...]  # the stage input that an F keeps for an R: from F to B or I
    message: float = 0.0
    """A tensor between two stages: on the receiver from the posting of its receive, or from its producer on the same
    rank, to its reader; on the sender from its send until the send is known to be complete."""
    workspace: tuple[float, ...] | None = None
    """Memory that a B or I needs only while it runs, such as recomputed activations. Default 0."""

    @classmethod
    def uniform(
        cls,
        count: int,
        *,
        activation: float = 1.0,
        deferred: float = 0.0,
        kept_input: float = 0.0,
        message: float = 0.0,
    ) -> "Sizes":
        columns = {"activation": activation, "deferred": deferred, "kept_input": kept_input}
        return cls(**{name: (size,) * count for name, size in columns.items()}, message=message)


class Peak(NamedTuple):
    size: float
    position: int  # of the first action that reaches this size


def memory_peaks(program: Program, sizes: Sizes) -> tuple[Peak, ...]:
    """Return the peak memory of each rank. It depends on the order of actions only, not on their times.

    A stage input, received or passed on within the rank, belongs to the graph from its F on; a gradient is freed by the
    B or I that reads it. A send is known to be complete when the window makes a later send of its channel wait for it,
    or at the end of the step."""
    return table_peaks(Table.of(program.actions, program.schedule), sizes, program.send_window)


def table_peaks(table: Table, sizes: Sizes, send_window: int) -> tuple[Peak, ...]:
    """Return the `memory_peaks` of a program's table."""
    begin, end = _changes(table, sizes, send_window)
    # An action allocates before it frees; its peak is the sum after its allocation.
    changes = np.stack((begin, end), axis=1)
    peaks = []
    for row in np.split(changes, table.first[1:-1]):
        sums = np.cumsum(row.reshape(-1))[::2]
        position = int(np.argmax(sums)) if len(sums) else 0
        peaks.append(Peak(float(sums[position]), position) if sums.max(initial=0.0) > 0 else Peak(0.0, 0))
    return tuple(peaks)


def exceeds(size: float, limit: float) -> bool:
    """Return whether `size` is above the limit by more than rounding errors."""
    return size > limit * (1.0 + 1e-9)


def sufficient(size: float) -> str:
    """Format a limit that a peak of this size satisfies: `30709383168B`, or a number without unit below 1024."""
    # Rounded first, so that a rounding error does not raise the limit by 1.
    return f"{ceil(round(size, 3))}B" if size >= 1024 else f"{ceil(round(size * 1e6, 3)) / 1e6:.10g}"


def activation_peaks(table: Table, send_window: int) -> tuple[int, ...]:
    """Return, per rank, the peak number of (stage, microbatch) pairs with live activations, without deferred W memory.

    A pair's activations live from its F, or from its R if it exists, to its B or I; a forward-only run keeps them only
    during the F. The result depends on the order on the rank only, not on the costs of the actions."""
    return tuple(int(peak.size) for peak in table_peaks(table, Sizes.uniform(table.schedule.num_stages), send_window))


def _changes(table: Table, sizes: Sizes, send_window: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return, by index, the memory that each action allocates at its start and frees (negative) at its end."""
    begin, end = np.zeros((2, len(table.kind)))
    activation, deferred, kept = (
        np.array(values, dtype=np.float64)[table.stage]
        for values in (sizes.activation, sizes.deferred, sizes.kept_input)
    )
    again = table.place[CODES[Kind.R], table.stage, table.microbatch] != NOWHERE
    placement = np.array(table.schedule.placement)
    same = placement[1:] == placement[:-1]
    # Per action, whether it is an F (B or I) with an input (gradient) from a stage of the same rank.
    from_before = table.is_kind(Kind.F) & np.concatenate(([False], same))[table.stage]
    from_after = table.is_kind(*GRADIENTS) & np.concatenate((same, [False]))[table.stage]
    received = np.where(table.receives | from_before | from_after, sizes.message, 0.0)

    forward, inner, weight = (table.is_kind(kind) for kind in (Kind.F, Kind.I, Kind.W))
    made = np.where(again, kept, activation)
    begin[forward] = (made - received)[forward]
    if table.schedule.forward_only:
        end[forward] = -made[forward]
    recompute = table.is_kind(Kind.R)
    begin[recompute] = activation[recompute]
    backward = table.is_kind(*GRADIENTS)
    end[backward] = (-activation - received - np.where(again, kept, 0.0))[backward]
    begin[inner] = np.maximum(deferred - activation, 0.0)[inner]
    end[inner] += np.minimum(deferred, activation)[inner]
    end[weight] = -deferred[weight]
    if sizes.workspace is not None:
        room = np.array(sizes.workspace, dtype=np.float64)[table.stage]
        begin[backward] += room[backward]
        end[backward] -= room[backward]
    # A tensor passed on within the rank is allocated until its reader runs.
    for readers, need in ((from_before, NEEDS[Kind.F][0]), (from_after, NEEDS[Kind.B][1])):
        producers = table.needed(need)[table.stage[readers], table.microbatch[readers]]
        end[producers[producers != NOWHERE]] += sizes.message
    begin[table.is_kind(*RECVS)] = sizes.message
    begin[_first_sends(table, send_window)] = sizes.message
    return begin, end


def _first_sends(table: Table, count: int) -> IntArray:
    """Return the first `count` sends of each channel: a later send takes the place of the oldest pending one."""
    sends = np.flatnonzero(table.is_kind(*SENDS))
    forwards = table.kind[sends] == CODES[Kind.SEND_F]
    placement = np.array(table.schedule.placement)
    peers = placement[table.stage[sends] + np.where(forwards, 1, -1)]
    channels = table.rank[sends] * table.schedule.num_ranks + peers
    order = np.argsort(channels, kind="stable")
    ordered = channels[order]
    number = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return sends[order[number < count]]
