"""Every schedule by its name."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from megalite.config.errors import ConfigError
from megalite.config.parallel import PIPELINE_SCHEDULES, ScheduleFacts
from megalite.pipeline.ir.actions import GRADIENTS, Action, Kind
from megalite.pipeline.ir.generators.one_chunk import loop_placement, v_placement
from megalite.pipeline.ir.schedule import Schedule


def with_recompute_ahead(schedule: Schedule) -> Schedule:
    """The schedule with an R right before each B and I, except where the pair's F is the action right before.

    R needs nothing from another rank, so it runs while the backward's gradient is on its way: on the path along which
    gradients travel up the ranks a backward costs B instead of R + B. For 1F1B that makes the bubble (p-1)(F+B) instead
    of (p-1)(F+R+B). Between R and its backward one microbatch's activations of one stage are alive, for longer than if
    the backward recomputed; else only stage inputs are. A pair with its backward right after its forward, as on the
    last rank of 1F1B, keeps its graph and recomputes nothing, with the same peak: that takes another 2F from 1F1B's
    bubble where R = F <= B.
    """
    if schedule.forward_only or schedule.recomputed:
        reason = "has no backward" if schedule.forward_only else "recomputes already"
        raise ConfigError(
            f"schedule {schedule.name} {reason}, so it cannot recompute ahead: give a training schedule without any R"
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
    """Evaluation: forwards alone, with nothing kept. Any placement and any number of microbatches.

    On a loop of several chunks groups of p microbatches go through all chunks in turn, the last group taking the
    remainder as well. For m >= p there is no bubble but the ramp, (p-1)F/v, and no message waits p slots or more for
    its consumer.

    On any other placement microbatch i enters v slots after microbatch i-1, v being the most stages on a rank, and
    stage s runs in slot v i + d(s): d(s) is the first slot after d(s-1) that no earlier stage of the rank takes, modulo
    v. That is a legal run, so no rank waits forever, and no message waits v slots or more. A rank with v stages is
    never idle in between. On a V d(s) = s: the makespan is (2m + 2p-2) stage forwards, the least possible, since the
    last rank's 2m stand between p-1 on the way down and p-1 on the way up.
    """
    num_ranks = max(placement) + 1
    looped = tuple(placement) == loop_placement(num_ranks, max(len(placement) // num_ranks, 1))
    cells = _by_groups if looped else _periodic
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, i in cells(placement, num_microbatches):
        rows[placement[stage]].append(Action(Kind.F, stage, i))
    return Schedule("forward_only", num_microbatches, tuple(placement), tuple(map(tuple, rows)), forward_only=True)


def _by_groups(placement: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """(stage, microbatch) in an order that is, on each rank, that rank's order, on a loop."""
    num_ranks = max(placement) + 1
    num_groups = max(1, num_microbatches // num_ranks)
    bounds = [index * num_ranks for index in range(num_groups)] + [num_microbatches]
    return [
        (stage, i) for first, stop in pairwise(bounds) for stage in range(len(placement)) for i in range(first, stop)
    ]


def _periodic(placement: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """The same on any placement."""
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
"""Those that come with megalite and go by numbers alone."""


def default_schedule(num_chunks: int) -> str:
    """The schedule of a user who names none: interleaved with several chunks per rank, else 1f1b."""
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
    """The training schedule of that name.

    Args:
        num_ranks: Pipeline ranks, p.
        num_chunks: Stages per rank, v: 1 for gpipe, 1f1b, zb-h1 and zb-h2; 2 for zb-v and dualpipe-v; 2 or more for the
            rest.
        group: Microbatches that interleaved sends through a chunk before the next chunk's turn; others have no groups.
        warm_up: How far 1f1b runs ahead: "pa", or "pb" for twice as far; others have none.
        recompute_ahead: Whether forwards run again before the backward's gradient is waited for.
    """
    placement = placement_for(name, num_ranks, num_chunks)
    chunks = (num_chunks,) if PIPELINE_SCHEDULES.facts(name).chunks == "several" else ()
    options = {"interleaved": (group,), "1f1b": (warm_up,)}.get(name, ())
    schedule: Schedule = PIPELINE_SCHEDULES.get(name)(num_ranks, *chunks, num_microbatches, *options)
    if schedule.placement != placement or schedule.num_microbatches != num_microbatches:
        raise ConfigError(
            f"schedule {name} was asked for {num_microbatches} microbatches on the placement {placement}, and made "
            f"{schedule.num_microbatches} on {schedule.placement}: state other `chunks` where it is registered, or correct it"
        )
    return with_recompute_ahead(schedule) if recompute_ahead else schedule


def placement_for(name: str, num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Per virtual stage the rank that holds it, in every schedule of that name and these sizes."""
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
