"""Schedules of several chunks a rank in a loop: interleaved 1F1B and looped breadth-first.

A rank's chunk c is stage c * num_ranks + rank.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.placements import check_sizes, loop_placement
from megalite.pipeline.ir.schedule import Schedule


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: v chunks a rank, visited in turn by groups of N microbatches.

    Rank r runs 2(p-r-1) + (v-1)N chunk forwards ahead, then alternates. The bubble is 1F1B's divided by v; the price is
    v times the messages and, on rank r, 2(p-r-1) + (v-1)N + 1 live chunk activations. A group larger than p gives
    messages N-p slots of slack at the wrap from the last rank to the first.

    Without a group any number of microbatches works: N is `smallest_group`. Where m < p, microbatches wait p-m slots at
    each wrap, (v-1)(p-m)(F+B)/v in all.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021); the order of
    Megatron-LM.

    Raises:
        ConfigError: a size below 1, a single chunk, or microbatches and a group that do not fit: legal is
            p <= N <= m with m mod N either 0 or at least p, or N = m < p. Other orders inflate the bubble and some
            deadlock.
    """
    check_sizes("schedule interleaved", num_ranks, num_chunks, num_microbatches)
    check_several_chunks("interleaved", num_chunks)
    if group is not None:
        _check_group(num_ranks, num_chunks, num_microbatches, group)
    size = smallest_group(num_ranks, num_microbatches) if group is None else group
    table = [
        _Cell(i, chunk)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for i in range(first, min(first + size, num_microbatches))
    ]

    def row(rank: int) -> Iterable[Action]:
        warm_up = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * size
        for index in range(-warm_up, len(table)):
            if index + warm_up < len(table):
                yield _forward(table[index + warm_up], rank, num_ranks)
            if index >= 0:
                yield _backward(table[index], rank, num_ranks, num_chunks)

    return _looped("interleaved", num_ranks, num_chunks, num_microbatches, row)


def looped_bfs(num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Breadth first: all microbatches' forwards through chunk 0, then chunk 1, ...; the backwards mirrored.

    Bubble (p-1)(F+B)/v for m >= p, and as interleaved below; all microbatches' activations are held at once, on each
    chunk. Each chunk's weights are needed in one stretch of forwards and one of backwards.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022).

    Raises:
        ConfigError: a size below 1, or a single chunk.
    """
    check_sizes("schedule looped-bfs", num_ranks, num_chunks, num_microbatches)
    check_several_chunks("looped-bfs", num_chunks)
    table = [_Cell(i, chunk) for chunk in range(num_chunks) for i in range(num_microbatches)]

    def row(rank: int) -> Iterable[Action]:
        yield from (_forward(cell, rank, num_ranks) for cell in table)
        yield from (_backward(cell, rank, num_ranks, num_chunks) for cell in table)

    return _looped("looped-bfs", num_ranks, num_chunks, num_microbatches, row)


def smallest_group(num_ranks: int, num_microbatches: int) -> int:
    """The smallest legal microbatch group of the interleaved schedule: m itself where m < p."""
    return next(
        (n for n in range(num_ranks, num_microbatches) if _fits(num_ranks, num_microbatches, n)),
        num_microbatches,
    )


class _Cell(NamedTuple):
    """One entry of the order in which a rank visits (microbatch, chunk). Backwards visit the chunks mirrored."""

    microbatch: int
    chunk: int


def _forward(cell: _Cell, rank: int, num_ranks: int) -> Action:
    return Action(Kind.F, cell.chunk * num_ranks + rank, cell.microbatch)


def _backward(cell: _Cell, rank: int, num_ranks: int, num_chunks: int) -> Action:
    return Action(Kind.B, (num_chunks - 1 - cell.chunk) * num_ranks + rank, cell.microbatch)


def _looped(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    row: Callable[[int], Iterable[Action]],
) -> Schedule:
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, num_chunks),
        actions=tuple(tuple(row(rank)) for rank in range(num_ranks)),
    )


def check_several_chunks(name: str, num_chunks: int) -> None:
    if num_chunks == 1:
        alternative = "1f1b" if name == "interleaved" else "gpipe"
        raise ConfigError(
            f"schedule {name} needs several chunks a rank but vpp is 1: set vpp to 2, or use {alternative}"
        )


def _fits(num_ranks: int, num_microbatches: int, group: int) -> bool:
    if group == num_microbatches:
        return True
    remainder = num_microbatches % group
    return num_ranks <= group < num_microbatches and (remainder == 0 or remainder >= num_ranks)


def _check_group(num_ranks: int, num_chunks: int, num_microbatches: int, group: int) -> None:
    if group >= 1 and _fits(num_ranks, num_microbatches, group):
        return
    if group > num_microbatches:
        reason = "there are fewer microbatches than one group has"
    elif group < num_ranks:
        reason = f"a group must have at least pp = {num_ranks} microbatches, or all of them"
    else:
        reason = f"the last group would have {num_microbatches % group}, fewer than pp = {num_ranks}"
    remedies = []
    if group >= num_ranks:
        below = next((m for m in range(num_microbatches, group - 1, -1) if _fits(num_ranks, m, group)), None)
        above = next(
            m
            for m in range(max(num_microbatches, group), num_microbatches + 2 * group)
            if _fits(num_ranks, m, group)
        )
        counts = " or ".join(str(m) for m in (below, above) if m is not None)
        remedies.append(
            f"{counts} microbatches (global batch = microbatches x micro batch size x dp) with group {group}"
        )
    remedies.append(
        f"microbatch_group_size_per_virtual_pipeline_stage {smallest_group(num_ranks, num_microbatches)}, the default, "
        f"with {num_microbatches} microbatches"
    )
    raise ConfigError(
        f"schedule interleaved with pp {num_ranks}, vpp {num_chunks} and group {group} cannot take "
        f"{num_microbatches} microbatches: {reason}. Works: {'; or '.join(remedies)}"
    )
