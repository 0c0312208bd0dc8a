"""Datasets that users bring: registered in `config.data.DATASETS`, or given to the Trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.data import DATASETS, SPLITS
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.data.dataset import SampleSource, require_sample
from megalite.data.random_draws import KeyedPermutation

_STREAM = 16  # of the first split's order; those of token files have other numbers


def open_plugged(config: RunConfig, split: str, tokenizer: Any) -> SampleSource | None:
    """A split of the run's dataset; None where it has none.

    What is registered is a function of (split, config, tokenizer), a mapping from train, valid (or validation) and test to
    datasets, or one for training alone. See `as_source` for what a dataset may be.
    """
    name = config.data.dataset
    assert name is not None
    given = DATASETS.get(name)
    if isinstance(given, Mapping):
        given = given.get(split, given.get("validation") if split == "valid" else None)
    elif callable(given) and not _is_dataset(given):
        given = given(split, config, tokenizer)
    elif split != "train":
        given = None
    return None if given is None else as_source(given, config, split)


def _is_dataset(given: Any) -> bool:
    return not isinstance(given, type) and (hasattr(given, "sample") or hasattr(given, "__getitem__"))


def as_source(given: Any, config: RunConfig, split: str) -> SampleSource:
    """What users call a dataset, as the loader reads it.

    Either it has `sample(k)`, the k-th sample of an endless sequence, or a length and `[i]`: then each epoch is in an
    order drawn from (seed, epoch). A sample is seq_length + 1 token ids: a list, an array, a tensor, or a mapping with
    `input_ids`. It must be a function of its number alone: all ranks, and a run that resumes, read it for themselves, and
    in a thread.

    Raises ConfigError: it is neither, is empty, or gives other tokens when a sample is read again."""
    name, number = f"dataset {config.data.dataset}", SPLITS.index(split)
    read: Callable[[int], Any]
    if hasattr(given, "sample"):
        read = given.sample
    elif hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        if not len(given):
            raise ConfigError(f"{name}: the {split} split is empty; give it samples, or None to go without")
        read = _Shuffled(given, seed=config.training.seed, stream=_STREAM + number).sample
    else:
        raise ConfigError(
            f"{name} is of the type {type(given).__name__}, which has neither sample(k) nor a length and [i]; what can only be "
            "iterated cannot resume: give it numbered samples"
        )
    assert config.model.vocab_size is not None
    source = _Plugged(name, read, config.training.seq_length + 1, config.model.vocab_size)
    if not np.array_equal(source.sample(0), source.sample(0)):
        raise ConfigError(
            f"{name}: sample 0 has other tokens when it is read again; a sample must be a function of its number alone, with "
            "random numbers from a generator that is seeded by that"
        )
    return source


@dataclass(eq=False)
class _Shuffled:
    """A finite dataset again and again, each epoch in another order."""

    items: Any
    seed: int
    stream: int
    _orders: dict[int, KeyedPermutation] = field(default_factory=dict)

    def sample(self, k: int) -> Any:
        count = len(self.items)
        epoch, place = divmod(k, count)
        if epoch not in self._orders:
            self._orders = {epoch: KeyedPermutation(count, seed=self.seed, index=epoch, stream=self.stream)}
        return self.items[self._orders[epoch](place)]


@dataclass(eq=False, frozen=True)
class _Plugged:
    """Samples of a user's dataset, each looked at before it is used."""

    name: str
    read: Callable[[int], Any]
    length: int
    vocab_size: int

    def sample(self, k: int) -> NDArray[np.int64]:
        require_sample(k)
        found = self.read(k)
        if isinstance(found, Mapping):
            found = found["input_ids"]
        tokens = np.asarray(found)
        if tokens.shape != (self.length,) or tokens.dtype.kind not in "iu":
            raise ConfigError(
                f"{self.name}: sample {k} is {tokens.dtype} of shape {list(tokens.shape)}, but must be {self.length} whole "
                f"numbers: seq_length {self.length - 1} inputs and the token after the last"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            raise ConfigError(
                f"{self.name}: sample {k} holds token id {bad}, outside vocab_size {self.vocab_size}; use --vocab-size "
                f"{max(int(tokens.max()) + 1, 1)} or more, or correct it"
            )
        return tokens.astype(np.int64)

    def packing(self, k: int) -> None:
        return None
