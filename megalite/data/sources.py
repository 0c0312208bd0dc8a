"""Build the datasets of a run from its settings, including users' own datasets, and the range of samples it reads."""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.batch import batch_sizes, samples_after, steps_left, total_steps
from megalite.config.data import DATASETS, DEFAULT_SPLIT, SPLITS, DataConfig, parse_data_path
from megalite.config.errors import ConfigError
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.data.dataset import (
    GPTDataset,
    KeyedPermutation,
    MockDataset,
    Packing,
    SampleSource,
    memoize,
    require_sample,
    split_documents,
)
from megalite.data.index_cache import SMALL_BYTES, IndexCache, Kept
from megalite.data.token_files import TokenFiles, is_dataset, refuse_examples
from megalite.tokenizers.base import Tokenizer


@dataclass(eq=False)
class WholeSplit:
    """The samples of one epoch of each dataset of a split, one dataset after another; then they repeat."""

    datasets: Sequence[Any]

    def __post_init__(self) -> None:
        self._ends = list(accumulate(dataset.samples_per_epoch for dataset in self.datasets))
        self.samples = self._ends[-1]

    def _locate(self, k: int) -> tuple[Any, int]:
        require_sample(k)
        k %= self.samples
        index = bisect_right(self._ends, k)
        return self.datasets[index], k - (self._ends[index - 1] if index else 0)

    def sample(self, k: int) -> NDArray[np.int64]:
        dataset, index = self._locate(k)
        return dataset.sample(index)

    def packing(self, k: int) -> Packing:
        """Return the packing of sample k; only for packed datasets."""
        dataset, index = self._locate(k)
        return dataset.packing(index)

    def prepare(self, first: int, stop: int, *, epochs: int | None = None) -> list[Kept | None]:
        """Store the large indices of all datasets."""
        return [
            kept
            for dataset in self.datasets
            if hasattr(dataset, "prepare")
            for kept in dataset.prepare(0, dataset.samples_per_epoch)
        ]


@dataclass(frozen=True)
class Datasets:
    """The splits of a run; None if a split was not requested or has no documents."""

    train: SampleSource | None
    valid: SampleSource | None
    test: SampleSource | None


def open_run_datasets(
    config: RunConfig, *, tokenizer: Tokenizer | None, log: Callable[[str], None]
) -> tuple[Datasets, list[str]]:
    """Return the splits that the run reads, and notes for the log.

    The default split 969,30,1 has a test split, so one that is too short is not an error.

    `config`: validated, with a length and a vocab_size. `tokenizer`: its EOD token pads samples of packed documents.
    `log`: called, also later, if indices could not be stored. Raises ConfigError as `build_datasets`, and if a split
    that the run needs has no documents."""
    if config.data.dataset is None:
        datasets, notes = _build_for_run(config, tokenizer, log)
    else:
        open_split, wanted = partial(open_plugged, config, tokenizer=tokenizer), _splits_read(config)
        datasets, notes = Datasets(**{split: open_split(split) if split in wanted else None for split in SPLITS}), []
        if datasets.train is None:
            raise ConfigError(f"dataset {config.data.dataset} has no split train")
        if config.training.full_validation and datasets.valid is not None:
            if getattr(datasets.valid, "samples_per_epoch", None) is None:
                raise ConfigError(
                    f"full_validation needs the end of the split valid, but dataset {config.data.dataset} returns numbered "
                    "samples without end; give it a length and [i], or use --eval-iters"
                )
            datasets = replace(datasets, valid=WholeSplit([datasets.valid]))
    split = config.data.split or DEFAULT_SPLIT
    if datasets.train is None:
        raise ConfigError(f"the training split is empty (split {split}); give it a share, e.g. --split 969,30,1")
    if config.training.eval_interval is not None and datasets.valid is None:
        cause, remedy = "", "add --valid-data-path PREFIX"
        if config.data.dataset is not None:
            cause, remedy = "", f"add a split valid to dataset {config.data.dataset}"
        if config.data.data_path:
            cause, remedy = f" (split {split})", "give it a larger share of --split or more documents"
        raise ConfigError(
            f"eval_interval is {config.training.eval_interval} but there is no validation data{cause}; {remedy}, or leave "
            "--eval-interval out"
        )
    return datasets, notes


