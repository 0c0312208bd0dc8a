"""From the data settings to the three datasets of a run."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.blended import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mock_dataset import MockDataset
from megalite.data.sample_source import SampleSource
from megalite.data.splits import DEFAULT_SPLIT, SPLITS, split_documents

_EXACT_CHECK_BYTES = 1 << 30
_SAMPLED_TOKENS = 1 << 26


@dataclass(frozen=True)
class Datasets:
    """The splits of a run; None where a split was not asked for or has no documents."""

    train: SampleSource | None
    valid: SampleSource | None
    test: SampleSource | None


def parse_data_path(entries: Sequence[str]) -> list[tuple[float | None, str]]:
    """(weight or None, prefix) of each dataset: `a b`, or weight/prefix pairs `0.3 a 0.7 b` (Megatron's rule).

    Raises:
        ConfigError: a prefix that stands where a weight is meant, or a weight that is not above 0.
    """
    numbers = [_number(entry) for entry in entries]
    if len(entries) % 2 == 0 and all(number is not None for number in numbers[::2]):
        pairs = [(number, prefix) for number, prefix in zip(numbers[::2], entries[1::2], strict=True)]
        for weight, prefix in pairs:
            if weight is None or not 0 < weight < float("inf"):
                raise ConfigError(
                    f"data_path: weight {weight} of {prefix} must be above 0; leave it out to skip it"
                )
        return [(weight, prefix) for weight, prefix in pairs]
    for entry, number in zip(entries, numbers, strict=True):
        if number is not None and not Path(f"{entry}.idx").exists():
            raise ConfigError(
                f"data_path: {entry!r} looks like a weight, but {' '.join(entries)!r} is not weight/prefix pairs; "
                "give every prefix a weight, as in 0.3 a 0.7 b, or none"
            )
    return [(None, prefix) for prefix in entries]


def build_datasets(
    data: DataConfig,
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
    splits: Sequence[str] = ("train", "valid"),
) -> Datasets:
    """Open the token files and make the datasets of `splits`.

    data_path is divided by `split`; train_, valid_ and test_data_path are each one split whole; mock_data needs no
    files. Datasets without weights are mixed in proportion to their tokens. A split that is not named in `splits` is
    not made, so that nobody stumbles over a test split that is too short and never read.

    Raises:
        ConfigError: no data, a path that does not exist, a damaged file, a token id not below vocab_size, a split
            with fewer than seq_length + 1 tokens.
    """
    assert set(splits) <= set(SPLITS), splits
    per_split = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    _check_choice(data, any(per_split.values()))
    built: dict[str, SampleSource | None] = dict.fromkeys(SPLITS)
    opened = _Opener(vocab_size)
    for number, name in enumerate(SPLITS):
        if name not in splits:
            continue
        if data.mock_data:
            built[name] = MockDataset(vocab_size=vocab_size, seq_length=seq_length, seed=seed, split=number)
            continue
        parts: list[tuple[float | None, IndexedDataset, range]] = []
        for weight, prefix in parse_data_path(data.data_path or per_split[name]):
            indexed = opened.open(prefix)
            whole = range(len(indexed))
            share = (
                split_documents(data.split or DEFAULT_SPLIT, len(indexed))[number]
                if data.data_path
                else whole
            )
            parts.append((weight, indexed, share))
        built[name] = _blend(name, parts, seq_length=seq_length, seed=seed, vocab_size=vocab_size)
    return Datasets(**built)


def _check_choice(data: DataConfig, per_split: bool) -> None:
    given = [
        name
        for name, is_given in (
            ("mock_data", data.mock_data),
            ("data_path", bool(data.data_path)),
            ("train_data_path, valid_data_path or test_data_path", per_split),
        )
        if is_given
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} are given at once; keep one of them")
    if not given:
        raise ConfigError(
            "no data: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data"
        )
    if per_split and data.split is not None:
        raise ConfigError(
            f"split {data.split} has no effect with a data path for each split; leave one of them out"
        )
    if per_split and not data.train_data_path:
        raise ConfigError("valid_data_path or test_data_path is given without train_data_path; give that too")


class _Opener:
    """Opens and checks each token file once, whichever splits read it."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._open: dict[str, IndexedDataset] = {}

    def open(self, prefix: str) -> IndexedDataset:
        if prefix not in self._open:
            _check_exists(prefix)
            indexed = IndexedDataset(prefix)
            _check_token_ids(indexed, self.vocab_size)
            self._open[prefix] = indexed
        return self._open[prefix]


def _blend(
    name: str,
    parts: list[tuple[float | None, IndexedDataset, range]],
    *,
    seq_length: int,
    seed: int,
    vocab_size: int,
) -> SampleSource | None:
    """One split over all token files; None if it has no documents in any."""
    if not any(len(documents) for _, _, documents in parts):
        return None
    datasets = [
        GPTDataset(
            indexed, documents=share, seq_length=seq_length, seed=seed, name=name, vocab_size=vocab_size
        )
        for _, indexed, share in parts
    ]
    if len(datasets) == 1:
        return datasets[0]
    weights = [
        dataset.num_tokens if part[0] is None else part[0]
        for dataset, part in zip(datasets, parts, strict=True)
    ]
    return BlendedDataset(datasets, weights)


def _check_exists(prefix: str) -> None:
    """Name what is missing and what is there with a like name."""
    missing = [suffix for suffix in (".bin", ".idx") if not Path(f"{prefix}{suffix}").is_file()]
    if not missing:
        return
    folder = Path(prefix).parent
    if not folder.is_dir():
        raise ConfigError(
            f"data path {prefix}: the folder {folder} does not exist; a prefix is a path without .bin"
        )
    if prefix.endswith((".bin", ".idx")) and Path(prefix).is_file():
        raise ConfigError(f"data path {prefix}: give the prefix alone: {prefix[:-4]}")
    there = sorted({path.stem for path in folder.iterdir() if path.suffix == ".idx"})
    near = difflib.get_close_matches(Path(prefix).name, there, n=3, cutoff=0.4)
    if near:
        hint = "did you mean " + " or ".join(str(folder / name) for name in near) + "?"
    elif there:
        hint = f"{folder} has " + ", ".join(there[:5])
    else:
        hint = f"{folder} has no .idx file; make one with tools/preprocess_data.py"
    if len(missing) == 1:
        there_is = ".idx" if missing[0] == ".bin" else ".bin"
        raise ConfigError(
            f"data path {prefix}: {prefix}{missing[0]} is missing, {prefix}{there_is} is there; {hint}"
        )
    raise ConfigError(f"data path {prefix}: neither {prefix}.bin nor {prefix}.idx exists; {hint}")


def _check_token_ids(indexed: IndexedDataset, vocab_size: int) -> None:
    """Every id of a small file, an even sample of a large one; what slips through fails when it is read."""
    nbytes = indexed.num_tokens * indexed.dtype.itemsize
    largest = indexed.max_token_id(sample=None if nbytes <= _EXACT_CHECK_BYTES else _SAMPLED_TOKENS)
    if largest >= vocab_size:
        raise ConfigError(
            f"{indexed.bin_path}: holds token id {largest}, but vocab_size is {vocab_size}; set vocab_size to at least "
            f"{largest + 1}, the size of the tokenizer that wrote the file"
        )


def _number(entry: str) -> float | None:
    try:
        return float(entry)
    except ValueError:
        return None
