"""Read samples in Megatron-LM's exact order, for runs that started there or are compared with it.

The index arrays equal those of its GPTDataset and BlendedDataset (megatron-core 0.5 to 0.16: gpt_dataset.py,
helpers.cpp): one `numpy.random.RandomState(seed)`, a stream that numpy has frozen, shuffles the document index, then
the shuffle index."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.dataset import DocumentDataset, require_sample, sizes_digest
from megalite.data.index_cache import Arrays, IndexCache, Kept, OneIndex, Recipe

MAX_BLENDED = 32766  # datasets in one blend: Megatron numbers them with int16
_SURPLUS = 0.005
_BLOCK = 1 << 20
_INT32_MAX = (1 << 31) - 1
_LAST_EPOCH = 0.80  # a last epoch that provides less than this fraction of its samples is shuffled separately
_LANES = 1024  # lanes per wave
_STEPS = 1024  # samples per lane
_WIDE_PASSES, _NARROW = 4, 64  # passes over all wrong lanes of a wave; later passes are limited to this many lanes


@dataclass(frozen=True)
class MegatronPlan:
    """Sizes of the index arrays."""

    epochs: int  # the minimum for the requested samples
    num_samples: int  # all samples in the tokens of these epochs, at least as many as requested
    separate: int | None
    """Samples before the last epoch, if its documents and samples are shuffled separately; else None."""

    @classmethod
    def of(cls, *, num_tokens: int, num_samples: int | None, seq_length: int) -> "MegatronPlan":
        """Build the plan for an epoch of `num_tokens` > 0 tokens; num_samples None means one epoch."""
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
        """Return the types and shapes for this many documents per epoch: `document_index` [epochs·documents] contains
        sequence numbers; `sample_index` [samples + 1, 2] the start of each sample (position in document_index, token);
        `shuffle_index` [samples] maps k to a row of sample_index."""
        positions, samples = documents * self.epochs, self.num_samples
        sample_type = np.dtype(np.int32 if positions <= _INT32_MAX else np.int64)
        shuffle_type = np.dtype(np.uint32 if samples < (1 << 32) - 2 else np.int64)
        return {
            "document_index": (np.dtype(np.int32), (positions,)),
            "sample_index": (sample_type, (samples + 1, 2)),
            "shuffle_index": (shuffle_type, (samples,)),
        }


@dataclass(eq=False, kw_only=True)
class MegatronDataset(OneIndex, DocumentDataset):
    """Samples over some documents of a token file, in the order of Megatron-LM's GPTDataset with the same arguments.

    Documents and samples of all epochs are shuffled together, so sample k depends on num_samples: a longer run with
    more epochs has another order from its first sample on. (The default order does not.)

    Raises ConfigError if the split has no token or, for one epoch, fewer than seq_length + 1."""

    num_samples: int | None  # samples of the run; None: those of one epoch
    cache: IndexCache | None = None  # stores large indices; None: all are built in memory

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = self.seq_length + 1 if self.num_samples is None else 1
        if self.num_tokens < needed:
            raise self._too_small(f"fewer than the {needed} needed")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(
                f"seed {self.seed} is outside the range of Megatron-LM's order; use one from 0 to {(1 << 32) - 1}"
            )
        self.plan = MegatronPlan.of(
            num_tokens=self.num_tokens, num_samples=self.num_samples, seq_length=self.seq_length
        )

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples in the tokens of one epoch."""
        return (self.num_tokens - 1) // self.seq_length

    def sample(self, k: int) -> NDArray[np.int64]:
        _require_below(self.name, k, len(self))
        row = self.arrays["shuffle_index"].item(k)
        position, offset = self.arrays["sample_index"][row].tolist()
        return self._read(self.arrays["document_index"], position, offset, self.seq_length + 1)

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Store the index, which is that of all epochs, and return its entry, or None if it is small. Raises ConfigError as
        `GPTDataset.prepare`, and if there are fewer than `stop` samples."""
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
        """Fill row i with the position of token i·seq_length in the concatenated documents, where sample i starts.

        Works in blocks of documents, and of samples within them, so that temporaries have a fixed size."""
        # A copy, since the file's array may be unaligned, and numpy would copy it again for each block.
        sizes = np.array(self._sizes)
        sample_index[0] = 0  # even if the first documents are empty
        total, samples = 0, len(sample_index)
        next_sample = 1
        for first in range(0, len(document_index), _BLOCK):
            lengths = sizes[document_index[first : first + _BLOCK] - self.documents.start]
            ends = total + np.cumsum(lengths, dtype=np.int64)
            total = ends.item(len(ends) - 1)
            last_sample = min(samples, -(-total // self.seq_length))  # samples that start before `total`
            while next_sample < last_sample:
                stop = min(last_sample, next_sample + _BLOCK)
                starts = np.arange(next_sample, stop, dtype=np.int64) * self.seq_length
                positions = ends.searchsorted(starts, "right")
                sample_index[next_sample:stop, 0] = positions + first
                sample_index[next_sample:stop, 1] = starts - (ends[positions] - lengths[positions])
                next_sample = stop
        assert next_sample == samples, (next_sample, samples)


@dataclass(eq=False)
class MegatronBlend(OneIndex):
    """Mix of datasets like Megatron-LM's BlendedDataset: the dataset furthest behind its share comes next. Raises
    ConfigError if there are more than 32,766 datasets."""

    datasets: Sequence[MegatronDataset]
    weights: Sequence[float]  # normalised at construction
    size: int = field(kw_only=True)  # samples of the blend
    name: str = field(kw_only=True)  # of the split, for messages
    cache: IndexCache | None = field(kw_only=True, default=None)
    """Stores a large index; None: it is built in memory."""

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
        _require_below(self.name, k, self.size)
        dataset = self.datasets[self.arrays["dataset_index"].item(k)]
        return dataset.sample(self.arrays["dataset_sample_index"].item(k))

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Store the index of the blend, then those of its datasets. Raises ConfigError as `MegatronDataset.prepare`, also if
        a dataset has fewer samples than the blend needs."""
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
    """Return (samples of the blend, samples of each dataset) for a run of `num_samples`.

    Each dataset gets half a percent more than its share, because the greedy rule does not meet shares exactly."""
    parts = [ceil(num_samples * weight) for weight in normalized(weights)]
    return sum(parts), [ceil(part * (1 + _SURPLUS)) for part in parts]


