"""What a program holds in memory: a replay of each rank's list, in bytes."""

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.pipeline.ir.actions import GRADIENTS, RECVS, SENDS, Kind
from megalite.pipeline.ir.schedule import NEEDS, Program
from megalite.pipeline.ir.table import CODES, NOWHERE, IntArray, Table


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes, or any one unit, of one microbatch on each virtual stage."""

    activation: tuple[float, ...]
    """What the graph holds, the stage's input included: from F, or R if there is one, to B or I."""
    deferred: tuple[float, ...]
    """What W needs: from I to W. It grows while I frees the graph, so that I holds no more than the larger of the two."""
    kept_input: tuple[float, ...]  # what an F keeps if its pair has an R: from F to B or I
    message: float = 0.0
    """A tensor between two stages: from the posting of its receive, or from its producer on the same rank, to its reader;
    from its send until the send is known to be complete."""
    workspace: tuple[float, ...] | None = None
    """What a B or I needs while it runs and not after, such as activations that it computes again. Default 0."""

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
        """The same for each of `count` stages."""
        columns = {"activation": activation, "deferred": deferred, "kept_input": kept_input}
        return cls(**{name: (size,) * count for name, size in columns.items()}, message=message)


class Peak(NamedTuple):
    """The most that a rank holds."""

    size: float
    position: int  # of the first action that holds this much once it has started


def memory_peaks(program: Program, sizes: Sizes) -> tuple[Peak, ...]:
    """Per rank, the most that it holds at once. Order alone decides it, not time.

    A tensor that is received, or handed over on the rank, belongs to the graph from its F on; a gradient is freed with
    the B or I that reads it. A send is known to be complete when the window makes a later send of its channel wait for
    it, or at the end of the step.
    """
    return table_peaks(Table.of(program.actions, program.schedule), sizes, program.send_window)


def table_peaks(table: Table, sizes: Sizes, send_window: int) -> tuple[Peak, ...]:
    """`memory_peaks` of a program's table."""
    begin, end = _changes(table, sizes, send_window)
    # What an action takes is there before what it frees goes: two steps an action, of which the first counts.
    held = np.stack((begin, end), axis=1)
    peaks = []
    for row in np.split(held, table.first[1:-1]):
        sums = np.cumsum(row.reshape(-1))[::2]
        position = int(np.argmax(sums)) if len(sums) else 0
        peaks.append(Peak(float(sums[position]), position) if sums.max(initial=0.0) > 0 else Peak(0.0, 0))
    return tuple(peaks)


def exceeds(size: float, limit: float) -> bool:
    """More than the limit by more than sums of thirds are off."""
    return size > limit * (1.0 + 1e-9)


def sufficient(size: float) -> str:
    """A limit that a peak of this size keeps, as it can be given: `30709383168B`, or a bare number below 1024."""
    # Rounded first: sums of thirds are a little off.
    return f"{ceil(round(size, 3))}B" if size >= 1024 else f"{ceil(round(size * 1e6, 3)) / 1e6:.10g}"


def activation_peaks(table: Table, send_window: int) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs with live activations at once; what W needs is not counted.

    A pair's activations live from its F, or from its R if it has one, to its B or I; forward-only runs keep nothing
    beyond the F itself. The order on the rank alone decides: the result holds whatever the actions cost."""
    return tuple(int(peak.size) for peak in table_peaks(table, Sizes.uniform(table.schedule.num_stages), send_window))


def _changes(table: Table, sizes: Sizes, send_window: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """By index, what each action takes when it starts, and what it frees (negative) when it ends."""
    begin, end = np.zeros((2, len(table.kind)))
    activation, deferred, kept = (
        np.array(values, dtype=np.float64)[table.stage]
        for values in (sizes.activation, sizes.deferred, sizes.kept_input)
    )
    again = table.place[CODES[Kind.R], table.stage, table.microbatch] != NOWHERE
    placement = np.array(table.schedule.placement)
    same = placement[1:] == placement[:-1]
    # Per action, whether it is an F with its input, or a B or I with its gradient, from a stage of the same rank.
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
    # What is handed over waits for its reader.
    for readers, need in ((from_before, NEEDS[Kind.F][0]), (from_after, NEEDS[Kind.B][1])):
        producers = table.needed(need)[table.stage[readers], table.microbatch[readers]]
        end[producers[producers != NOWHERE]] += sizes.message
    begin[table.is_kind(*RECVS)] = sizes.message
    begin[_first_sends(table, send_window)] = sizes.message
    return begin, end


def _first_sends(table: Table, count: int) -> IntArray:
    """Indices of the first sends of each channel: later ones find the window full and take the oldest one's place."""
    sends = np.flatnonzero(table.is_kind(*SENDS))
    forwards = table.kind[sends] == CODES[Kind.SEND_F]
    placement = np.array(table.schedule.placement)
    peers = placement[table.stage[sends] + np.where(forwards, 1, -1)]
    channels = table.rank[sends] * table.schedule.num_ranks + peers
    order = np.argsort(channels, kind="stable")
    ordered = channels[order]
    number = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
    return sends[order[number < count]]
