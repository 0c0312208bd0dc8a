"""Schedules of several chunks a rank in a loop: interleaved 1F1B and looped breadth-first.

A rank's chunk c is stage c * num_ranks + rank.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.one_chunk import (
    check_several_chunks,
    check_sizes,
    loop_placement,
    merge_halves,
    v_placement,
)
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
        (n for n in range(num_ranks, num_microbatches) if _fits(num_ranks, num_microbatches, n)), num_microbatches
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
    name: str, num_ranks: int, num_chunks: int, num_microbatches: int, row: Callable[[int], Iterable[Action]]
) -> Schedule:
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_ranks * num_chunks,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, num_chunks),
        actions=tuple(tuple(row(rank)) for rank in range(num_ranks)),
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
            m for m in range(max(num_microbatches, group), num_microbatches + 2 * group) if _fits(num_ranks, m, group)
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


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: zero bubble on a V, in the memory of 1F1B.

    If the F, I and W of all stages take the same time and m >= 2p-1, no rank idles between its first and last action,
    and the bubble is (p-1)F of one stage: half of ZB-H1's. Each rank holds 2p stage activations at most, as much as the
    first rank in 1F1B, deferred weight gradients included. Fewer microbatches get the order of 2p-1 with the others left
    out.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), and "Zero Bubble Pipeline Parallelism".

    Raises:
        ConfigError: a size below 1.
    """
    check_sizes("schedule zb-v", num_ranks, 2, num_microbatches)
    count = max(num_microbatches, 2 * num_ranks - 1)

    def row(rank: int) -> Iterable[Action]:
        walk = _Walk(rank, num_ranks)
        left = num_ranks - rank
        walk.repeat(2 * left - 1, "F0")
        walk.repeat(rank, "F1 F0")
        walk.repeat(left, "F1 I1 W1")
        with_forward = count - (2 * num_ranks - rank - 1)
        walk.repeat(with_forward, "F0 I0 W0 F1 I1 W1")
        walk.repeat(count - num_ranks - with_forward, "I0 W0 F1 I1 W1")
        walk.repeat(rank, "I0 I1")
        walk.repeat(left, "I0 W0")
        walk.repeat(rank, "W1")
        walk.repeat(rank, "W0")
        return (action for action in walk.done if action.microbatch < num_microbatches)

    return _vee("zb-v", num_ranks, num_microbatches, row)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: a V in whose middle each forward stands next to a backward of the other chunk.

    Made so that the two of such a pair may overlap, one's messages with the other's computation; here they run one
    after the other, and a forward's output leaves before the backward next to it runs. If the F, I and W of all stages
    take the same time, the bubble is (p-1)F of one stage: half of the published (p-1)(F&B+B-3W), in which F&B is one
    step of length F+B. Each rank holds 2p+1 stage activations at most, deferred weight gradients included.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), and the cut-in-half variant DualPipeV.

    Raises:
        ConfigError: a size below 1, or fewer than 2p microbatches.
    """
    check_sizes("schedule dualpipe-v", num_ranks, 2, num_microbatches)
    least = 2 * num_ranks
    if num_microbatches < least:
        fewer_ranks = f"pp {num_microbatches // 2}, " if num_microbatches >= 4 else ""
        raise ConfigError(
            f"schedule dualpipe-v with pp {num_ranks} needs {least} microbatches or more but has {num_microbatches}: use "
            f"{least} (global batch = microbatches x micro batch size x dp), {fewer_ranks}or schedule zb-v, which takes "
            f"any number"
        )

    def row(rank: int) -> Iterable[Action]:
        walk = _Walk(rank, num_ranks)
        left = num_ranks - rank - 1
        walk.repeat(2 * left, "F0")
        walk.repeat(rank + 1, "F0 F1")
        walk.repeat(left, "I1 W F1")
        walk.repeat(num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0")
        walk.repeat(left, "B1 F1 B0")
        # Of the last 2(r+1) backwards the first half is whole.
        walk.repeat((rank + 1) // 2, "B1 B0")
        walk.repeat((rank + 1) % 2, "B1 I0")
        walk.repeat((rank + 1) // 2, "I1 I0")
        walk.repeat(left, "W I0")
        walk.repeat(rank + 1, "W")
        return walk.done

    return _vee("dualpipe-v", num_ranks, num_microbatches, row)


class _Walk:
    """A rank's list as it grows: each chunk's microbatches in order, W in the order of the I."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.done: list[Action] = []
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._owed: list[Action] = []

    def repeat(self, times: int, steps: str) -> None:
        """Appends the steps that many times: a kind and a chunk each, `W` alone for whichever is owed longest."""
        for _ in range(times):
            for step in steps.split():
                self.done.append(self._next(step))

    def _next(self, step: str) -> Action:
        kind = Kind(step[0])
        if kind is Kind.W:
            stages = self.stages if step == "W" else (self.stages[int(step[1])],)
            oldest = next(action for action in self._owed if action.stage in stages)
            self._owed.remove(oldest)
            return oldest
        chunk = int(step[1])
        counts = self._forwards if kind is Kind.F else self._backwards
        counts[chunk] += 1
        action = Action(kind, self.stages[chunk], counts[chunk] - 1)
        if kind is Kind.I:
            self._owed.append(Action(Kind.W, *action[1:]))
        return action


def _vee(name: str, num_ranks: int, num_microbatches: int, row: Callable[[int], Iterable[Action]]) -> Schedule:
    placement = v_placement(num_ranks)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(merge_halves(row(rank), placement) for rank in range(num_ranks)),
    )
