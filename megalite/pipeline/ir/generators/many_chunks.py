"""Generate schedules with several chunks per rank: interleaved 1F1B, looped breadth-first, ZB-V and DualPipeV.

In a loop, chunk c of a rank is stage c * num_ranks + rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.one_chunk import loop_placement, merge_halves, row_by_row, v_placement
from megalite.pipeline.ir.schedule import Schedule


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: v chunks per rank, visited in turn by groups of N microbatches.

    Rank r runs 2(p-r-1) + (v-1)N chunk forwards ahead, then alternates. The bubble is 1F1B's divided by v, at the cost
    of v times the messages and, on rank r, 2(p-r-1) + (v-1)N + 1 live chunk activations. A group larger than p gives
    messages N-p slots of slack at the wrap from the last rank to the first.

    Legal groups are p <= N <= m with m mod N either 0 or at least p, or N = m < p: other orders increase the bubble and
    some deadlock. By default N is `smallest_group`, which works for any number of microbatches. If m < p, microbatches
    wait p-m slots at each wrap, (v-1)(p-m)(F+B)/v in total.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021); the order is
    Megatron-LM's.
    """
    if group is not None and not group_fits(num_ranks, num_microbatches, group):
        raise ConfigError(_refusal(num_ranks, num_microbatches, group))
    size = smallest_group(num_ranks, num_microbatches) if group is None else group
    order = [
        (chunk, i)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_chunks)
        for i in range(first, min(first + size, num_microbatches))
    ]

    def row(rank: int) -> Iterable[Action]:
        warm_up = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * size
        forwards = list(_visits(Kind.F, order, rank, num_ranks, num_chunks))
        yield from forwards[:warm_up]
        for index, backward in enumerate(_visits(Kind.B, order, rank, num_ranks, num_chunks)):
            yield from forwards[warm_up + index : warm_up + index + 1]
            yield backward

    return row_by_row("interleaved", loop_placement(num_ranks, num_chunks), num_microbatches, row)


