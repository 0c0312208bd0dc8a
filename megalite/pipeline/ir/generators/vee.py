"""Schedules of two stages a rank in a V: down the ranks and up again, so rank 0 has the first and the last stage."""

from collections.abc import Callable, Iterable

from megalite.config.errors import ConfigError
from megalite.pipeline.ir.actions import Action, Kind
from megalite.pipeline.ir.generators.halves import merge_halves
from megalite.pipeline.ir.generators.placements import check_sizes, v_placement
from megalite.pipeline.ir.schedule import Schedule


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """ZB-V: zero bubble on a V, in the memory of 1F1B.

    If the F, I and W of all stages take the same time and m >= 2p-1, no rank idles between its first and last action,
    and the bubble is (p-1)F of one stage: half of ZB-H1's. Each rank holds 2p stage activations at most, as much as the
    first rank in 1F1B, deferred weight gradients included. Fewer microbatches get the order of 2p-1 with the others left
    out.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory" (2024), and "Zero Bubble Pipeline Parallelism".

    Raises:
        ConfigError: a size below 1.
    """
    check_sizes("schedule zb-v", num_ranks, 2, num_microbatches)
    count = max(num_microbatches, 2 * num_ranks - 1)

    def row(rank: int) -> Iterable[Action]:
        walk = _Walk(rank, num_ranks)
        left = num_ranks - rank
        walk.repeat(2 * left - 1, "F0")
        walk.repeat(rank, "F1 F0")
        walk.repeat(left, "F1 I1 W1")
        with_forward = count - (2 * num_ranks - rank - 1)
        walk.repeat(with_forward, "F0 I0 W0 F1 I1 W1")
        walk.repeat(count - num_ranks - with_forward, "I0 W0 F1 I1 W1")
        walk.repeat(rank, "I0 I1")
        walk.repeat(left, "I0 W0")
        walk.repeat(rank, "W1")
        walk.repeat(rank, "W0")
        return (action for action in walk.done if action.microbatch < num_microbatches)

    return _vee("zb-v", num_ranks, num_microbatches, row)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """DualPipeV: a V in whose middle each forward stands next to a backward of the other chunk.

    Made so that the two of such a pair may overlap, one's messages with the other's computation; here they run one
    after the other, and a forward's output leaves before the backward next to it runs. If the F, I and W of all stages
    take the same time, the bubble is (p-1)F of one stage: half of the published (p-1)(F&B+B-3W), in which F&B is one
    step of length F+B. Each rank holds 2p+1 stage activations at most, deferred weight gradients included.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), and the cut-in-half variant DualPipeV.

    Raises:
        ConfigError: a size below 1, or fewer than 2p microbatches.
    """
    check_sizes("schedule dualpipe-v", num_ranks, 2, num_microbatches)
    least = 2 * num_ranks
    if num_microbatches < least:
        fewer_ranks = f"pp {num_microbatches // 2}, " if num_microbatches >= 4 else ""
        raise ConfigError(
            f"schedule dualpipe-v with pp {num_ranks} needs {least} microbatches or more but has {num_microbatches}: use "
            f"{least} (global batch = microbatches x micro batch size x dp), {fewer_ranks}or schedule zb-v, which takes "
            f"any number"
        )

    def row(rank: int) -> Iterable[Action]:
        walk = _Walk(rank, num_ranks)
        left = num_ranks - rank - 1
        walk.repeat(2 * left, "F0")
        walk.repeat(rank + 1, "F0 F1")
        walk.repeat(left, "I1 W F1")
        walk.repeat(num_microbatches - 2 * num_ranks + rank + 1, "F0 B1 F1 B0")
        walk.repeat(left, "B1 F1 B0")
        # Of the last 2(r+1) backwards the first half is whole.
        walk.repeat((rank + 1) // 2, "B1 B0")
        walk.repeat((rank + 1) % 2, "B1 I0")
        walk.repeat((rank + 1) // 2, "I1 I0")
        walk.repeat(left, "W I0")
        walk.repeat(rank + 1, "W")
        return walk.done

    return _vee("dualpipe-v", num_ranks, num_microbatches, row)


class _Walk:
    """A rank's list as it grows: each chunk's microbatches in order, W in the order of the I."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = (rank, 2 * num_ranks - 1 - rank)
        self.done: list[Action] = []
        self._forwards = [0, 0]
        self._backwards = [0, 0]
        self._owed: list[Action] = []

    def repeat(self, times: int, steps: str) -> None:
        """Appends the steps that many times: a kind and a chunk each, `W` alone for whichever is owed longest."""
        for _ in range(times):
            for step in steps.split():
                self.done.append(self._next(step))

    def _next(self, step: str) -> Action:
        kind = Kind(step[0])
        if kind is Kind.W:
            stages = self.stages if step == "W" else (self.stages[int(step[1])],)
            oldest = next(action for action in self._owed if action.stage in stages)
            self._owed.remove(oldest)
            return oldest
        chunk = int(step[1])
        counts = self._forwards if kind is Kind.F else self._backwards
        counts[chunk] += 1
        action = Action(kind, self.stages[chunk], counts[chunk] - 1)
        if kind is Kind.I:
            self._owed.append(Action(Kind.W, *action[1:]))
        return action


def _vee(
    name: str, num_ranks: int, num_microbatches: int, row: Callable[[int], Iterable[Action]]
) -> Schedule:
    placement = v_placement(num_ranks)
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=2 * num_ranks,
        num_microbatches=num_microbatches,
        placement=placement,
        actions=tuple(merge_halves(row(rank), placement) for rank in range(num_ranks)),
    )
