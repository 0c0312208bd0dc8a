"""Samples in Megatron-LM's order, for runs that began there or are compared with one there."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.document_dataset import DocumentDataset
from megalite.data.gpt_dataset import sizes_digest
from megalite.data.index_cache import Arrays, IndexCache, Kept, Recipe
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.megatron_blend import fill_greedy
from megalite.data.megatron_order import MegatronPlan, fill_megatron_arrays

MAX_BLENDED = 32766
"""Datasets in one blend: Megatron numbers them with int16."""

_SURPLUS = 0.005


class MegatronDataset(DocumentDataset):
    """Samples over some documents of a token file, in the order of Megatron-LM's GPTDataset with the same arguments.

    Documents and samples of all epochs are shuffled together, so sample k depends on num_samples: a longer run, unless it
    needs no more epochs, has another order from its first sample on. (The default order has not.)

    Args:
        indexed: the token file.
        documents: sequence numbers that belong to this split.
        num_samples: that the run will ask for; None: as many as one epoch has.
        seq_length: inputs of a sample; a sample has one token more.
        seed: of the shuffles.
        name: of the split, for messages.
        vocab_size: ids must be below it; not checked if None.
        cache: where large indices are kept; None: all are made in memory.

    Raises:
        ConfigError: the split holds no token, or, where one epoch is asked for, fewer than seq_length + 1.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        documents: range,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        name: str,
        vocab_size: int | None = None,
        cache: IndexCache | None = None,
    ) -> None:
        super().__init__(
            indexed,
            documents=documents,
            seq_length=seq_length,
            seed=seed,
            name=name,
            vocab_size=vocab_size,
        )
        self.cache = cache
        needed = seq_length + 1 if num_samples is None else 1
        if self.num_tokens < needed:
            raise ConfigError(
                f"{self._holds}, "
                f"fewer than the {needed} needed; give {name} a larger share of --split or more documents"
            )
        if not 0 <= seed < 1 << 32:
            raise ConfigError(
                f"seed {seed} is outside the range of Megatron-LM's order; give one from 0 to {(1 << 32) - 1}"
            )
        self.plan = MegatronPlan.of(
            num_tokens=self.num_tokens, num_samples=num_samples, seq_length=seq_length
        )

    def __len__(self) -> int:
        return self.plan.num_samples

    @property
    def samples_per_epoch(self) -> int:
        """Samples that the tokens of one epoch make."""
        return (self.num_tokens - 1) // self.seq_length

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k, 0 <= k < len: int64 `[seq_length + 1]`; inputs are all but the last token, labels all but the first.

        Raises:
            ConfigError: k is beyond the last sample, or a token id is not in the vocabulary.
        """
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        if k >= len(self):
            raise _beyond(self.name, k, len(self))
        arrays = self.arrays
        row = arrays["shuffle_index"].item(k)
        position, offset = arrays["sample_index"][row].tolist()
        return self._reader.read(arrays["document_index"], position, offset, self.seq_length + 1)

    def packing(self, k: int) -> None:
        """Nothing: a sample is a stretch of a stream."""

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Keep the index, if it is large; it is one for all epochs, whatever `epochs`.

        Returns:
            it, or None where it is small or cannot be kept.

        Raises:
            ConfigError: there are fewer than `stop` samples, or the folder that the user has chosen cannot be written.
        """
        if stop > len(self):
            raise _beyond(self.name, stop - 1, len(self))
        return [] if self.cache is None else [self.cache.prepare(self._recipe)]

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return self._recipe.nbytes

    @cached_property
    def arrays(self) -> Arrays:
        """document_index, sample_index and shuffle_index."""
        return self._recipe.make() if self.cache is None else self.cache.get(self._recipe)

    @cached_property
    def _recipe(self) -> Recipe:
        return Recipe(
            name=f"{self.indexed.prefix}, {self.name}",
            identity=self._identity,
            arrays=self.plan.arrays(len(self.documents)),
            fill=partial(
                fill_megatron_arrays,
                plan=self.plan,
                indexed=self.indexed,
                documents=self.documents,
                seq_length=self.seq_length,
                seed=self.seed,
            ),
        )

    def _identity(self) -> Mapping[str, Any]:
        plan = self.plan
        return {
            "kind": "megatron",
            "sizes": sizes_digest(self._sizes),
            "first": self.documents.start,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "plan": [plan.epochs, plan.num_samples, plan.shuffled_apart],
        }


