"""Samples in Megatron-LM's order, value for value, for runs that began there or are compared with one there.

The arrays are those that its GPTDataset and BlendedDataset make (megatron-core 0.5 to 0.16: gpt_dataset.py,
helpers.cpp): one `numpy.random.RandomState(seed)`, a stream that numpy has frozen, shuffles the document index, then the
shuffle index.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import DocumentDataset, require_sample
from megalite.data.gpt_dataset import sizes_digest
from megalite.data.index_cache import Arrays, IndexCache, Kept, OneIndex, Recipe

MAX_BLENDED = 32766  # datasets in one blend: Megatron numbers them with int16
_SURPLUS = 0.005
_BLOCK = 1 << 20
_INT32_MAX = (1 << 31) - 1
_LAST_EPOCH = 0.80  # a last epoch that gives fewer of its samples than this is shuffled separately
_LANES = 1024
_STEPS = 1024  # a wave is so many lanes of so many samples
_WIDE_PASSES, _NARROW = 4, 64  # passes over all wrong lanes of a wave, before they are over that many of them at a time


@dataclass(frozen=True)
class MegatronPlan:
    """What follows from the numbers alone."""

    epochs: int  # as few as hold the samples asked for
    num_samples: int  # all that fit into the tokens of these epochs: at least as many as asked for
    separate: int | None
    """Samples before the last epoch, if its documents and samples are shuffled separately; else None."""

    @classmethod
    def of(cls, *, num_tokens: int, num_samples: int | None, seq_length: int) -> "MegatronPlan":
        """The plan for an epoch of `num_tokens` > 0 tokens; num_samples None asks for one epoch."""
        assert num_tokens > 0, num_tokens
        epochs, separate = 1, None
        if num_samples is not None:
            epochs = max(1, -(-(num_samples * seq_length + 1) // num_tokens))
        if num_samples is not None and epochs > 1:
            before_last = ((epochs - 1) * num_tokens - 1) // seq_length
            per_epoch = (num_tokens - 1) // seq_length
            if num_samples - before_last < int(_LAST_EPOCH * per_epoch):
                separate = before_last
        return cls(epochs, (epochs * num_tokens - 1) // seq_length, separate)

    def arrays(self, documents: int) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Types and shapes for so many documents an epoch: `document_index` [epochs·documents], the sequence numbers of all
        epochs; `sample_index` [samples + 1, 2], where in it each sample starts (place, token); `shuffle_index` [samples],
        which of those sample k is."""
        places, samples = documents * self.epochs, self.num_samples
        sample_type = np.dtype(np.int32 if places <= _INT32_MAX else np.int64)
        shuffle_type = np.dtype(np.uint32 if samples < (1 << 32) - 2 else np.int64)
        return {
            "document_index": (np.dtype(np.int32), (places,)),
            "sample_index": (sample_type, (samples + 1, 2)),
            "shuffle_index": (shuffle_type, (samples,)),
        }


