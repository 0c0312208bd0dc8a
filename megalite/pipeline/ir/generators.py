"""Build schedules, as pure functions of sizes: the named ones, forward-only ones, and with recompute ahead.

One stage per rank: GPipe, 1F1B, ZB-H1 and ZB-H2. Several: interleaved 1F1B, looped breadth-first, ZB-V and DualPipeV.
In a loop, chunk c of rank r is stage c * num_ranks + r."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count, pairwise

from megalite.config.errors import ConfigError
from megalite.config.parallel import PIPELINE_SCHEDULES, ScheduleFacts
from megalite.pipeline.ir.schedule import GRADIENTS, Action, Kind, Schedule


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s mod p: each rank sends its output to the next, and the last one to the first."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Place two stages per rank, down and up again: stage s on rank s if s < p, else on rank 2p - 1 - s.

    The turn on the last rank needs no message, and rank 0 has both the first and the last stage."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def row_by_row(
    name: str, placement: tuple[int, ...], num_microbatches: int, row: Callable[[int], Iterable[Action]]
) -> Schedule:
    """Build the schedule with the actions `row(rank)` on each rank."""
    num_ranks = max(placement) + 1
    return Schedule(name, num_microbatches, placement, tuple(tuple(row(rank)) for rank in range(num_ranks)))


def merge_halves(row: Iterable[Action], placement: Sequence[int]) -> tuple[Action, ...]:
    """Merge each adjacent I(s,i), W(s,i) into one B(s,i), if no other rank waits for that I.

    No rank reads the gradient of stage 0; at the turn of a V the same rank reads it, in any case after the W. There a B
    ends when the W would, and avoids the bookkeeping between the halves. Elsewhere a B would delay its gradient by the
    time of W."""
    merged: list[Action] = []
    for action in row:
        kind, stage, microbatch = action
        awaited = stage > 0 and placement[stage - 1] != placement[stage]
        if kind is Kind.W and merged and merged[-1] == (Kind.I, stage, microbatch) and not awaited:
            merged[-1] = Action(Kind.B, stage, microbatch)
        else:
            merged.append(action)
    return tuple(merged)


WARM_UPS = ("pa", "pb")


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, microbatches ascending in both.

    Bubble (p-1)(F+B). The activations of all m microbatches are live at once. An inner rank sends 2m messages.

    Source: Huang et al., "GPipe" (2019)."""

    def row(rank: int) -> Iterable[Action]:
        return (Action(kind, rank, i) for kind in (Kind.F, Kind.B) for i in range(num_microbatches))

    return row_by_row("gpipe", loop_placement(num_ranks, 1), num_microbatches, row)


def one_f_one_b(num_ranks: int, num_microbatches: int, warm_up: str = "pa") -> Schedule:
    """1F1B: rank r runs K forwards ahead, then alternates one backward and one forward.

    Warm-up "pa" has K = min(m, p-r), the minimum that keeps the ranks busy if messages take no time: the bubble is
    GPipe's, (p-1)(F+B), and rank r holds K microbatches' activations. Warm-up "pb" has K = min(m, 2(p-r)-1): about
    twice as many activations, but each hop has the time of a forward and a backward to hide its two messages.

    Sources: Narayanan et al., "PipeDream-2BW" (2021), the flush variant; Fan et al., "DAPPLE" (2021), policies A and B.
    """
    if warm_up not in WARM_UPS:
        raise ConfigError(f"the warm-up of schedule 1f1b is {warm_up!r}; it must be one of {', '.join(WARM_UPS)}")

    def row(rank: int) -> Iterable[Action]:
        left = num_ranks - rank
        ahead = min(num_microbatches, left if warm_up == "pa" else 2 * left - 1)
        yield from (Action(Kind.F, rank, i) for i in range(ahead))
        for i in range(num_microbatches):
            yield Action(Kind.B, rank, i)
            if ahead + i < num_microbatches:
                yield Action(Kind.F, rank, ahead + i)

    return row_by_row("1f1b", loop_placement(num_ranks, 1), num_microbatches, row)


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with each backward of rank r replaced by an I and the W of the microbatch r before it.

    For m >= p and W <= I, F the bubble is (p-1)(F+I-W): with F = I = W a third of 1F1B's. Rank r holds the activations
    of p-r microbatches, as in 1F1B, and the deferred tensors of r microbatches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023)."""
    return _split("zb-h1", num_ranks, num_microbatches, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: 2(p-r)-1 forwards ahead, and each W deferred by 2r microbatches.

    If F, I and W take the same time and m >= 2p-1, rank r never idles between its first and last action, but starts r F
    after rank 0 and ends as much later: the makespan is m(F+I+W) + (p-1)F, the same as ZB-H1's, unless the next step
    may start on each rank as soon as that rank is done. In a synchronous step it only gives messages more slack. Rank r
    holds the activations of 2(p-r)-1 microbatches and the deferred tensors of 2r microbatches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023)."""
    return _split("zb-h2", num_ranks, num_microbatches, depth=2)