def _build_for_run(
    config: RunConfig, tokenizer: Tokenizer | None, log: Callable[[str], None]
) -> tuple[Datasets, list[str]]:
    data = config.data
    assert config.model.vocab_size is not None
    build = partial(
        build_datasets,
        data,
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        vocab_size=config.model.vocab_size,
        pad_token=0 if tokenizer is None else tokenizer.eod,
        tokenizer=tokenizer,
        num_samples=megatron_lengths(config),
        whole=("valid",) if config.training.full_validation else (),
        log=log,
    )
    splits = _splits_read(config)
    try:
        return build(splits=splits), []
    except ConfigError as fault:
        if "valid" not in splits or not data.data_path or data.split is not None:
            raise
        # An error of the other splits, or of the files, is raised again here.
        return build(splits=("train", "valid")), [f"no test loss at the end of the run: {fault}"]


def _splits_read(config: RunConfig) -> Sequence[str]:
    """Return the splits that the run reads: all if it evaluates, the test split at its end."""
    if config.training.eval_interval is not None:
        return SPLITS[:2] if config.data.mock_data or not config.training.eval_iters else SPLITS
    return ("train", "test") if config.data.test_data_path and config.training.eval_iters else ("train",)


def samples_to_read(
    config: RunConfig, datasets: Datasets | None = None, *, step: int = 0, samples: int = 0
) -> dict[str, tuple[int, int]]:
    """Return the samples [first, stop) of each split that a run reads after `step` steps and `samples` samples;
    `datasets`: those of the run, needed with full_validation."""
    left = steps_left(config, step=step, samples=samples)
    found = {"train": (samples, samples_after(config, left, consumed=samples))}
    # Each evaluation reads the same samples.
    evaluation = config.training.eval_iters * batch_sizes(config)[-1]
    found |= dict.fromkeys(_splits_read(config)[1:], (0, evaluation))
    if datasets is not None and isinstance(datasets.valid, WholeSplit):
        found["valid"] = (0, datasets.valid.samples)
    return found


def megatron_lengths(config: RunConfig) -> dict[str, int]:
    """Return the samples that Megatron-LM requests from each split; its order depends on them.

    Train: train_samples, or train_iters·global_batch_size. Validation: (train_iters // eval_interval + 1)·eval_iters
    global batches; this run reads only the first eval_iters, repeatedly. Test: eval_iters global batches."""
    training, size = config.training, batch_sizes(config)[-1]
    steps = total_steps(config)
    train = steps * size if training.train_samples is None else training.train_samples
    lengths = {"train": train} | dict.fromkeys(_splits_read(config)[1:], training.eval_iters * size)
    if training.eval_interval is not None:
        lengths["valid"] *= steps // training.eval_interval + 1
    return lengths


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    splits: Sequence[str] = ("train", "valid"),
    pad_token: int = 0,
    tokenizer: Tokenizer | None = None,
    num_samples: Mapping[str, int] | None = None,
    whole: Sequence[str] = (),
    log: Callable[[str], None] = lambda line: None,
    small_bytes: int = SMALL_BYTES,
) -> Datasets:
    """Open the token files and build the datasets of `splits`.

    data_path is divided by `split`; train_, valid_ and test_data_path are one split each; mock_data needs no files.
    Datasets without weights are mixed in proportion to their tokens. A split that is not in `splits` is not built, so a
    test split that is too short and never read is not an error.

    `pad_token`: pads samples of packed documents. `tokenizer`: token files that record another one are an error.
    `num_samples`: requested samples of each split, for Megatron's order only. `whole`: splits with one epoch of each
    dataset, as `WholeSplit`. `log`: called if indices could not be
    stored. `small_bytes`: smaller indices are built in memory. Raises ConfigError for a missing path, a damaged file, a
    token id outside the vocabulary, or a split with fewer than seq_length + 1 tokens."""
    assert set(splits) <= set(SPLITS), splits
    per_split = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    assert data.mock_data or any((data.data_path, *per_split.values())), "validate refuses a run without data"
    built: dict[str, SampleSource | None] = dict.fromkeys(SPLITS)
    files = TokenFiles(vocab_size, tokenizer)
    caches: dict[Path, IndexCache] = {}
    for number, name in enumerate(SPLITS):
        if name not in splits:
            continue
        if data.mock_data:
            built[name] = MockDataset(vocab_size=vocab_size, seq_length=seq_length, seed=seed, split=number)
            continue
        weights: list[float | None] = []
        settings: list[dict[str, Any]] = []  # constructor arguments per token file
        for weight, prefix in weighted_prefixes(data.data_path or per_split[name]):
            indexed = files.open(prefix)
            share = range(len(indexed))
            if data.data_path:
                share = split_documents(data.split or DEFAULT_SPLIT, len(indexed))[number]
            folder = Path(data.data_cache_path or Path(prefix).parent / "cache")
            cache = caches.setdefault(folder, IndexCache(folder, data.data_cache_path is not None, log, small_bytes))
            common: dict[str, Any] = {"seq_length": seq_length, "seed": seed, "name": name, "vocab_size": vocab_size}
            if data.sft:
                common["responses"] = files.open_mask(prefix)
            else:
                refuse_examples(prefix)
            weights.append(weight)
            settings.append({"indexed": indexed, "documents": share, **common, "cache": cache})
        if any(len(each["documents"]) for each in settings):
            count = None if name in whole else (num_samples or {}).get(name)
            built[name] = _blend(data, name, weights, settings, count, pad_token, whole=name in whole)
    return Datasets(**built)