@dataclass(eq=False, kw_only=True)
class MegatronDataset(OneIndex, DocumentDataset):
    """Samples over some documents of a token file, in the order of Megatron-LM's GPTDataset with the same arguments.

    Documents and samples of all epochs are shuffled together, so sample k depends on num_samples: a longer run, unless it
    needs no more epochs, has another order from its first sample on. (The default order has not.)

    Raises ConfigError: the split holds no token, or, where one epoch is asked for, fewer than seq_length + 1."""

    num_samples: int | None  # that the run will ask for; None: as many as one epoch has
    cache: IndexCache | None = None  # where large indices are kept; None: all are made in memory

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = self.seq_length + 1 if self.num_samples is None else 1
        if self.num_tokens < needed:
            raise self._too_small(f"fewer than the {needed} needed")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(
                f"seed {self.seed} is outside the range of Megatron-LM's order; give one from 0 to {(1 << 32) - 1}"
            )
        self.plan = MegatronPlan.of(
            num_tokens=self.num_tokens, num_samples=self.num_samples, seq_length=self.seq_length
        )

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the tokens of one epoch make."""
        return (self.num_tokens - 1) // self.seq_length

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k, 0 <= k < len: int64 `[seq_length + 1]`; inputs are all but the last token, labels all but the
        first. Raises ConfigError: k is beyond the last sample, or a token id is not in the vocabulary."""
        _require_below(self.name, k, len(self))
        row = self.arrays["shuffle_index"].item(k)
        position, offset = self.arrays["sample_index"][row].tolist()
        return self._read(self.arrays["document_index"], position, offset, self.seq_length + 1)

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Keep the index, if it is large; it is one for all epochs, so `epochs` changes nothing. Returns it, or None
        where it is small or cannot be kept. Raises ConfigError: there are fewer than `stop` samples, or the folder that
        the user has chosen cannot be written."""
        _require_below(self.name, max(stop - 1, 0), len(self))
        return self._keep()

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe(
            name=f"{self.indexed.prefix}, {self.name}",
            identity=self._identity,
            arrays=self.plan.arrays(len(self.documents)),
            fill=self._fill,
        )

    def _identity(self) -> Mapping[str, Any]:
        plan = self.plan
        return {
            "kind": "megatron",
            "sizes": sizes_digest(self._sizes),
            "first": self.documents.start,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "plan": [plan.epochs, plan.num_samples, plan.separate],
        }

    def _fill(self, arrays: Arrays) -> None:
        random, plan = np.random.RandomState(self.seed), self.plan
        document_index, shuffle_index = arrays["document_index"], arrays["shuffle_index"]
        epoch = np.arange(self.documents.start, self.documents.stop, dtype=np.int32)
        cut = len(document_index) if plan.separate is None else (plan.epochs - 1) * len(epoch)
        for part in (document_index[:cut], document_index[cut:]):
            part.reshape(-1, len(epoch))[:] = epoch
            if len(part):
                random.shuffle(part)
        self._fill_sample_index(arrays["sample_index"], document_index)
        shuffle_index[:] = np.arange(len(shuffle_index), dtype=shuffle_index.dtype)
        cut = len(shuffle_index) if plan.separate is None else plan.separate
        for part in (shuffle_index[:cut], shuffle_index[cut:]):
            if len(part):
                random.shuffle(part)

    def _fill_sample_index(self, sample_index: NDArray[np.signedinteger], document_index: NDArray[np.int32]) -> None:
        """Sample i starts at token i·seq_length of the documents laid end to end; row i says where that is.

        In blocks of documents, and of samples within them, so that the temporaries have a fixed size.
        """
        # A copy, since those of the file may lie at odd addresses, which numpy would copy block by block.
        sizes = np.array(self._sizes)
        sample_index[0] = 0  # also where the first documents hold nothing
        total, samples = 0, len(sample_index)
        next_sample = 1
        for first in range(0, len(document_index), _BLOCK):
            lengths = sizes[document_index[first : first + _BLOCK] - self.documents.start]
            ends = total + np.cumsum(lengths, dtype=np.int64)
            total = ends.item(len(ends) - 1)
            here = min(samples, -(-total // self.seq_length))  # samples that start before `total`
            while next_sample < here:
                stop = min(here, next_sample + _BLOCK)
                starts = np.arange(next_sample, stop, dtype=np.int64) * self.seq_length
                places = ends.searchsorted(starts, "right")
                sample_index[next_sample:stop, 0] = places + first
                sample_index[next_sample:stop, 1] = starts - (ends[places] - lengths[places])
                next_sample = stop
        assert next_sample == samples, (next_sample, samples)


@dataclass(eq=False)
class MegatronBlend(OneIndex):
    """Several datasets mixed as Megatron-LM's BlendedDataset does: the one furthest behind its share comes next. Raises
    ConfigError: there are more than 32,766 datasets."""

    datasets: Sequence[MegatronDataset]
    weights: Sequence[float]  # of any sum; then, over it
    size: int = field(kw_only=True)  # samples of the blend
    name: str = field(kw_only=True)  # of the split, for messages
    cache: IndexCache | None = field(kw_only=True, default=None)
    """Where a large index is kept; None: it is made in memory."""

    def __post_init__(self) -> None:
        assert len(self.datasets) == len(self.weights) and self.datasets
        if len(self.datasets) > MAX_BLENDED:
            raise ConfigError(
                f"{len(self.datasets)} datasets in one blend are more than the {MAX_BLENDED} of Megatron-LM's order; "
                "use data_order megalite"
            )
        self.weights = normalized(self.weights)

    def __len__(self) -> int:
        return self.size

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k, 0 <= k < len: int64 `[seq_length + 1]`."""
        _require_below(self.name, k, self.size)
        dataset = self.datasets[self.arrays["dataset_index"].item(k)]
        return dataset.sample(self.arrays["dataset_sample_index"].item(k))

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Keep the indices of the blend and of its datasets, where they are large; they are for all epochs. Returns the
        blend's and then its datasets', None for what is small or cannot be kept. Raises ConfigError: there are fewer
        than `stop` samples, or fewer in a dataset than the blend asks of it, or the folder that the user has chosen
        cannot be written."""
        _require_below(self.name, max(stop - 1, 0), self.size)
        kept = self._keep()
        counts = np.zeros(len(self.datasets), dtype=np.int64)
        for start in range(0, self.size, _BLOCK):
            chosen = self.arrays["dataset_index"][start : start + _BLOCK]
            counts += np.bincount(chosen, minlength=len(counts))
        for dataset, count in zip(self.datasets, counts.tolist(), strict=True):
            kept += dataset.prepare(0, count)
        return kept

    @cached_property
    def recipe(self) -> Recipe:
        weights = [weight.hex() for weight in self.weights]
        return Recipe(
            name=f"the {self.name} blend",
            identity=lambda: {"kind": "megatron blend", "weights": weights},
            arrays={
                "dataset_index": (np.dtype(np.int16), (self.size,)),
                "dataset_sample_index": (np.dtype(np.int64), (self.size,)),
            },
            fill=partial(fill_greedy, weights=np.array(self.weights)),
        )


def normalized(weights: Sequence[float]) -> list[float]:
    shares = np.array(weights, dtype=np.float64)
    return (shares / np.sum(shares)).tolist()


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """(samples of the blend, samples to ask of each dataset) for a run of `num_samples`.

    The second are half a percent more than the first's parts: the greedy rule does not keep to them exactly.
    """
    parts = [ceil(num_samples * weight) for weight in normalized(weights)]
    return sum(parts), [ceil(part * (1 + _SURPLUS)) for part in parts]


def _require_below(name: str, k: int, length: int) -> None:
    require_sample(k)
    if k >= length:
        raise ConfigError(
            f"data_order megatron: the order of the {name} samples was made for {length} of them, and sample {k} is asked "
            "for; make the run shorter, give its whole length in train_iters or train_samples, or give a blend weights "
            "(one without them is read once), or use data_order megalite"
        )


def fill_greedy(arrays: Arrays, weights: NDArray[np.float64]) -> None:
    """Fill dataset_index and dataset_sample_index `[size]`: at step k the dataset with the largest
    weights_i·max(k, 1) - count_i comes next, the first of equals, in float64 as helpers.cpp has it; the second is its
    count before.

    A step needs the counts that the steps before have left. Here a wave of lanes is computed side by side, each from
    counts that are guessed (its share, rounded); greedy choice forgets a wrong guess within some steps, so most lanes
    end with the right counts. Then each lane that did not begin with the counts that the one before it ended with is
    computed again from those, until all of them fit. The first begins with what is known, so that when all fit, all are
    right, even if no guess was.
    """
    choice, ordinal = arrays["dataset_index"], arrays["dataset_sample_index"]
    size, done = len(choice), 0
    counts = np.zeros(len(weights), dtype=np.int64)
    while done < size:
        steps = max(1, min(_STEPS, (size - done) // _LANES))
        lanes = min(_LANES, (size - done) // steps)
        part = slice(done, done + lanes * steps)
        shape = (lanes, steps)
        counts = _wave(choice[part].reshape(shape), ordinal[part].reshape(shape), weights, counts, first=done)
        done = part.stop


def _wave(
    choice: NDArray[np.int16],
    ordinal: NDArray[np.int64],
    weights: NDArray[np.float64],
    counts: NDArray[np.int64],
    *,
    first: int,
) -> NDArray[np.int64]:
    """Fill `[lanes, steps]` samples from sample `first` and `counts` on; the counts after them."""
    lanes, steps = choice.shape
    starts = _guess(first + steps * np.arange(lanes), weights)
    starts[0] = counts
    ends = starts.copy()
    wrong = np.arange(lanes)
    passes = 0
    while len(wrong):
        ends[wrong] = _run(choice, ordinal, weights, starts, wrong, first)
        passes += 1
        wrong = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        # Where a pass corrects one lane, which makes the next one wrong, it should not be a wide one.
        wrong = wrong if passes < _WIDE_PASSES else wrong[:_NARROW]
        starts[wrong] = ends[wrong - 1]
    return ends[-1]


def _guess(samples: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Counts with the sums `samples` in the proportions of the weights, `[len(samples), datasets]`."""
    ideal = np.multiply.outer(samples, weights)
    guess = np.floor(ideal).astype(np.int64)
    missing = samples - guess.sum(axis=1)
    order = (guess - ideal).argsort(axis=1, kind="stable")
    ranks = order.argsort(axis=1, kind="stable")
    return guess + (ranks < missing[:, None])


