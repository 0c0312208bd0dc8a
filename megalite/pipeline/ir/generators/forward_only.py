"""Evaluation: forwards alone, on any placement."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.placements import check_sizes, loop_placement
from megalite.pipeline.ir.schedule import Schedule


def forward_only(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """Evaluation: forwards alone, with nothing kept. Any placement and any number of microbatches.

    On a loop of several chunks groups of p microbatches go through all chunks in turn, the last group taking the
    remainder as well. For m >= p there is no bubble but the ramp, (p-1)F/v, and no message waits p slots or more for
    its consumer.

    On any other placement microbatch i enters v slots after microbatch i-1, v being the most stages on a rank, and
    stage s runs in slot v i + d(s): d(s) is the first slot after d(s-1) that no earlier stage of the rank takes, modulo
    v. That is a legal run, so no rank waits for ever, and no message waits v slots or more. A rank with v stages is
    never idle in between. On a V d(s) = s: the makespan is (2m + 2p-2) stage forwards, the least possible, since the
    last rank's 2m stand between p-1 on the way down and p-1 on the way up.

    Raises:
        ConfigError: no stage, or no microbatch.
    """
    if not placement:
        raise ConfigError("schedule forward_only: the placement lists no stage; give one rank a stage")
    num_ranks = max(placement) + 1
    check_sizes("schedule forward_only", num_ranks, 1, num_microbatches)
    looped = tuple(placement) == loop_placement(num_ranks, max(len(placement) // num_ranks, 1))
    cells = _by_groups if looped else _periodic
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for stage, i in cells(placement, num_microbatches):
        rows[placement[stage]].append(Action(Kind.F, stage, i))
    return Schedule(
        name="forward_only",
        num_ranks=num_ranks,
        num_stages=len(placement),
        num_microbatches=num_microbatches,
        placement=tuple(placement),
        actions=tuple(map(tuple, rows)),
        forward_only=True,
    )


def _by_groups(placement: Sequence[int], num_microbatches: int) -> list[tuple[int, int]]:
    """(stage, microbatch) in an order whose restriction to a rank is that rank's order, on a loop."""
    num_ranks = max(placement) + 1
    num_groups = max(1, num_microbatches // num_ranks)
    bounds = [index * num_ranks for index in range(num_groups)] + [num_microbatches]
    return [
        (stage, i)
        for first, stop in pairwise(bounds)
        for stage in range(len(placement))
        for i in range(first, stop)
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
