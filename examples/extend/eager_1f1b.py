"""A custom pipeline schedule: 1F1B with one more forward ahead, which hides messages and costs one activation."""

from collections.abc import Iterator

from megalite import PIPELINE_SCHEDULES
from megalite.pipeline.ir.generators import loop_placement, row_by_row
from megalite.pipeline.ir.schedule import Action, Kind, Schedule


@PIPELINE_SCHEDULES.register("eager-1f1b")
def eager_1f1b(num_ranks: int, num_microbatches: int) -> Schedule:
    """Which rank does what, in which order. The messages between ranks follow from that, and it is proved before it runs
    that every action is there once, reads what is made before it, and that no rank waits forever."""

    def row(rank: int) -> Iterator[Action]:
        ahead = min(num_microbatches, num_ranks - rank + 1)
        yield from (Action(Kind.F, rank, i) for i in range(ahead))
        for i in range(num_microbatches):
            yield Action(Kind.B, rank, i)
            if ahead + i < num_microbatches:
                yield Action(Kind.F, rank, ahead + i)

    return row_by_row("eager-1f1b", loop_placement(num_ranks, 1), num_microbatches, row)
