"""Mix several datasets by weight, deterministically and evenly."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import cast

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import PackedSource, Packing, SampleSource, require_sample
from megalite.data.index_cache import Kept

MAX_PERIOD = 1 << 20  # largest common denominator of the shares for which a block is one period
BLOCK = 1 << 16  # approximate samples in a block of other blends


@dataclass(frozen=True)
class _Block:
    """The datasets of consecutive samples."""

    start: int  # number of the first sample
    before: list[int]  # samples of each dataset before the block
    choice: NDArray[np.int32]  # dataset of each sample
    ordinal: NDArray[np.int32]  # number of earlier samples of that dataset in the block


class BlendedDataset:
    """Mix of datasets in proportion to weights; the dataset of sample k is a pure function of (weights, k).

    The weights are converted to exact fractions (a float to its printed decimal), so no error accumulates in a run of
    any length. If the shares w_i have a common denominator D <= 2^20, the choice repeats after D samples, D·w_i of them
    from dataset i. Otherwise samples are grouped in blocks: after block b, dataset i has provided floor(2^16·w_i·(b+1))
    samples in total. Either way the block of any k is found directly, even for sample 10^12.

    In a block of P samples, q_i of them from dataset i, its j-th sample (from 0) must be in the slots
    [floor(j·P/q_i), ceil((j+1)·P/q_i)), and the sample with the earliest deadline comes first. This meets all deadlines
    because the q_i sum to P (Baruah et al., "Proportionate progress", 1996). So at any k a count differs from its share
    by less than 1 within a period and, in blocks of 2^16, by at most the number of datasets.

    Megatron's greedy rule (the largest w_i·k - count_i comes next) mixes as evenly, but takes k steps to find its state
    at sample k; see `MegatronBlend`.

    Raises ConfigError if a weight is not a number above 0."""

    def __init__(self, datasets: Sequence[SampleSource], weights: Sequence[float | Fraction]) -> None:
        assert len(datasets) == len(weights) and datasets, (len(datasets), len(weights))
        self.datasets = list(datasets)
        self.shares = exact_shares(weights)  # fraction of samples from each dataset; the sum is 1
        self.period = math.lcm(*(share.denominator for share in self.shares))
        """Number of samples after which every count is exact."""
        self._block_size = self.period if self.period <= MAX_PERIOD else BLOCK
        self._blocks: tuple[_Block, ...] = ()

    def sample(self, k: int) -> NDArray[np.int64]:
        dataset, index = self.locate(k)
        return self.datasets[dataset].sample(index)

    def packing(self, k: int) -> Packing:
        """Return the packing of sample k; only for a blend of packed datasets."""
        dataset, index = self.locate(k)
        return cast(PackedSource, self.datasets[dataset]).packing(index)

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Store the large indices that samples [first, stop) need, the first `epochs` of each dataset (None: all)."""
        kept: list[Kept | None] = []
        if first < stop:
            for dataset, start, end in zip(self.datasets, self.counts(first), self.counts(stop), strict=True):
                if (prepare := getattr(dataset, "prepare", None)) is not None:
                    kept += prepare(start, end, epochs=epochs)
        return kept

    def locate(self, k: int) -> tuple[int, int]:
        """Return (dataset, number of the sample in it) of sample k."""
        require_sample(k)
        block = self._block_of(k)
        dataset = block.choice.item(k - block.start)
        return dataset, block.before[dataset] + block.ordinal.item(k - block.start)

    def counts(self, k: int) -> list[int]:
        """Return the number of samples of each dataset before sample k."""
        block = self._block_of(k)
        inside = np.bincount(block.choice[: k - block.start], minlength=len(self.shares)).tolist()
        return [before + more for before, more in zip(block.before, inside, strict=True)]

    def _block_of(self, k: int) -> _Block:
        """Return the block of sample k. Two blocks are cached, because batches cross blocks and prefetch runs ahead."""
        for block in self._blocks:
            if block.start <= k < block.start + len(block.choice):
                return block
        # By the floors, a block may start up to one sample per dataset before number·size.
        number = k // self._block_size
        before, after = self._counts_before(number), self._counts_before(number + 1)
        while sum(after) <= k:
            number, before, after = number + 1, after, self._counts_before(number + 2)
        if self._blocks and self._block_size == self.period:
            # All periods are equal.
            choice, ordinal = self._blocks[0].choice, self._blocks[0].ordinal
        else:
            choice = _interleave([end - start for start, end in zip(before, after, strict=True)])
            ordinal = _ordinals(choice, len(self.shares))
        block = _Block(sum(before), before, choice, ordinal)
        # Assign a new tuple, because the prefetch thread may be reading the old one.
        self._blocks = (*self._blocks[-1:], block)
        return block

    def _counts_before(self, blocks: int) -> list[int]:
        """Return the number of samples of each dataset in the first `blocks` blocks."""
        slots = blocks * self._block_size
        return [share.numerator * slots // share.denominator for share in self.shares]


def exact_shares(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Divide weights by their sum without rounding; a float is taken as its printed decimal. Raises ConfigError if a
    weight is not a number above 0."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(
            f"data weights {[float(weight) for weight in weights]} must all be above 0; leave out the other datasets"
        )
    fractions = [Fraction(str(weight)) for weight in weights]
    # As integers, because sums of fractions with different denominators are slow for thousands of datasets.
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [fraction.numerator * (scale // fraction.denominator) for fraction in fractions]
    total = sum(numbers)
    return [Fraction(number, total) for number in numbers]


def _interleave(quotas: list[int]) -> NDArray[np.int32]:
    """Return the dataset of each slot of a block, `[P]`: earliest deadline first among samples with an open window."""
    period = sum(quotas)
    choice = np.empty(period, dtype=np.int32)
    taken = [0] * len(quotas)
    due = [(-(-period // quota), i) for i, quota in enumerate(quotas) if quota]  # (deadline, dataset), window open
    heapq.heapify(due)
    closed: list[tuple[int, int]] = []  # (first slot of the window, dataset)
    for slot in range(period):
        while closed and closed[0][0] <= slot:
            i = heapq.heappop(closed)[1]
            heapq.heappush(due, (-(-(taken[i] + 1) * period // quotas[i]), i))
        deadline, i = heapq.heappop(due)
        assert deadline > slot, (slot, deadline, i)
        choice[slot] = i
        taken[i] += 1
        if taken[i] < quotas[i]:
            heapq.heappush(closed, (taken[i] * period // quotas[i], i))
    return choice


def _ordinals(choice: NDArray[np.int32], datasets: int) -> NDArray[np.int32]:
    ordinal = np.empty(len(choice), dtype=np.int32)
    by_dataset = np.argsort(choice, kind="stable")
    counts = np.bincount(choice, minlength=datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    ordinal[by_dataset] = np.arange(len(choice)) - firsts
    return ordinal