class MegatronBlend:
    """Several datasets mixed as Megatron-LM's BlendedDataset does: the one furthest behind its share goes next.

    Args:
        datasets: at most 32,766.
        weights: of any sum.
        size: samples of the blend.
        name: of the split, for messages.
        cache: where a large index is kept; None: it is made in memory.

    Raises:
        ConfigError: there are too many datasets.
    """

    def __init__(
        self,
        datasets: Sequence[MegatronDataset],
        weights: Sequence[float],
        *,
        size: int,
        name: str,
        cache: IndexCache | None = None,
    ) -> None:
        assert len(datasets) == len(weights) and datasets, (len(datasets), len(weights))
        if len(datasets) > MAX_BLENDED:
            raise ConfigError(
                f"{len(datasets)} datasets in one blend are more than the {MAX_BLENDED} of Megatron-LM's order; "
                "use data_order megalite"
            )
        self.datasets = list(datasets)
        self.weights = normalized(weights)
        self.size = size
        self.name = name
        self.cache = cache

    def __len__(self) -> int:
        return self.size

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k, 0 <= k < len: int64 `[seq_length + 1]`."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        if k >= self.size:
            raise _beyond(self.name, k, self.size)
        arrays = self.arrays
        return self.datasets[arrays["dataset_index"].item(k)].sample(arrays["dataset_sample_index"].item(k))

    def packing(self, k: int) -> None:
        """Nothing: a sample is a stretch of a stream."""

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Keep the indices of the blend and of its datasets, where they are large; they are for all epochs.

        Returns:
            the blend's and then its datasets', None for what is small or cannot be kept.

        Raises:
            ConfigError: there are fewer than `stop` samples, or fewer in a dataset than the blend asks of it, or the
                folder that the user has chosen cannot be written.
        """
        if stop > self.size:
            raise _beyond(self.name, stop - 1, self.size)
        kept = [] if self.cache is None else [self.cache.prepare(self._recipe)]
        for dataset, count in zip(self.datasets, self._counts(), strict=True):
            kept += dataset.prepare(0, count)
        return kept

    def _counts(self) -> list[int]:
        """Samples that the blend asks of each dataset."""
        counts = np.zeros(len(self.datasets), dtype=np.int64)
        for first in range(0, self.size, 1 << 20):
            chosen = self.arrays["dataset_index"][first : first + (1 << 20)]
            counts += np.bincount(chosen, minlength=len(counts))
        return counts.tolist()

    @property
    def index_bytes(self) -> int:
        """Bytes of the index."""
        return self._recipe.nbytes

    @cached_property
    def arrays(self) -> Arrays:
        """dataset_index and dataset_sample_index."""
        return self._recipe.make() if self.cache is None else self.cache.get(self._recipe)

    @cached_property
    def _recipe(self) -> Recipe:
        def identity() -> Mapping[str, Any]:
            return {"kind": "megatron blend", "weights": [weight.hex() for weight in self.weights]}

        return Recipe(
            name=f"the {self.name} blend",
            identity=identity,
            arrays={
                "dataset_index": (np.dtype(np.int16), (self.size,)),
                "dataset_sample_index": (np.dtype(np.int64), (self.size,)),
            },
            fill=lambda arrays: fill_greedy(
                arrays["dataset_index"], arrays["dataset_sample_index"], np.array(self.weights)
            ),
        )


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights over their sum, rounded as Megatron rounds them."""
    shares = np.array(weights, dtype=np.float64)
    return (shares / np.sum(shares)).tolist()


def blend_sizes(weights: Sequence[float], num_samples: int) -> tuple[int, list[int]]:
    """(samples of the blend, samples to ask of each dataset) for a run of `num_samples`.

    The second are half a percent more than the first's parts: the greedy rule does not keep to them exactly.
    """
    parts = [ceil(num_samples * weight) for weight in normalized(weights)]
    return sum(parts), [ceil(part * (1 + _SURPLUS)) for part in parts]


def _beyond(name: str, k: int, length: int) -> ConfigError:
    return ConfigError(
        f"data_order megatron: the order of the {name} samples was made for {length} of them, and sample {k} is asked "
        "for; make the run shorter, give its whole length in train_iters or train_samples, or give a blend weights (one "
        "without them is read once), or use data_order megalite"
    )
