"""The whole space sized and timed in closed form: what fits, in the order of its estimated speed."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.planner.search.features import Counter
from megalite.planner.search.memory import Sizer, fullest
from megalite.planner.search.request import Request
from megalite.planner.search.space import Layout, Pipeline, Shares, Space, enumerate_space
from megalite.planner.search.time import Clock, Prices

Floats = npt.NDArray[np.float64]
_AT_ONCE = 20_000
"""Estimates that are put in order before the next ones are."""


@dataclass(frozen=True)
class Survey:
    """Per block, bytes of the fullest rank and seconds of a step: [pipelines, shares]."""

    request: Request
    space: Space
    memory: tuple[Floats, ...]
    seconds: tuple[Floats, ...]
    """Infinite where it does not fit."""

    @property
    def fitting(self) -> int:
        """Layouts within the memory limit."""
        return int(sum(np.isfinite(each).sum() for each in self.seconds))

    def at(self, index: int) -> Layout:
        """The layout with that number, over all blocks."""
        block = int(np.searchsorted(self._ends, index, side="right"))
        inside = index - (int(self._ends[block - 1]) if block else 0)
        pipeline, share = divmod(inside, len(self.space.blocks[block].shares))
        return self.space.blocks[block].layout(pipeline, share)

    @property
    def _ends(self) -> npt.NDArray[np.int64]:
        return np.cumsum([len(block) for block in self.space.blocks])

    def fastest(self) -> Iterator[tuple[Layout, float]]:
        """Layouts that fit with their seconds, by these; of equals the one with the smallest cp and micro batch."""
        seconds = np.concatenate([each.reshape(-1) for each in self.seconds])
        left = np.flatnonzero(np.isfinite(seconds))
        while len(left):
            count = min(_AT_ONCE, len(left))
            bound = np.partition(seconds[left], count - 1)[count - 1]
            now, left = left[seconds[left] <= bound], left[seconds[left] > bound]
            # To six digits: further ones are not meant.
            digits = np.round(np.log(seconds[now]), 6)
            order = np.lexsort((self._column("micro_batch_size", now), self._column("cp", now), digits))
            for index in now[order].tolist():
                yield self.at(index), float(seconds[index])

    def _column(self, name: str, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """A share's number for each layout."""
        block = np.searchsorted(self._ends, indices, side="right")
        counts = np.array([len(each.shares) for each in self.space.blocks])
        starts = np.array([each.rows.start for each in self.space.blocks])
        first = np.concatenate(([0], self._ends))[block]
        column: npt.NDArray[np.int64] = getattr(self.space.shares, name)
        return column[starts[block] + (indices - first) % counts[block]]

    def leanest(self) -> tuple[Layout, float]:
        """The layout that needs least memory, whether it fits or not, and its bytes."""
        memory = np.concatenate([each.reshape(-1) for each in self.memory])
        index = int(np.argmin(memory))
        return self.at(index), float(memory[index])

    def frontier(self) -> list[tuple[float, float]]:
        """(bytes, seconds): of each amount of memory the fastest layout, as long as more memory gives more speed."""
        memory = np.concatenate([each.reshape(-1) for each in self.memory])
        seconds = np.concatenate([each.reshape(-1) for each in self.seconds])
        fits = np.isfinite(seconds)
        memory, seconds = memory[fits], seconds[fits]
        order = np.lexsort((seconds, memory))
        best = np.minimum.accumulate(seconds[order])
        better = np.concatenate(([True], best[1:] < best[:-1] * (1.0 - 1e-6)))[: len(best)]
        return list(zip(memory[order][better].tolist(), best[better].tolist(), strict=True))


def survey(request: Request, cluster: Cluster, stack: SoftwareStack) -> Survey:
    """Sizes and times the whole space.

    Raises:
        ConfigError: the accelerator does not have the precision.
    """
    space = enumerate_space(request)
    counter = Counter(request.config)
    sizer, clock = Sizer(request.config), Clock(request.config, cluster, stack)
    memory, seconds = [], []
    for pp in sorted({block.pipelines[0].pp for block in space.blocks}):
        blocks = [block for block in space.blocks if block.pipelines[0].pp == pp]
        shares = Shares.joined([block.shares for block in blocks])
        coefficients = sizer.coefficients(shares, pp)
        prices = clock.prices(shares, pp)
        first = 0
        for block in blocks:
            mine = slice(first, first + len(block.shares))
            first = mine.stop
            held = fullest([counter(each) for each in block.pipelines], coefficients[:, mine])
            memory.append(held)
            seconds.append(
                _times(clock, counter, block.pipelines, prices.take(mine), held <= request.memory_limit)
            )
    return Survey(request, space, tuple(memory), tuple(seconds))


def _times(
    clock: Clock,
    counter: Counter,
    pipelines: tuple[Pipeline, ...],
    prices: Prices,
    fits: npt.NDArray[np.bool_],
) -> Floats:
    """Seconds of what fits."""
    found = np.full(fits.shape, np.inf)
    rows, columns = np.flatnonzero(fits.any(1)), np.flatnonzero(fits.any(0))
    if len(rows):
        some = [pipelines[row] for row in rows.tolist()]
        cuts = [counter.cut(each) for each in some]
        found[np.ix_(rows, columns)] = clock.seconds(some, cuts, prices.take(columns))
    found[~fits] = np.inf
    return found
