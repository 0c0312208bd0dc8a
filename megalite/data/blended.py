"""Several datasets mixed by weight, deterministically and evenly."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import PackedSource, Packing, SampleSource, require_sample
from megalite.data.index_cache import Kept

MAX_PERIOD = 1 << 20  # largest common denominator of the shares at which a block is one whole period
BLOCK = 1 << 16  # about the samples in a block of other blends


@runtime_checkable
class Indexed(Protocol):
    """A dataset with indices that may be made ahead of their use."""

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Make what samples [first, stop) need, for the first `epochs` epochs among them (None: for all)."""
        ...


@dataclass(frozen=True)
class _Block:
    """The choices of consecutive samples."""

    start: int  # samples before it
    before: list[int]  # for each dataset, its samples before the block
    choice: NDArray[np.int32]  # dataset of each sample
    ordinal: NDArray[np.int32]  # how often that dataset was chosen in the block before


class BlendedDataset:
    """Sample k comes from dataset i in the proportions of the weights, a pure function of (weights, k).

    The weights become exact fractions (a float is the decimal that it prints as), so that no error builds up in a run of
    any length. If the shares w_i have a common denominator D <= 2^20, the choice repeats after D samples, of which
    D·w_i are dataset i's. Else the samples are cut into blocks: after block b, floor(2^16·w_i·(b+1)) samples in all
    were dataset i's. Either way the block of any k is found at once, at the start of a run or at sample 10^12.

    Within a block of P samples of which q_i are dataset i's, its j-th (from 0) must fall in the slots
    [floor(j·P/q_i), ceil((j+1)·P/q_i)), and the sample due soonest comes first. Earliest-deadline-first meets all
    deadlines because the q_i sum to P (Baruah et al., "Proportionate progress", 1996), so that at no k is a count 1 or
    more from its share of a period, or more than the number of datasets from it in blocks of 2^16.

    Megatron's greedy rule (the largest w_i·k - count_i comes next) mixes as evenly, but its state at sample k takes k
    steps to find; see `MegatronBlend`.

    Raises ConfigError: a weight is not a number above 0."""

    def __init__(self, datasets: Sequence[SampleSource], weights: Sequence[float | Fraction]) -> None:
        assert len(datasets) == len(weights) and datasets, (len(datasets), len(weights))
        self.datasets = list(datasets)
        self.shares = exact_shares(weights)  # of each dataset in the samples; they sum to 1
        self.period = math.lcm(*(share.denominator for share in self.shares))
        """After so many samples every count is exact."""
        self._block_size = self.period if self.period <= MAX_PERIOD else BLOCK
        self._blocks: tuple[_Block, ...] = ()

    def sample(self, k: int) -> NDArray[np.int64]:
        dataset, index = self.locate(k)
        return self.datasets[dataset].sample(index)

    def packing(self, k: int) -> Packing:
        """Of a blend of packed samples."""
        dataset, index = self.locate(k)
        return cast(PackedSource, self.datasets[dataset]).packing(index)

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Keep the large indices that samples [first, stop) need: of each dataset the first `epochs`."""
        kept: list[Kept | None] = []
        if first < stop:
            for dataset, start, end in zip(self.datasets, self.counts(first), self.counts(stop), strict=True):
                if isinstance(dataset, Indexed):
                    kept += dataset.prepare(start, end, epochs=epochs)
        return kept

    def locate(self, k: int) -> tuple[int, int]:
        """(dataset, number of the sample in it) of sample k."""
        require_sample(k)
        block = self._block_of(k)
        dataset = block.choice.item(k - block.start)
        return dataset, block.before[dataset] + block.ordinal.item(k - block.start)

    def counts(self, k: int) -> list[int]:
        """Of each dataset, its samples before sample k."""
        block = self._block_of(k)
        inside = np.bincount(block.choice[: k - block.start], minlength=len(self.shares)).tolist()
        return [before + more for before, more in zip(block.before, inside, strict=True)]

    def _block_of(self, k: int) -> _Block:
        """Two are kept: batches cross from one to the next, and prefetch runs ahead."""
        for block in self._blocks:
            if block.start <= k < block.start + len(block.choice):
                return block
        # Floors may start a block up to one sample a dataset before number·size.
        number = k // self._block_size
        before, after = self._counts_before(number), self._counts_before(number + 1)
        while sum(after) <= k:
            number, before, after = number + 1, after, self._counts_before(number + 2)
        if self._blocks and self._block_size == self.period:
            # A period looks like the one before.
            choice, ordinal = self._blocks[0].choice, self._blocks[0].ordinal
        else:
            choice = _interleave([end - start for start, end in zip(before, after, strict=True)])
            ordinal = _ordinals(choice, len(self.shares))
        block = _Block(sum(before), before, choice, ordinal)
        # One assignment of a new tuple: the prefetch thread may be reading the old one.
        self._blocks = (*self._blocks[-1:], block)
        return block

    def _counts_before(self, blocks: int) -> list[int]:
        """Samples of each dataset in the first `blocks` blocks."""
        slots = blocks * self._block_size
        return [share.numerator * slots // share.denominator for share in self.shares]


def exact_shares(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Weights over their sum, without rounding; a float stands for the decimal that it prints as. Raises ConfigError: a
    weight is not a number above 0."""
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(
            f"data weights {[float(weight) for weight in weights]} must all be above 0; leave out what should not be read"
        )
    fractions = [Fraction(str(weight)) for weight in weights]
    # As whole numbers first: sums of fractions with unlike denominators are slow for thousands of datasets.
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [fraction.numerator * (scale // fraction.denominator) for fraction in fractions]
    total = sum(numbers)
    return [Fraction(number, total) for number in numbers]


def _interleave(quotas: list[int]) -> NDArray[np.int32]:
    """Dataset of each slot of one block, `[P]`: of the samples in their windows, the one with the earliest deadline."""
    period = sum(quotas)
    choice = np.empty(period, dtype=np.int32)
    taken = [0] * len(quotas)
    due = [(-(-period // quota), i) for i, quota in enumerate(quotas) if quota]
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
