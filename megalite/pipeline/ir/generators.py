"""Schedules as pure functions of sizes: GPipe, 1F1B, interleaved 1F1B, forward-only.

All place virtual stage s on rank s mod num_ranks, so a rank's chunk c is stage c * num_ranks + rank.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.schedule import Schedule

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved")


def build_schedule(
    name: str, *, num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None = None
) -> Schedule:
    """The training schedule of that name; "auto" is interleaved for several chunks a rank, else 1f1b.

    Raises:
        ConfigError: no such schedule, sizes that it cannot take, or a group without interleaving.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_schedule is {name!r}; it must be one of {', '.join(SCHEDULES)}")
    if name == "auto":
        name = "interleaved" if num_chunks > 1 else "1f1b"
    if name == "interleaved":
        return interleaved(num_ranks, num_chunks, num_microbatches, group)
    if group is not None:
        raise ConfigError(
            f"microbatch_group_size_per_virtual_pipeline_stage is {group}, but schedule {name} has no groups: leave "
            f"it out, or use the interleaved schedule with vpp of 2 or more"
        )
    if name == "gpipe":
        return gpipe(num_ranks, num_microbatches, num_chunks)
    if num_chunks > 1:
        raise ConfigError(
            f"schedule 1f1b takes one stage a rank but vpp is {num_chunks}: use vpp 1, or the interleaved schedule"
        )
    return one_f_one_b(num_ranks, num_microbatches)


def gpipe(num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards, microbatches ascending in both.

    With several chunks this is the looped breadth-first order: all microbatches through chunk 0, then chunk 1, ...
    Bubble (p-1)(F+B)/v; all microbatches' activations are held at once.

    Sources: Huang et al., "GPipe" (2019); Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022).

    Raises:
        ConfigError: a size below 1.
    """
    _check_sizes("gpipe", num_ranks, num_chunks, num_microbatches)
    table = [_Cell(i, chunk) for chunk in range(num_chunks) for i in range(num_microbatches)]

    def row(rank: int) -> Iterable[Action]:
        yield from (_forward(cell, rank, num_ranks) for cell in table)
        yield from (_backward(cell, rank, num_ranks, num_chunks) for cell in table)

    return _schedule("gpipe", num_ranks, num_chunks, num_microbatches, row)


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Schedule:
    """1F1B: rank r runs p-r-1 forwards ahead, then one forward and one backward in turn.

    The bubble is GPipe's, (p-1)(F+B), but rank r holds only min(m, p-r) microbatches' activations.

    Sources: Narayanan et al., "PipeDream-2BW" (2021), the flush variant; Fan et al., "DAPPLE" (2021).

    Raises:
        ConfigError: a size below 1.
    """
    _check_sizes("1f1b", num_ranks, 1, num_microbatches)
    table = [_Cell(i, 0) for i in range(num_microbatches)]

    def row(rank: int) -> Iterable[Action]:
        return _warm_up_then_alternate(table, num_ranks - rank - 1, rank, num_ranks, 1)

    return _schedule("1f1b", num_ranks, 1, num_microbatches, row)


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: v chunks a rank, visited in turn by groups of N microbatches.

    Rank r runs 2(p-r-1) + (v-1)N chunk forwards ahead, then alternates. The bubble is 1F1B's divided by v; the price is
    v times the messages and, on rank r, 2(p-r-1) + (v-1)N + 1 live chunk activations. A group larger than p (the
    default) gives messages N-p slots of slack at the wrap from the last rank to the first.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021); the order of
    Megatron-LM.

    Raises:
        ConfigError: a size below 1, a single chunk, or microbatches and group that do not fit: legal is
            p <= N <= m with m mod N either 0 or at least p. Other orders inflate the bubble and some deadlock.
    """
    _check_sizes("interleaved", num_ranks, num_chunks, num_microbatches)
    if num_chunks == 1:
        raise ConfigError(
            "schedule interleaved needs several chunks a rank but vpp is 1: set vpp to 2, or use 1f1b"
        )
    size = num_ranks if group is None else group
    _check_group(num_ranks, num_chunks, num_microbatches, size)
    table = [
        _Cell(i, chunk)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for i in range(first, min(first + size, num_microbatches))
    ]

    def row(rank: int) -> Iterable[Action]:
        warm_up = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * size
        return _warm_up_then_alternate(table, warm_up, rank, num_ranks, num_chunks)

    return _schedule("interleaved", num_ranks, num_chunks, num_microbatches, row)


