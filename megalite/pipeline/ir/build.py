"""Build schedules by name, forward-only schedules, and schedules that recompute ahead."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megalite.config.errors import ConfigError
from megalite.config.parallel import PIPELINE_SCHEDULES, ScheduleFacts
from megalite.pipeline.ir.generators import loop_placement, v_placement
from megalite.pipeline.ir.schedule import GRADIENTS, Action, Kind, Schedule


def with_recompute_ahead(schedule: Schedule) -> Schedule:
    """Insert an R right before each B and I, except if its own F comes right before.

    R needs nothing from another rank, so it runs while the backward's gradient is in transit: on the critical path of
    gradients up the ranks a backward costs B instead of R + B. For 1F1B the bubble becomes (p-1)(F+B) instead of
    (p-1)(F+R+B). Between R and its backward one microbatch's activations of one stage are live, for longer than if the
    backward recomputed; otherwise only stage inputs are. A backward right after its forward, as on the last rank of
    1F1B, uses the forward's graph and recomputes nothing, with the same peak: that reduces 1F1B's bubble by another 2F
    if R = F <= B.
    """
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
    uses, modulo v. This is a legal run, so it cannot deadlock, and each message waits less than v slots. A rank with v
    stages never idles in between. On a V, d(s) = s: the makespan is (2m + 2p-2) stage forwards, which is optimal, since
    p-1 stages come before the 2m forwards of the last rank and p-1 after them.
    """
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
        recompute_ahead: Recompute activations before the backward's gradient arrives (`with_recompute_ahead`).
    """
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
