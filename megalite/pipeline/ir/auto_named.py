"""The schedules that `auto` is measured against: all that have a name and take the placement."""

from collections.abc import Iterator

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.interleaved import interleaved, looped_bfs
from megalite.pipeline.ir.generators.one_chunk import WARM_UPS, gpipe, one_f_one_b
from megalite.pipeline.ir.generators.placements import loop_placement, v_placement
from megalite.pipeline.ir.generators.vee import dualpipe_v, zb_v
from megalite.pipeline.ir.generators.zero_bubble import zb_h1, zb_h2
from megalite.pipeline.ir.schedule import Schedule

MOST_GROUPS = 8
"""Of interleaved schedules, that many microbatch groups, the smallest and the largest among them."""


def named_schedules(placement: tuple[int, ...], num_microbatches: int) -> Iterator[Schedule]:
    """The named schedules of a loop or V; none of another placement."""
    p, m = max(placement) + 1, num_microbatches
    if placement == loop_placement(p, 1):
        yield gpipe(p, m)
        yield from (one_f_one_b(p, m, warm_up) for warm_up in WARM_UPS)
        yield zb_h1(p, m)
        yield zb_h2(p, m)
    elif placement == loop_placement(p, len(placement) // p):
        yield looped_bfs(p, len(placement) // p, m)
        yield from (interleaved(p, len(placement) // p, m, group) for group in _groups(p, m))
    if placement == v_placement(p):
        yield zb_v(p, m)
        if m >= 2 * p:
            yield dualpipe_v(p, m)


def one_by_one(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """One microbatch after the other through all stages and back: slow, but nothing holds less."""
    num_ranks, num_stages = max(placement) + 1, len(placement)
    trip = [(Kind.F, stage) for stage in range(num_stages)]
    trip += [(Kind.B, stage) for stage in reversed(range(num_stages))]
    return Schedule(
        name="auto",
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(
            tuple(
                Action(kind, stage, microbatch)
                for microbatch in range(num_microbatches)
                for kind, stage in trip
                if placement[stage] == rank
            )
            for rank in range(num_ranks)
        ),
    )


def _groups(num_ranks: int, num_microbatches: int) -> list[int]:
    """Legal microbatch groups; where there are many, smaller ones more densely."""
    legal = [
        group
        for group in range(num_ranks, num_microbatches)
        if num_microbatches % group == 0 or num_microbatches % group >= num_ranks
    ]
    legal.append(num_microbatches)
    if len(legal) <= MOST_GROUPS:
        return legal
    steps = MOST_GROUPS - 1
    return [legal[(len(legal) - 1) * step * step // (steps * steps)] for step in range(steps + 1)]