def looped_bfs(num_ranks: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Breadth first: all microbatches' forwards through chunk 0, then chunk 1, ...; the backwards mirrored.

    Bubble (p-1)(F+B)/v for m >= p; for m < p that of interleaved. Activations of all microbatches are live at once, on
    each chunk. Each chunk's weights are needed in one contiguous run of forwards and one of backwards.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022).
    """
    order = [(chunk, i) for chunk in range(num_chunks) for i in range(num_microbatches)]

    def row(rank: int) -> Iterable[Action]:
        for kind in (Kind.F, Kind.B):
            yield from _visits(kind, order, rank, num_ranks, num_chunks)

    return row_by_row("looped-bfs", loop_placement(num_ranks, num_chunks), num_microbatches, row)


def smallest_group(num_ranks: int, num_microbatches: int) -> int:
    """Return the smallest legal microbatch group of the interleaved schedule; m if m < p."""
    groups = range(num_ranks, num_microbatches)
    return next((group for group in groups if group_fits(num_ranks, num_microbatches, group)), num_microbatches)


def _visits(kind: Kind, order: list[tuple[int, int]], rank: int, num_ranks: int, num_chunks: int) -> Iterator[Action]:
    """Yield the rank's actions of one kind in the order of (chunk, microbatch); backwards visit the chunks mirrored."""
    for chunk, microbatch in order:
        visited = chunk if kind is Kind.F else num_chunks - 1 - chunk
        yield Action(kind, visited * num_ranks + rank, microbatch)


def group_fits(num_ranks: int, num_microbatches: int, group: int) -> bool:
    if group == num_microbatches:
        return True
    return num_ranks <= group < num_microbatches and not 0 < num_microbatches % group < num_ranks


def _refusal(num_ranks: int, num_microbatches: int, group: int) -> str:
    if group > num_microbatches:
        reason = "that is less than one group"
    elif group < num_ranks:
        reason = f"a group must have at least pp = {num_ranks} microbatches, or all of them"
    else:
        reason = f"the last group would have {num_microbatches % group}, fewer than pp = {num_ranks}"
    remedies = []
    if group >= num_ranks:
        counts = range(max(1, num_microbatches - group), num_microbatches + 2 * group)
        legal = [m for m in counts if m >= group and group_fits(num_ranks, m, group)]
        near = [*[m for m in legal if m < num_microbatches][-1:], *[m for m in legal if m > num_microbatches][:1]]
        counted = " or ".join(map(str, near))
        remedies.append(
            f"{counted} microbatches (global batch = microbatches x micro batch size x dp) with group {group}"
        )
    default = smallest_group(num_ranks, num_microbatches)
    remedies.append(
        f"microbatch_group_size_per_virtual_pipeline_stage {default}, the default, with {num_microbatches} microbatches"
    )
    return (
        f"schedule interleaved with pp {num_ranks} and group {group} cannot take {num_microbatches} microbatches: "
        f"{reason}. Works: {'; or '.join(remedies)}"
    )


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: zero bubble on a V, in the memory of 1F1B.

    If the F, I and W of all stages take the same time and m >= 2p-1, no rank idles between its first and last action,
    and the bubble is (p-1)F of one stage: half of ZB-H1's. Each rank holds 2p stage activations at most, as many as the
    first rank in 1F1B, including deferred weight gradients. For m < 2p-1 the order is that of 2p-1 microbatches without
    those that do not exist.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), and "Zero Bubble Pipeline Parallelism".
    """
    row = partial(zb_v_row, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return row_by_row("zb-v", v_placement(num_ranks), num_microbatches, row)


def zb_v_row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    walk = _GrowingList(rank, num_ranks)
    left, total = num_ranks - rank, max(num_microbatches, 2 * num_ranks - 1)
    walk.repeat(2 * left - 1, "F0")
    walk.repeat(rank, "F1 F0")
    walk.repeat(left, "F1 I1 W1")
    with_forward = total - (2 * num_ranks - rank - 1)
    walk.repeat(with_forward, "F0 I0 W0 F1 I1 W1")
    walk.repeat(total - num_ranks - with_forward, "I0 W0 F1 I1 W1")
    walk.repeat(rank, "I0 I1")
    walk.repeat(left, "I0 W0")
    walk.repeat(rank, "W1")
    walk.repeat(rank, "W0")
    return merge_halves((a for a in walk.done if a.microbatch < num_microbatches), v_placement(num_ranks))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: a V with a steady phase that pairs each forward with a backward of the other chunk.

    The published schedule overlaps the computation of one with the messages of the other. Here the two run one after
    the other, and a forward's output is sent before its backward partner runs. If the F, I and W of all stages take the
    same time, the bubble is (p-1)F of one stage: half of the published (p-1)(F&B+B-3W), in which F&B is one step of
    length F+B. Each rank holds 2p+1 stage activations at most, including deferred weight gradients.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), and the cut-in-half variant DualPipeV.
    """
    least = 2 * num_ranks
    if num_microbatches < least:
        fewer_ranks = f"pp {num_microbatches // 2}, " if num_microbatches >= 4 else ""
        raise ConfigError(
            f"schedule dualpipe-v with pp {num_ranks} needs {least} microbatches or more but has {num_microbatches}: use "
            f"{least}, {fewer_ranks}or schedule zb-v, which takes any number"
        )
    row = partial(dualpipe_v_row, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return row_by_row("dualpipe-v", v_placement(num_ranks), num_microbatches, row)


def dualpipe_v_row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    walk = _GrowingList(rank, num_ranks)
    left = num_ranks - rank - 1
    walk.repeat(2 * left, "F0")
    walk.repeat(rank + 1, "F0 F1")
    walk.repeat(left, "I1 W F1")
    walk.repeat(num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0")
    walk.repeat(left, "B1 F1 B0")
    # The first half of the last 2(r+1) backwards is not split.
    walk.repeat((rank + 1) // 2, "B1 B0")
    walk.repeat((rank + 1) % 2, "B1 I0")
    walk.repeat((rank + 1) // 2, "I1 I0")
    walk.repeat(left, "W I0")
    walk.repeat(rank + 1, "W")
    return merge_halves(walk.done, v_placement(num_ranks))


class _GrowingList:
    """A rank's list under construction: microbatches in order per chunk and kind, W in the order of the I."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.done: list[Action] = []
        self._next = {(kind, stage): count() for kind in (Kind.F, Kind.B) for stage in self.stages}
        self._waiting: list[Action] = []

    def repeat(self, times: int, steps: str) -> None:
        """Append the steps `times` times. A step is a kind and a chunk; `W` without a chunk is the oldest pending W."""
        for _ in range(times):
            for step in steps.split():
                self.done.append(self._action(Kind(step[0]), [self.stages[int(chunk)] for chunk in step[1:]]))

    def _action(self, kind: Kind, stages: Sequence[int]) -> Action:
        if kind is Kind.W:
            oldest = next(action for action in self._waiting if action.stage in (stages or self.stages))
            self._waiting.remove(oldest)
            return oldest
        (stage,) = stages
        action = Action(kind, stage, next(self._next[Kind.F if kind is Kind.F else Kind.B, stage]))
        if kind is Kind.I:
            self._waiting.append(Action(Kind.W, *action[1:]))
        return action
