"""Generate schedules with one stage per rank: GPipe, 1F1B, ZB-H1 and ZB-H2; and functions shared by all generators."""

from collections.abc import Callable, Iterable, Sequence

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.schedule import Schedule


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Place stage s on rank s mod p: each rank sends its output to the next, and the last one to the first."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Place two stages per rank, down and up again: stage s on rank s if s < p, else on rank 2p - 1 - s.

    The turn on the last rank needs no message, and rank 0 has both the first and the last stage.
    """
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
    time of W.
    """
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

    Source: Huang et al., "GPipe" (2019).
    """

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

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
    """
    return _split("zb-h1", num_ranks, num_microbatches, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: 2(p-r)-1 forwards ahead, and each W deferred by 2r microbatches.

    If F, I and W take the same time and m >= 2p-1, rank r never idles between its first and last action, but starts r F
    after rank 0 and ends as much later: the makespan is m(F+I+W) + (p-1)F, the same as ZB-H1's, unless the next step
    may start on each rank as soon as that rank is done. In a synchronous step it only gives messages more slack. Rank r
    holds the activations of 2(p-r)-1 microbatches and the deferred tensors of 2r microbatches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
    """
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
