"""Several datasets mixed by weight, deterministically and evenly."""

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.sample_source import SampleSource

MAX_PERIOD = 1 << 20
_EXACT = 1e-9


class BlendedDataset:
    """Sample k comes from dataset i in the proportions of the weights, a pure function of (weights, k).

    The weights are written as fractions q_i / D with one denominator D <= 2^20 (`apportion`); the choice repeats
    after D samples, so that any k is found at once, at the start of a run or at sample 10^10. In a period, the j-th
    sample of dataset i must fall in the slots [floor((j-1)·D/q_i), ceil(j·D/q_i)), and the sample due soonest goes
    first. Earliest-deadline-first meets all deadlines because the fractions sum to 1 (Baruah et al., "Proportionate
    progress", 1996), so after k samples dataset i has given k·q_i/D of them, never off by 1 or more, and
    exactly that many after each period. Weights with a common denominator (0.3 and 0.7; 1, 2 and 5) are exact;
    others are off by what the best D leaves, always under 2^-20 of the samples.

    Megatron's greedy rule (the largest w_i·k - count_i goes next) mixes as evenly, but its state at sample k takes k
    steps to find.

    Raises:
        ConfigError: a weight is not above 0, or so small that it would be rounded up to 2^-20.
    """

    def __init__(self, datasets: Sequence[SampleSource], weights: Sequence[float]) -> None:
        assert len(datasets) == len(weights) and datasets, (len(datasets), len(weights))
        self.datasets = list(datasets)
        self.quotas = apportion(weights)
        """Samples of each dataset in one period."""
        self._choice = _interleave(self.quotas)
        self._ordinal = _ordinals(self._choice, len(self.quotas))

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k >= 0: int64 `[seq_length + 1]`."""
        dataset, index = self.locate(k)
        return self.datasets[dataset].sample(index)

    def locate(self, k: int) -> tuple[int, int]:
        """(dataset, number of the sample in it) of sample k."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        period, slot = divmod(k, len(self._choice))
        dataset = int(self._choice[slot])
        return dataset, period * self.quotas[dataset] + int(self._ordinal[slot])


def apportion(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportions of `weights`, with a sum D <= 2^20.

    D is the smallest that represents the weights exactly, else the one with the least error in any weight.
    """
    shares = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(shares).all() or (shares <= 0).any():
        raise ConfigError(
            f"data weights {list(weights)} must all be above 0; leave out what should not be read"
        )
    shares = shares / shares.sum()
    if shares.min() < 1 / MAX_PERIOD:
        raise ConfigError(
            f"data weight {weights[int(shares.argmin())]} is {shares.min():.1e} of the sum, below the smallest share "
            f"of {1 / MAX_PERIOD:.1e}; raise it or leave that dataset out"
        )
    denominators = np.arange(1, MAX_PERIOD + 1, dtype=np.float64)
    worst = np.zeros(MAX_PERIOD)
    for share in shares:
        np.maximum(worst, np.abs(np.rint(share * denominators) - share * denominators), out=worst)
    # Everybody gets a sample in each period.
    error = np.where(denominators * shares.min() < 1 - _EXACT, np.inf, worst / denominators)
    exact = error < _EXACT
    return _largest_remainder(shares, 1 + int(np.argmax(exact) if exact.any() else np.argmin(error)))


def _largest_remainder(shares: NDArray[np.float64], total: int) -> list[int]:
    """Whole numbers with sum `total` in the proportions of `shares`: floors, and one more for the largest rests."""
    quotas = np.floor(shares * total).astype(np.int64)
    rests = shares * total - quotas
    quotas[np.argsort(-rests, kind="stable")[: total - int(quotas.sum())]] += 1
    return [int(quota) for quota in quotas]


def _interleave(quotas: list[int]) -> NDArray[np.int32]:
    """Dataset of each slot of one period, `[D]`: of the samples whose window is open, the one whose window ends first."""
    period = sum(quotas)
    choice = np.empty(period, dtype=np.int32)
    taken = [0] * len(quotas)
    due = [(-(-period // quota), i) for i, quota in enumerate(quotas)]
    heapq.heapify(due)
    closed: list[tuple[int, int]] = []
    for slot in range(period):
        while closed and closed[0][0] <= slot:
            i = heapq.heappop(closed)[1]
            heapq.heappush(due, (-(-(taken[i] + 1) * period // quotas[i]), i))
        deadline, i = heapq.heappop(due)
        assert deadline > slot, (slot, deadline, i)
        choice[slot] = i
        taken[i] += 1
        heapq.heappush(closed, (taken[i] * period // quotas[i], i))
    return choice


def _ordinals(choice: NDArray[np.int32], datasets: int) -> NDArray[np.int32]:
    """How often each slot's dataset was chosen before that slot, `[D]`."""
    ordinal = np.empty(len(choice), dtype=np.int32)
    by_dataset = np.argsort(choice, kind="stable")
    counts = np.bincount(choice, minlength=datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    ordinal[by_dataset] = np.arange(len(choice)) - firsts
    return ordinal