def _run(
    choice: NDArray[np.int16],
    ordinal: NDArray[np.int64],
    weights: NDArray[np.float64],
    starts: NDArray[np.int64],
    lanes: NDArray[np.int64],
    first: int,
) -> NDArray[np.int64]:
    """Greedy steps of the lanes, side by side; their counts at the end, `[len(lanes), datasets]`."""
    steps = choice.shape[1]
    # Whole numbers below 2^53, as doubles: Megatron converts them before it subtracts.
    counts = starts[lanes].astype(np.float64)
    chosen = np.empty((steps, len(lanes)), dtype=np.int16)
    before = np.empty((steps, len(lanes)), dtype=np.int64)
    here = (first + steps * lanes).astype(np.float64)[:, None]
    errors, rows = np.empty_like(counts), np.arange(len(lanes))
    for step in range(steps):
        np.multiply(np.maximum(here + step, 1.0), weights, out=errors)
        errors -= counts
        best = errors.argmax(axis=1)
        chosen[step] = best
        before[step] = counts[rows, best]
        counts[rows, best] += 1.0
    choice[lanes] = chosen.T
    ordinal[lanes] = before.T
    return counts.astype(np.int64)


def megatron_split(
    name: str, given: Sequence[float | None], settings: Sequence[Mapping[str, Any]], num_samples: int, is_divided: bool
) -> MegatronDataset | MegatronBlend:
    """As Megatron builds a split: a blend even of one dataset, if it has a weight and data_path is divided. `given`:
    the weight of each dataset; all of them or none. `settings`: of each dataset."""
    weights = [weight for weight in given if weight is not None]
    if len(settings) == 1 and (not weights or not is_divided):
        return MegatronDataset(**settings[0], num_samples=num_samples)
    wanted: Sequence[int | None] = [None] * len(settings)
    if weights:
        size, wanted = blend_sizes(weights, num_samples)
        # Twice, here and in the blend, as Megatron does: the second time may change a last bit.
        weights = normalized(weights)
    datasets = [MegatronDataset(**each, num_samples=count) for each, count in zip(settings, wanted, strict=True)]
    if not weights:
        weights = [float(len(dataset)) for dataset in datasets]
        size = min(num_samples, sum(len(dataset) for dataset in datasets))
    return MegatronBlend(datasets, weights, size=size, name=name, cache=settings[0]["cache"])