def _blend(
    data: DataConfig,
    name: str,
    weights: Sequence[float | None],
    settings: Sequence[dict[str, Any]],
    num_samples: int | None,
    pad_token: int,
    *,
    whole: bool,
) -> SampleSource:
    if data.data_order == "megatron" and not whole:
        assert num_samples is not None, f"data_order megatron needs the length of {name}"
        megatron_split = imported("megalite.data.megatron_dataset:megatron_split")
        return megatron_split(name, weights, settings, num_samples, bool(data.data_path))
    datasets: list[Any] = []
    for each in settings:
        if data.data_order == "megatron":
            datasets.append(imported("megalite.data.megatron_dataset:MegatronDataset")(**each, num_samples=None))
        elif data.packs_documents:
            plain = {key: value for key, value in each.items() if key != "cache"}
            datasets.append(imported("megalite.data.packed_dataset:PackedDataset")(**plain, pad_token=pad_token))
        else:
            datasets.append(GPTDataset(**each))
    if whole:
        return WholeSplit(datasets)
    if len(datasets) == 1:
        return datasets[0]
    shares = [dataset.num_tokens if weight is None else weight for dataset, weight in zip(datasets, weights)]
    return imported("megalite.data.blended:BlendedDataset")(datasets, shares)


def weighted_prefixes(entries: Sequence[str]) -> list[tuple[float | None, str]]:
    """Parse a data path with `parse_data_path`, and raise ConfigError if it is ambiguous: a weight that is also the
    name of a token file (`2023 2024`), or one path with spaces."""
    parsed = parse_data_path(entries)
    joined = " ".join(entries)
    if len(entries) > 1 and is_dataset(joined) and not any(is_dataset(prefix) for _, prefix in parsed):
        raise ConfigError(
            f"data_path: {joined!r} is one token file, but text is split at spaces; write ['{joined}'] in YAML, or quote it "
            "on the command line"
        )
    for weight, name in zip((weight for weight, _ in parsed), entries[::2], strict=False):
        if weight is not None and is_dataset(name):
            every = " ".join(f"0.5 {entry}" for entry in entries if is_dataset(entry))
            raise ConfigError(
                f"data_path: {name} is a token file and also reads as a weight; write ./{name}, or {every}"
            )
    return parsed


_STREAM = 16  # random stream of the first split's order; token files use other streams