def _split(name: str, num_ranks: int, num_microbatches: int, *, depth: int) -> Schedule:
    """Build ZB-H1 (`depth` 1) or ZB-H2 (2): depth(p-r) - (depth-1) forwards ahead, W behind I by depth times r."""
    placement = loop_placement(num_ranks, 1)

    def row(rank: int) -> Iterable[Action]:
        ahead = min(num_microbatches, depth * (num_ranks - rank) - (depth - 1))
        behind = depth * rank
        yield from (Action(Kind.F, rank, i) for i in range(ahead))
        for i in range(num_microbatches):
            yield Action(Kind.I, rank, i)
            if i >= behind:
                yield Action(Kind.W, rank, i - behind)
            if ahead + i < num_microbatches:
                yield Action(Kind.F, rank, ahead + i)
        yield from (Action(Kind.W, rank, i) for i in range(max(num_microbatches - behind, 0), num_microbatches))

    return row_by_row(name, placement, num_microbatches, lambda rank: merge_halves(row(rank), placement))


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: v chunks per rank, visited in turn by groups of N microbatches.

    Rank r runs 2(p-r-1) + (v-1)N chunk forwards ahead, then alternates. The bubble is 1F1B's divided by v, at the cost
    of v times the messages and, on rank r, 2(p-r-1) + (v-1)N + 1 live chunk activations. A group larger than p gives
    messages N-p slots of slack at the wrap from the last rank to the first.

    Legal groups are p <= N <= m with m mod N either 0 or at least p, or N = m < p: other orders increase the bubble and
    some deadlock. By default N is `smallest_group`, which works for any number of microbatches. If m < p, microbatches
    wait p-m slots at each wrap, (v-1)(p-m)(F+B)/v in total.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021); the order is
    Megatron-LM's."""
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

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism" (2022)."""
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
    """Return the rank's actions of one kind in the order of (chunk, microbatch); backwards visit the chunks mirrored."""
    stages = range(rank, num_chunks * num_ranks, num_ranks)
    of_chunk = stages if kind is Kind.F else stages[::-1]
    return map(Action._make, [(kind, of_chunk[chunk], microbatch) for chunk, microbatch in order])


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

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), and the cut-in-half variant DualPipeV."""
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
        parsed = [(Kind(step[0]), [self.stages[int(chunk)] for chunk in step[1:]]) for step in steps.split()]
        self.done += (self._action(*step) for _ in range(times) for step in parsed)

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


def with_recompute_ahead(schedule: Schedule) -> Schedule:
    """Insert an R right before each B and I, except if its own F comes right before.

    R needs nothing from another rank, so it runs while the backward's gradient is in transit: on the critical path of
    gradients up the ranks a backward costs B instead of R + B. For 1F1B the bubble becomes (p-1)(F+B) instead of
    (p-1)(F+R+B). Between R and its backward one microbatch's activations of one stage are live, for longer than if the
    backward recomputed; otherwise only stage inputs are. A backward right after its forward, as on the last rank of
    1F1B, uses the forward's graph and recomputes nothing, with the same peak: that reduces 1F1B's bubble by another 2F
    if R = F <= B."""
    if schedule.forward_only or schedule.recomputed:
        reason = "has no backward" if schedule.forward_only else "recomputes already"
        raise ConfigError(
            f"schedule {schedule.name} {reason}, so it cannot recompute ahead: use a training schedule without any R"
        )
    rows = []
    for row in schedule.actions:
        out: list[Action] = []
        for action in row:
            forward = Action(Kind.F, action.stage, action.microbatch)
            if action.kind in GRADIENTS and (not out or out[-1] != forward):
                out.append(Action(Kind.R, action.stage, action.microbatch))
            out.append(action)
        rows.append(tuple(out))
    return replace(schedule, actions=tuple(rows))


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Build an evaluation schedule, with forwards only, for any placement and any number of microbatches.

    On a loop, groups of p microbatches go through all chunks in turn; the last group includes the remainder. For m >= p
    the only bubble is the ramp, (p-1)F/v, and each message waits less than p slots for its consumer.

    On any other placement microbatch i enters v slots after microbatch i-1, with v the largest number of stages on a
    rank, and stage s runs in slot v i + d(s): d(s) is the first slot after d(s-1) that no earlier stage of the rank
    uses, modulo v. This is a legal run, so it cannot deadlock, and each message waits less than v slots. Ranks with v
    stages never idle in between. On a V, d(s) = s: the makespan is (2m + 2p-2) stage forwards, which is optimal, since
    p-1 stages come before the 2m forwards of the last rank and p-1 after them."""
    num_ranks = max(placement) + 1
    looped = tuple(placement) == loop_placement(num_ranks, max(len(placement) // num_ranks, 1))
    cells = _by_groups if looped else _periodic
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, i in cells(placement, num_microbatches):
        rows[placement[stage]].append(Action(Kind.F, stage, i))
    return Schedule("forward_only", num_microbatches, tuple(placement), tuple(map(tuple, rows)), forward_only=True)


def _by_groups(placement: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """Return (stage, microbatch) pairs for a loop; each rank runs its own pairs in this order."""
    num_ranks = max(placement) + 1
    num_groups = max(1, num_microbatches // num_ranks)
    bounds = [index * num_ranks for index in range(num_groups)] + [num_microbatches]
    return [
        (stage, i) for first, stop in pairwise(bounds) for stage in range(len(placement)) for i in range(first, stop)
    ]


def _periodic(placement: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """Return (stage, microbatch) pairs for any placement; each rank runs its own pairs in this order."""
    period = max(placement.count(rank) for rank in placement)
    taken: dict[int, set[int]] = defaultdict(set)
    delays: list[int] = []
    for rank in placement:
        slot = delays[-1] + 1 if delays else 0
        while slot % period in taken[rank]:
            slot += 1
        taken[rank].add(slot % period)
        delays.append(slot)
    cells = [(stage, i) for stage in range(len(placement)) for i in range(num_microbatches)]
    return sorted(cells, key=lambda cell: period * cell[1] + delays[cell[0]])


SCHEDULES = tuple(name for name in PIPELINE_SCHEDULES.builtin if name != "auto")
"""The built-in schedules that do not depend on costs."""


def default_schedule(num_chunks: int) -> str:
    """Return the default schedule: interleaved with several chunks per rank, else 1f1b."""
    return "interleaved" if num_chunks > 1 else "1f1b"


def build_schedule(
    name: str,
    *,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group: int | None = None,
    warm_up: str = "pa",
    recompute_ahead: bool = False,
) -> Schedule:
    """Build a training schedule by name.

    Args:
        num_ranks: Pipeline ranks, p.
        num_chunks: Stages per rank, v: 1 for gpipe, 1f1b, zb-h1 and zb-h2; 2 for zb-v and dualpipe-v; 2 or more for the
            rest.
        group: Microbatches that go through a chunk before the next chunk's turn; interleaved only.
        warm_up: How far the schedule runs ahead: "pa", or "pb" for twice as far; 1f1b only.
        recompute_ahead: Recompute activations before the backward's gradient arrives (`with_recompute_ahead`)."""
    placement = placement_for(name, num_ranks, num_chunks)
    chunks = (num_chunks,) if PIPELINE_SCHEDULES.facts(name).chunks == "several" else ()
    options = {"interleaved": (group,), "1f1b": (warm_up,)}.get(name, ())
    schedule: Schedule = PIPELINE_SCHEDULES.get(name)(num_ranks, *chunks, num_microbatches, *options)
    if schedule.placement != placement or schedule.num_microbatches != num_microbatches:
        raise ConfigError(
            f"schedule {name} was called with {num_microbatches} microbatches and placement {placement}, but returned "
            f"{schedule.num_microbatches} and {schedule.placement}: register it with other `chunks`, or correct it"
        )
    return with_recompute_ahead(schedule) if recompute_ahead else schedule


def placement_for(name: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Return the rank of each virtual stage. Raise ConfigError if the schedule does not support `num_chunks`."""
    facts: ScheduleFacts = PIPELINE_SCHEDULES.facts(name)
    if facts.chunks == "one" and num_chunks > 1:
        raise ConfigError(
            f"schedule {name} takes one stage per rank but vpp is {num_chunks}: use vpp 1, or schedule {facts.nearest}"
        )
    if facts.chunks == "vee" and num_chunks != 2:
        other = default_schedule(num_chunks)
        raise ConfigError(
            f"schedule {name} takes two stages per rank but vpp is {num_chunks}: use vpp 2, or schedule {other}"
        )
    if facts.chunks == "several" and num_chunks == 1:
        other = "1f1b" if name == "interleaved" else "gpipe"
        raise ConfigError(f"schedule {name} needs several chunks per rank but vpp is 1: set vpp to 2, or use {other}")
    return v_placement(num_ranks) if facts.chunks == "vee" else loop_placement(num_ranks, num_chunks)