def _require_below(name: str, k: int, length: int) -> None:
    require_sample(k)
    if k >= length:
        raise ConfigError(
            f"data_order megatron: the order of the {name} split has {length} samples, but the run needs sample {k}; make "
            "the run shorter, set train_iters or train_samples to its whole length, add weights to a blend (one without "
            "them is read once), or use data_order megalite"
        )


def fill_greedy(arrays: Arrays, weights: NDArray[np.float64]) -> None:
    """Fill dataset_index and dataset_sample_index `[size]` by Megatron's greedy rule.

    At step k the dataset with the largest weights_i·max(k, 1) - count_i comes next (the first of several), in float64
    as in helpers.cpp; dataset_sample_index is its previous count.

    Each step depends on the counts after the previous step. To vectorise this, the lanes of a wave are computed in
    parallel, each from guessed counts (its rounded share). The greedy choice forgets a wrong guess within some steps,
    so most lanes end with the right counts. Then each lane that did not start with the final counts of the lane before
    is computed again from those, until all lanes match. The first lane starts with exact counts, so then all are exact,
    even if every guess was wrong."""
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
    """Fill `[lanes, steps]` samples, starting at sample `first` with `counts`. Return the counts after them."""
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
        # If each pass corrects one lane and makes the next one wrong, wide passes would waste work.
        wrong = wrong if passes < _WIDE_PASSES else wrong[:_NARROW]
        starts[wrong] = ends[wrong - 1]
    return ends[-1]


def _guess(samples: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return integer counts `[len(samples), datasets]` in proportion to the weights, with row sums `samples`."""
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
    """Run the greedy steps of the lanes in parallel. Return their final counts, `[len(lanes), datasets]`."""
    steps = choice.shape[1]
    # Integers below 2^53 as doubles, because Megatron converts them before it subtracts.
    counts = starts[lanes].astype(np.float64)
    chosen = np.empty((steps, len(lanes)), dtype=np.int16)
    before = np.empty((steps, len(lanes)), dtype=np.int64)
    positions = (first + steps * lanes).astype(np.float64)[:, None]
    errors, rows = np.empty_like(counts), np.arange(len(lanes))
    for step in range(steps):
        np.multiply(np.maximum(positions + step, 1.0), weights, out=errors)
        errors -= counts
        best = errors.argmax(axis=1)
        chosen[step] = best
        before[step] = counts[rows, best]
        counts[rows, best] += 1.0
    choice[lanes] = chosen.T
    ordinal[lanes] = before.T
    return counts.astype(np.int64)


def megatron_split(
    name: str, shares: Sequence[float | None], settings: Sequence[Mapping[str, Any]], num_samples: int, is_divided: bool
) -> MegatronDataset | MegatronBlend:
    """Build a split like Megatron: a blend even of one dataset, if it has a weight and data_path is divided by `split`.
    `shares`: weight of each dataset, either all set or all None. `settings`: constructor arguments of each dataset."""
    weights = [share for share in shares if share is not None]
    if len(settings) == 1 and (not weights or not is_divided):
        return MegatronDataset(**settings[0], num_samples=num_samples)
    wanted: Sequence[int | None] = [None] * len(settings)
    if weights:
        size, wanted = blend_sizes(weights, num_samples)
        # Normalised twice, here and in the blend, as in Megatron, because the second time may change the last bit.
        weights = normalized(weights)
    datasets = [MegatronDataset(**each, num_samples=count) for each, count in zip(settings, wanted, strict=True)]
    if not weights:
        weights = [float(len(dataset)) for dataset in datasets]
        size = min(num_samples, sum(len(dataset) for dataset in datasets))
    return MegatronBlend(datasets, weights, size=size, name=name, cache=settings[0]["cache"])
