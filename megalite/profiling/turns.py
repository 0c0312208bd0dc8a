"""What ranks that wait leave to the others, where ranks outnumber cores.

A pipeline's rank that waits gives its core away. How much faster the others then are is less than the cores would allow: who
is woken finds its core taken, and another core's caches empty.
"""

from dataclasses import dataclass

import torch

from megalite.profiling.collectives import Channels, there_and_back
from megalite.profiling.timing import Timer, Timing, products

_PRODUCTS = 60
"""Of 256 x 256 matrices: some 20 ms on a core of its own, as a microbatch takes on a stage."""
_LOOKS = 4


@dataclass(frozen=True, kw_only=True)
class TurnTime:
    """The same computation, by all ranks at once and by the two ranks of each pair in turn."""

    at_once: Timing
    in_turn: Timing
    """Of both, one after the other, with a message each way."""

    @property
    def speedup(self) -> float:
        """Of a rank while every second one waits."""
        return 2.0 * self.at_once.seconds / self.in_turn.seconds


def measure_turns(timer: Timer, channels: Channels, *, seconds: float) -> TurnTime:
    """Pairs of neighbours inside a node, for about `seconds`.

    Collectives: messages between them, barriers and gathers over the timer's world.
    """
    compute = products(_PRODUCTS, timer.device)
    in_turn = there_and_back(channels, torch.zeros(1, device=timer.device), compute)
    # The machine's speed drifts: both are looked at in turns.
    looks = [
        [timer.together(run, seconds=seconds / (2 * _LOOKS)) for run in (compute, in_turn)]
        for _ in range(_LOOKS)
    ]
    idle = channels.edges is None
    times = (timer.over_ranks(_median(timings), idle=idle) for timings in zip(*looks, strict=True))
    return TurnTime(at_once=next(times), in_turn=next(times))


def _median(timings: tuple[Timing, ...]) -> Timing:
    return sorted(timings, key=lambda timing: timing.seconds)[len(timings) // 2]
