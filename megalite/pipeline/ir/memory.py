"""What a program holds in memory: a replay of each rank's list, in bytes."""

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import GRADIENTS, RECVS, SENDS, Kind
from megalite.pipeline.ir.schedule import Program
from megalite.pipeline.ir.table import CODES, NOWHERE, IntArray, Table


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes, or any one unit, of one microbatch on each virtual stage."""

    activation: tuple[float, ...]
    """What the graph holds, the stage's input included: from F, or R if there is one, to B or I."""
    deferred: tuple[float, ...]
    """What W needs: from I to W. Part of it was in the graph before."""
    kept_input: tuple[float, ...]
    """What an F keeps whose pair has an R: from F to B or I."""
    message: float = 0.0
    """A tensor between two ranks: from the posting of its receive to its reader; from its send until the send is known
    to be complete."""

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        *,
        activation: float = 1.0,
        deferred: float = 0.0,
        kept_input: float = 0.0,
        message: float = 0.0,
    ) -> "Sizes":
        """The same for each stage."""
        return cls(
            activation=(activation,) * num_stages,
            deferred=(deferred,) * num_stages,
            kept_input=(kept_input,) * num_stages,
            message=message,
        )


class Peak(NamedTuple):
    """The most that a rank holds."""

    size: float
    position: int
    """Of the first action after whose start this much is held."""


def memory_peaks(program: Program, sizes: Sizes) -> tuple[Peak, ...]:
    """Per rank, the most that it holds at once. Exact: order alone decides it, not time.

    A received tensor belongs to the graph from its F on, and is freed with the B or I that reads it. A send is known
    to be complete when the window makes a later send of its channel wait for it, or at the end of the step.

    Raises:
        ConfigError: sizes of another number of stages.
    """
    return table_peaks(Table.of(program.actions, program.schedule), sizes, program.send_window)


def table_peaks(table: Table, sizes: Sizes, send_window: int) -> tuple[Peak, ...]:
    """`memory_peaks` of a program's table."""
    _check(sizes, table)
    begin, end = _changes(table, sizes, send_window)
    # What an action takes is there before what it frees goes: two steps an action, of which the first counts.
    held = np.stack((begin, end), axis=1)
    peaks = []
    for rank, start in enumerate(table.first[:-1]):
        sums = np.cumsum(held[start : table.first[rank + 1]].reshape(-1))[::2]
        position = int(np.argmax(sums)) if len(sums) else 0
        some = len(sums) > 0 and sums[position] > 0
        peaks.append(Peak(float(sums[position]), position) if some else Peak(0.0, 0))
    return tuple(peaks)


def activation_peaks(table: Table, send_window: int) -> tuple[int, ...]:
    """Per rank, the most (stage, microbatch) pairs whose graphs are alive at once: `schedule.peak_activations`."""
    units = Sizes.uniform(table.schedule.num_stages)
    return tuple(int(peak.size) for peak in table_peaks(table, units, send_window))


def _changes(
    table: Table, sizes: Sizes, send_window: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """By index, what each action takes when it starts, and what it frees (negative) when it ends."""
    begin, end = np.zeros((2, len(table.kind)))
    activation = np.array(sizes.activation, dtype=np.float64)[table.stage]
    deferred = np.array(sizes.deferred, dtype=np.float64)[table.stage]
    kept = np.array(sizes.kept_input, dtype=np.float64)[table.stage]
    again = table.place[CODES[Kind.R], table.stage, table.microbatch] != NOWHERE
    received = np.where(table.receives, sizes.message, 0.0)

    forward, inner, weight = (table.is_kind(kind) for kind in (Kind.F, Kind.I, Kind.W))
    made = np.where(again, kept, activation)
    begin[forward] = (made - received)[forward]
    if table.schedule.forward_only:
        end[forward] = -made[forward]
    recompute = table.is_kind(Kind.R)
    begin[recompute] = activation[recompute]
    backward = table.is_kind(*GRADIENTS)
    begin[inner] = deferred[inner]
    end[backward] = (-activation - received - np.where(again, kept, 0.0))[backward]
    end[weight] = -deferred[weight]
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


def _check(sizes: Sizes, table: Table) -> None:
    for field in fields(sizes):
        values = getattr(sizes, field.name)
        if isinstance(values, tuple) and len(values) != table.schedule.num_stages:
            raise ConfigError(
                f"{field.name} sizes are given for {len(values)} stages, but schedule {table.schedule.name} has "
                f"{table.schedule.num_stages}: give one value a stage"
            )
