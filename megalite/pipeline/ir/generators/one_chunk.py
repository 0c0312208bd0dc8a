"""Schedules of one stage per rank: GPipe, 1F1B, ZB-H1 and ZB-H2; and what all generators share."""

from collections.abc import Callable, Iterable, Sequence

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.schedule import Schedule


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: each rank hands its output to the next, and the last one to the first."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages per rank, down and up again: stage s on rank s if s < p, else on rank 2p - 1 - s.

    The turn on the last rank is a hand-over without a message, and rank 0 has both the first and the last stage.
    """
    return (*range(num_ranks), *reversed(range(num_ranks)))


def row_by_row(
    name: str, placement: tuple[int, ...], num_microbatches: int, row: Callable[[int], Iterable[Action]]
) -> Schedule:
    """The schedule with these actions on each rank."""
    num_ranks = max(placement) + 1
    return Schedule(name, num_microbatches, placement, tuple(tuple(row(rank)) for rank in range(num_ranks)))


def merge_halves(row: Iterable[Action], placement: Sequence[int]) -> tuple[Action, ...]:
    """The list with each adjacent I(s,i), W(s,i) as one B(s,i), if no other rank waits for that I.

    On stage 0 no rank reads the gradient, at the turn of a V the same rank does, after the W in any case: there a B
    ends when the W would have, and spares the bookkeeping between the halves. Elsewhere a B would send its gradient
    later by W.
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

    Bubble (p-1)(F+B); all m microbatches' activations are held at once. 2m messages leave an inner rank.

    Source: Huang et al., "GPipe" (2019).
    """

    def row(rank: int) -> Iterable[Action]:
        return (Action(kind, rank, i) for kind in (Kind.F, Kind.B) for i in range(num_microbatches))

    return row_by_row("gpipe", loop_placement(num_ranks, 1), num_microbatches, row)


def one_f_one_b(num_ranks: int, num_microbatches: int, warm_up: str = "pa") -> Schedule:
    """1F1B: rank r runs K forwards ahead, then one backward and one forward in turn.

    Warm-up "pa" has K = min(m, p-r), the least that keeps the ranks busy when messages cost nothing: the bubble is
    GPipe's, (p-1)(F+B), and rank r holds K microbatches' activations. Warm-up "pb" has K = min(m, 2(p-r)-1): twice as
    many activations, for which each hop has a whole forward and backward of slack to hide its two messages in.

    Sources: Narayanan et al., "PipeDream-2BW" (2021), the flush variant; Fan et al., "DAPPLE" (2021): the two warm-ups are
    its policies A and B.
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
    """ZB-H1: 1F1B where in place of each backward rank r runs an I, and the W of r microbatches before.

    For m >= p and W <= I, F the bubble is (p-1)(F+I-W): with F = I = W a third of 1F1B's. Rank r holds p-r microbatches'
    activations, as in 1F1B, and what the W of r microbatches need.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
    """
    return _split("zb-h1", num_ranks, num_microbatches, depth=1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-H2: 2(p-r)-1 forwards ahead, each W put off by 2r microbatches: no rank idles between its first and last action.

    If F, I and W take the same time and m >= 2p-1, rank r works without a pause, but starts r F after rank 0 and ends
    as much later: the makespan is m(F+I+W) + (p-1)F, the same as ZB-H1's, unless the next step may start on each rank as
    soon as that rank is done. What it buys in a synchronous step is slack for messages. Rank r holds 2(p-r)-1
    microbatches' activations and what the W of 2r microbatches need.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
    """
    return _split("zb-h2", num_ranks, num_microbatches, depth=2)


def _split(name: str, num_ranks: int, num_microbatches: int, *, depth: int) -> Schedule:
    """The order of both, `depth` 1 and 2: depth(p-r) - (depth-1) forwards ahead, W behind I by depth times r."""
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
