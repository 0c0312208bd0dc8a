"""Times operations (warm-up, samples until a time window is full, median and spread), and fits constants to times.

A sample repeats short operations, so that reading the clock and waiting for the device are negligible. On several ranks
all windows open together: each rank's speed is measured while the others of its node compute as well, as in training."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megalite.topology.group import Group

FEWEST, MOST = 3, 400  # samples of one operation
MOST_REPEATS = 10_000  # runs per sample
_PRODUCTS = 10  # of 256 x 256 matrices, 0.4 ms each on an idle core with AVX-512


@dataclass(frozen=True, kw_only=True)
class Timing:
    seconds: float  # median
    spread: float  # distance between the quartiles over the median
    samples: int


def timing_of(samples: Sequence[float]) -> Timing:
    median = statistics.median(samples)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(seconds=median, spread=(high - low) / median if median else 0.0, samples=len(samples))


def products(count: int, device: torch.device) -> Callable[[], None]:
    """Return a function that runs `count` products of 256 x 256 matrices, which fit into a cache."""
    x = torch.ones(256, 256, device=device)
    out = torch.empty_like(x)

    def compute() -> None:
        for _ in range(count):
            torch.mm(x, x, out=out)

    return compute


class Timer:
    """Times operations on the device of each rank of `world`; waits for the device before reading the clock. `crowded`:
    ranks outnumber cores and take turns, so a sample must last many turns; otherwise its median would be the speed of a
    rank with a free core. `clock` is for tests."""

    def __init__(
        self,
        device: torch.device,
        world: Group,
        *,
        crowded: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.device, self.world, self._clock, self._crowded = device, world, clock, crowded
        # A sample must be much longer than its overhead: waiting for a GPU takes about 10 µs.
        self._shortest = 2e-3 if device.type == "cuda" else 5e-4
        if crowded:
            self._shortest = 20e-3  # a scheduler's turn is a few milliseconds
        self._computing: list[float] = []  # times of the products in `between_computations`

    def each(self, run: Callable[[], object], *, seconds: float) -> Timing:
        """Time `run` on every rank separately, all at once, for about `seconds`.

        Collectives: a barrier over the world."""
        repeats, _ = self._repeats(run, agree=lambda seconds: seconds)
        self.barrier()
        samples: list[float] = []
        stop = self._clock() + seconds
        while len(samples) < FEWEST or (len(samples) < MOST and self._clock() < stop):
            samples.append(self._sample(run, repeats))
        # Fill the rest of the window, so that slower ranks take their last samples under the same load.
        while self.world.size > 1 and self._clock() < stop:
            self._sample(run, repeats)
        return timing_of(samples)

    def together(self, run: Callable[[], object], *, seconds: float) -> Timing:
        """Time `run`, in which ranks wait for each other, equally often on all ranks, for about `seconds`.

        Collectives: those of `run`, a barrier and the maximum of a number over the world."""
        self.barrier()
        repeats, sample = self._repeats(run, agree=self._slowest)
        count = max(FEWEST, min(MOST, int(seconds / max(sample, 1e-9))))
        self.barrier()
        return timing_of([self._sample(run, repeats) for _ in range(count)])

    def between_computations(self, run: Callable[[], object], *, seconds: float) -> Timing:
        """Time `run` as in `together`, but between computations if ranks take turns on the cores. There a rank that
        waits gives up its turn; the longer it has computed, the later it runs again. Each run follows products of a few
        milliseconds, as between two collectives of a layer; their own time is subtracted.

        Collectives: those of `run`, barriers and maxima of a number over the world."""
        if not self._crowded:
            return self.together(run, seconds=seconds)
        compute = products(_PRODUCTS, self.device)

        def both() -> None:
            compute()
            run()

        # The difference is small compared with the products' time: use the median of all their timings so far.
        alone = self.together(compute, seconds=seconds / 4)
        self._computing.append(alone.seconds)
        whole = self.together(both, seconds=3 * seconds / 4)
        left = max(whole.seconds - statistics.median(self._computing), 0.01 * whole.seconds)
        return Timing(seconds=left, spread=whole.spread * whole.seconds / left, samples=whole.samples)

    def over_ranks(self, timing: Timing, *, idle: bool = False) -> Timing:
        """Return the median of all medians, and of all spreads, of ranks that are not idle; the same on every rank.

        Collectives: a gather over the world."""
        own = None if idle else [timing.seconds, timing.spread, timing.samples]
        rows = [row for row in self.world.gather_json(own) if row is not None]
        seconds, spreads, samples = zip(*rows, strict=True)
        return Timing(seconds=statistics.median(seconds), spread=statistics.median(spreads), samples=min(samples))

    def each_over_ranks(self, run: Callable[[], object], *, seconds: float) -> Timing:
        return self.over_ranks(self.each(run, seconds=seconds))

    def barrier(self) -> None:
        self._slowest(0.0)

    def _slowest(self, seconds: float) -> float:
        if self.world.size == 1:
            return seconds
        number = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        self.world.all_reduce(number, op="max")
        return float(number.item())

    def _repeats(self, run: Callable[[], object], *, agree: Callable[[float], float]) -> tuple[int, float]:
        """Return (runs per sample, approximate seconds per sample), after a warm-up. The number grows in steps, because
        a short run may have had a free core by chance."""
        self._sample(run, 1)
        repeats = 1
        while True:
            once = agree(self._sample(run, repeats))
            wanted = min(MOST_REPEATS, math.ceil(self._shortest / max(once, 1e-9)))
            if wanted < 2 * repeats:
                return repeats, once * repeats
            repeats = min(wanted, 20 * repeats)

    def _sample(self, run: Callable[[], object], repeats: int) -> float:
        """Return the mean seconds of `repeats` runs."""
        self._wait()
        started = self._clock()
        for _ in range(repeats):
            run()
        self._wait()
        return (self._clock() - started) / repeats

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fit_times(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] | None = None
) -> tuple[tuple[float, ...], float]:
    """Fit seconds = known + Σ constant · count with constants of at least 0. Returns the constants and the mean of
    |fitted / measured - 1|.

    Minimizes squared relative errors: each row is divided by its time, so that a message of 1 kB counts as much as one
    of 1 MB. `columns`: counts of each constant (latencies, bytes, FLOPs) per measurement. As there are few constants,
    all choices of those fixed at 0 are tried."""
    time = np.asarray(seconds, dtype=float)
    left = np.ones(len(time)) if known is None else 1.0 - np.asarray(known, dtype=float) / time
    rows = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1) / time[:, None]
    # Scale columns to similar sizes for accuracy.
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    best, least = np.zeros(len(columns)), np.inf
    for count in range(len(columns), 0, -1):
        for free in itertools.combinations(range(len(columns)), count):
            found = np.zeros(len(columns))
            found[list(free)] = np.linalg.lstsq(rows[:, free], left, rcond=None)[0]
            squares = float(((rows @ found - left) ** 2).sum())
            if (found >= 0).all() and squares < least:
                best, least = found, squares
    error = float(np.abs(rows @ best - left).mean())
    return tuple(map(float, best / scale)), error
