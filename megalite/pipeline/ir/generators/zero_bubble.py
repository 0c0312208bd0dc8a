"""One stage a rank with backwards in halves: the weight gradients fill what the input gradients leave idle."""

from collections.abc import Iterable

from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.halves import merge_halves
from megalite.pipeline.ir.generators.placements import check_sizes, loop_placement
from megalite.pipeline.ir.schedule import Schedule


def zb_h1(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B in whose place of each backward rank r runs an I, and the W of r microbatches before.

    For m >= p and W <= I, F the bubble is (p-1)(F+I-W): with F = I = W a third of 1F1B's. Rank r holds p-r microbatches'
    activations, as in 1F1B, and what the W of r microbatches need.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).

    Raises:
        ConfigError: a size below 1.
    """
    return _split("zb-h1", num_ranks, num_microbatches, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: 2(p-r)-1 forwards ahead, each W put off by 2r microbatches: no rank idles between its first and last action.

    If F, I and W take the same time and m >= 2p-1, rank r works without a pause, but starts r F after rank 0 and ends
    as much later: the makespan is m(F+I+W) + (p-1)F, the same as ZB-H1's, unless the next step may start on each rank as
    soon as that rank is done. What it buys in a synchronous step is slack for messages. Rank r holds 2(p-r)-1
    microbatches' activations and what the W of 2r microbatches need.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).

    Raises:
        ConfigError: a size below 1.
    """
    return _split("zb-h2", num_ranks, num_microbatches, depth=2)


def _split(name: str, num_ranks: int, num_microbatches: int, *, depth: int) -> Schedule:
    """The order of both, `depth` 1 and 2: depth(p-r) - (depth-1) forwards ahead, W behind I by depth times r."""
    check_sizes(f"schedule {name}", num_ranks, 1, num_microbatches)

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
        yield from (
            Action(Kind.W, rank, i) for i in range(max(num_microbatches - behind, 0), num_microbatches)
        )

    placement = loop_placement(num_ranks, 1)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(merge_halves(row(rank), placement) for rank in range(num_ranks)),
    )
