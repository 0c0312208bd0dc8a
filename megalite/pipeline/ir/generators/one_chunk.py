"""Schedules of one stage a rank with whole backwards: GPipe and 1F1B."""

from collections.abc import Iterable

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.placements import check_sizes, loop_placement
from megalite.pipeline.ir.schedule import Schedule

WARM_UPS = ("pa", "pb")


def gpipe(num_ranks: int, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards, microbatches ascending in both.

    Bubble (p-1)(F+B); all m microbatches' activations are held at once. 2m messages leave an inner rank.

    Source: Huang et al., "GPipe" (2019).

    Raises:
        ConfigError: a size below 1.
    """
    check_sizes("schedule gpipe", num_ranks, 1, num_microbatches)
    return Schedule(
        name="gpipe",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=tuple(
            tuple(Action(kind, rank, i) for kind in (Kind.F, Kind.B) for i in range(num_microbatches))
            for rank in range(num_ranks)
        ),
    )


def one_f_one_b(num_ranks: int, num_microbatches: int, warm_up: str = "pa") -> Schedule:
    """1F1B: rank r runs K forwards ahead, then one backward and one forward in turn.

    Warm-up "pa" has K = min(m, p-r), the least that keeps the ranks busy when messages cost nothing: the bubble is
    GPipe's, (p-1)(F+B), and rank r holds K microbatches' activations. Warm-up "pb" has K = min(m, 2(p-r)-1): twice as
    many activations, for which each hop has a whole forward and backward of slack to hide its two messages in.

    Sources: Narayanan et al., "PipeDream-2BW" (2021), the flush variant; Fan et al., "DAPPLE" (2021), whose policies
    A and B the two warm-ups are.

    Raises:
        ConfigError: a size below 1, or another warm-up.
    """
    check_sizes("schedule 1f1b", num_ranks, 1, num_microbatches)
    if warm_up not in WARM_UPS:
        raise ConfigError(
            f"the warm-up of schedule 1f1b is {warm_up!r}; it must be one of {', '.join(WARM_UPS)}"
        )

    def row(rank: int) -> Iterable[Action]:
        left = num_ranks - rank
        ahead = min(num_microbatches, left if warm_up == "pa" else 2 * left - 1)
        yield from (Action(Kind.F, rank, i) for i in range(ahead))
        for i in range(num_microbatches):
            yield Action(Kind.B, rank, i)
            if ahead + i < num_microbatches:
                yield Action(Kind.F, rank, ahead + i)

    return Schedule(
        name="1f1b",
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        placement=loop_placement(num_ranks, 1),
        actions=tuple(tuple(row(rank)) for rank in range(num_ranks)),
    )