def forward_only(num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Evaluation: forwards alone, with nothing kept. Any number of microbatches.

    With several chunks, groups of p microbatches go through all chunks in turn, the last group taking the remainder
    as well. For m >= p there is no bubble but the ramp, and no message waits p slots or more for its consumer.

    Raises:
        ConfigError: a size below 1.
    """
    _check_sizes("forward_only", num_ranks, num_chunks, num_microbatches)
    num_groups = max(1, num_microbatches // num_ranks)
    bounds = [index * num_ranks for index in range(num_groups)] + [num_microbatches]
    table = [
        _Cell(i, chunk)
        for first, stop in pairwise(bounds)
        for chunk in range(num_chunks)
        for i in range(first, stop)
    ]

    def row(rank: int) -> Iterable[Action]:
        return (_forward(cell, rank, num_ranks) for cell in table)

    return _schedule("forward_only", num_ranks, num_chunks, num_microbatches, row, forwards_alone=True)


class _Cell(NamedTuple):
    """One entry of the order in which a rank visits (microbatch, chunk). Backwards visit the chunks mirrored."""

    microbatch: int
    chunk: int


def _forward(cell: _Cell, rank: int, num_ranks: int) -> Action:
    return Action(Kind.F, cell.chunk * num_ranks + rank, cell.microbatch)


def _backward(cell: _Cell, rank: int, num_ranks: int, num_chunks: int) -> Action:
    return Action(Kind.B, (num_chunks - 1 - cell.chunk) * num_ranks + rank, cell.microbatch)


def _warm_up_then_alternate(
    table: list[_Cell], warm_up: int, rank: int, num_ranks: int, num_chunks: int
) -> Iterable[Action]:
    for index in range(-warm_up, len(table)):
        if index + warm_up < len(table):
            yield _forward(table[index + warm_up], rank, num_ranks)
        if index >= 0:
            yield _backward(table[index], rank, num_ranks, num_chunks)


def _schedule(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    row: Callable[[int], Iterable[Action]],
    *,
    forwards_alone: bool = False,
) -> Schedule:
    num_stages = num_ranks * num_chunks
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=tuple(stage % num_ranks for stage in range(num_stages)),
        actions=tuple(tuple(row(rank)) for rank in range(num_ranks)),
        forward_only=forwards_alone,
    )


def _check_sizes(name: str, num_ranks: int, num_chunks: int, num_microbatches: int) -> None:
    for what, value in (
        ("pp", num_ranks),
        ("vpp", num_chunks),
        ("the number of microbatches", num_microbatches),
    ):
        if value < 1:
            raise ConfigError(f"schedule {name}: {what} is {value}; it must be 1 or more")


def _fits(num_ranks: int, num_microbatches: int, group: int) -> bool:
    remainder = num_microbatches % group
    return num_ranks <= group <= num_microbatches and (remainder == 0 or remainder >= num_ranks)


def _check_group(num_ranks: int, num_chunks: int, num_microbatches: int, group: int) -> None:
    if group >= 1 and _fits(num_ranks, num_microbatches, group):
        return
    if group < num_ranks:
        reason = f"a group must have at least pp = {num_ranks} microbatches"
    elif group > num_microbatches:
        reason = "there are fewer microbatches than one group has"
    else:
        reason = f"the last group would have {num_microbatches % group}, fewer than pp = {num_ranks}"
    remedies = []
    if group >= num_ranks:
        below = next((m for m in range(num_microbatches, 0, -1) if _fits(num_ranks, m, group)), None)
        above = next(
            m
            for m in range(max(num_microbatches, group), num_microbatches + 2 * group)
            if _fits(num_ranks, m, group)
        )
        counts = " or ".join(str(m) for m in (below, above) if m is not None)
        remedies.append(
            f"{counts} microbatches (global batch = microbatches x micro batch size x dp) with group {group}"
        )
    fitting = next(
        (n for n in range(num_ranks, num_microbatches + 1) if _fits(num_ranks, num_microbatches, n)), None
    )
    if fitting is not None:
        remedies.append(
            f"microbatch_group_size_per_virtual_pipeline_stage {fitting} with {num_microbatches} microbatches"
        )
    if not remedies:
        remedies.append(f"{num_ranks} or more microbatches with group {num_ranks}, or vpp 1")
    raise ConfigError(
        f"schedule interleaved with pp {num_ranks}, vpp {num_chunks} and group {group} cannot take "
        f"{num_microbatches} microbatches: {reason}. Works: {'; or '.join(remedies)}"
    )