def open_plugged(config: RunConfig, split: str, tokenizer: Any) -> SampleSource | None:
    """Open a split of the run's registered dataset; return None if it has no such split.

    The registered object is a function of (split, config, tokenizer), a mapping from train, valid (or validation) and
    test to datasets, or a dataset for training alone. `as_source` defines a dataset."""
    name = config.data.dataset
    assert name is not None
    dataset = DATASETS.get(name)
    if isinstance(dataset, Mapping):
        dataset = dataset.get(split, dataset.get("validation") if split == "valid" else None)
    elif callable(dataset) and not _has_samples(dataset):
        dataset = dataset(split, config, tokenizer)
    elif split != "train":
        dataset = None
    return None if dataset is None else as_source(dataset, config, split)


def _has_samples(dataset: Any) -> bool:
    return not isinstance(dataset, type) and (hasattr(dataset, "sample") or hasattr(dataset, "__getitem__"))


def as_source(dataset: Any, config: RunConfig, split: str) -> SampleSource:
    """Adapt a user's dataset to the loader.

    It has either `sample(k)`, the k-th sample of an endless sequence, or a length and `[i]`: then each epoch is in an
    order drawn from (seed, epoch). A sample is seq_length + 1 token ids: a list, an array, a tensor, or a mapping with
    `input_ids`. It must depend on its number alone, because all ranks and resumed runs read it independently, in
    `num_workers` threads at once.

    Raises ConfigError if the object is neither, is empty, or returns other tokens when a sample is read again."""
    name, number = f"dataset {config.data.dataset}", SPLITS.index(split)
    read: Callable[[int], Any]
    if hasattr(dataset, "sample"):
        read = dataset.sample
    elif hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not len(dataset):
            raise ConfigError(f"{name}: the {split} split is empty; add samples, or return None to omit it")
        read = _shuffled(dataset, config.training.seed, _STREAM + number)
    else:
        raise ConfigError(
            f"{name} is of the type {type(dataset).__name__}, which has neither sample(k) nor a length and [i]; an iterable "
            "cannot resume: use numbered samples"
        )
    assert config.model.vocab_size is not None
    count = len(dataset) if hasattr(dataset, "__len__") else None
    source = _Plugged(name, read, config.training.seq_length + 1, config.model.vocab_size, count)
    if not np.array_equal(source.sample(0), source.sample(0)):
        raise ConfigError(
            f"{name}: sample 0 has other tokens when it is read again; a sample must depend on its number alone: seed random "
            "generators with it"
        )
    return source


def _shuffled(items: Any, seed: int, stream: int) -> Callable[[int], Any]:
    """Return a reader that repeats a finite dataset, each epoch in another order."""
    order = memoize(lambda epoch: KeyedPermutation(len(items), seed=seed, index=epoch, stream=stream))

    def read(k: int) -> Any:
        epoch, position = divmod(k, len(items))
        return items[order(epoch)(position)]

    return read


@dataclass(eq=False, frozen=True)
class _Plugged:
    """Reads and checks samples of a user's dataset."""

    name: str
    read: Callable[[int], Any]
    length: int
    vocab_size: int
    samples_per_epoch: int | None

    def sample(self, k: int) -> NDArray[np.int64]:
        require_sample(k)
        found = self.read(k)
        if isinstance(found, Mapping):
            if "input_ids" not in found:
                raise ConfigError(
                    f"{self.name}: sample {k} is a mapping without input_ids; it has {', '.join(map(str, found))[:80]}"
                )
            found = found["input_ids"]
        tokens = np.asarray(found)
        if tokens.shape != (self.length,) or tokens.dtype.kind not in "iu":
            raise ConfigError(
                f"{self.name}: sample {k} is {tokens.dtype} of shape {list(tokens.shape)}, but must be {self.length} whole "
                f"numbers: seq_length {self.length - 1} inputs and the token after the last"
            )
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            bad = tokens[(tokens < 0) | (tokens >= self.vocab_size)][0]
            remedy = "ids are at least 0" if bad < 0 else f"use --vocab-size {tokens.max() + 1} or more, or correct it"
            raise ConfigError(
                f"{self.name}: sample {k} holds token id {bad}, outside vocab_size {self.vocab_size}; {remedy}"
            )
        return tokens.astype(np.int64)
