"""From the data settings to the three datasets of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.data import DataConfig
from megalite.config.data_paths import parse_data_path
from megalite.config.errors import ConfigError
from megalite.config.split import DEFAULT_SPLIT, SPLITS
from megalite.data.blended import BlendedDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import SMALL_BYTES, IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.megatron_dataset import MegatronBlend, MegatronDataset, blend_sizes, normalized
from megalite.data.mock_dataset import MockDataset
from megalite.data.packed_dataset import PackedDataset
from megalite.data.sample_source import SampleSource
from megalite.data.splits import split_documents
from megalite.data.token_files import TokenFiles
from megalite.data.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class Datasets:
    """The splits of a run; None where a split was not asked for or has no documents."""

    train: SampleSource | None
    valid: SampleSource | None
    test: SampleSource | None


@dataclass(frozen=True)
class _Part:
    """A token file's share in one split."""

    weight: float | None
    indexed: IndexedDataset
    documents: range
    cache: IndexCache


@dataclass(frozen=True)
class _Builder:
    """What the datasets of all splits have in common."""

    data: DataConfig
    seq_length: int
    seed: int
    vocab_size: int
    pad_token: int

    def build(self, name: str, parts: Sequence[_Part], num_samples: int | None) -> SampleSource | None:
        """One split over all token files; None if it has no documents in any."""
        if not any(len(part.documents) for part in parts):
            return None
        if self.data.data_order == "megatron":
            assert num_samples is not None, f"data_order megatron needs the length of {name}"
            return self._megatron(name, parts, num_samples)
        datasets = [self._one(name, part) for part in parts]
        if len(datasets) == 1:
            return datasets[0]
        weights = [
            dataset.num_tokens if part.weight is None else part.weight
            for dataset, part in zip(datasets, parts, strict=True)
        ]
        return BlendedDataset(datasets, weights)

    def _one(self, name: str, part: _Part) -> GPTDataset | PackedDataset:
        if self.data.packing == "best-fit":
            return PackedDataset(
                part.indexed,
                documents=part.documents,
                seq_length=self.seq_length,
                seed=self.seed,
                name=name,
                vocab_size=self.vocab_size,
                pad_token=self.pad_token,
            )
        return GPTDataset(
            part.indexed,
            documents=part.documents,
            seq_length=self.seq_length,
            seed=self.seed,
            name=name,
            vocab_size=self.vocab_size,
            cache=part.cache,
        )

    def _megatron(
        self, name: str, parts: Sequence[_Part], num_samples: int
    ) -> MegatronDataset | MegatronBlend:
        """As Megatron builds a split: a blend even of one dataset, if it has a weight and data_path is divided."""

        def one(part: _Part, wanted: int | None) -> MegatronDataset:
            return MegatronDataset(
                part.indexed,
                documents=part.documents,
                num_samples=wanted,
                seq_length=self.seq_length,
                seed=self.seed,
                name=name,
                vocab_size=self.vocab_size,
                cache=part.cache,
            )

        weights = [part.weight for part in parts if part.weight is not None]
        if len(parts) == 1 and (not weights or not self.data.data_path):
            return one(parts[0], num_samples)
        if weights:
            size, wanted = blend_sizes(weights, num_samples)
            datasets = [one(part, count) for part, count in zip(parts, wanted, strict=True)]
            # Twice, here and in the blend, as Megatron does: the second time may change a last bit.
            weights = normalized(weights)
        else:
            datasets = [one(part, None) for part in parts]
            weights = [float(len(dataset)) for dataset in datasets]
            size = min(num_samples, sum(len(dataset) for dataset in datasets))
        return MegatronBlend(datasets, weights, size=size, name=name, cache=parts[0].cache)


def weighted_prefixes(entries: Sequence[str]) -> list[tuple[float | None, str]]:
    """`parse_data_path`, unless there is a token file that a weight may be the name of.

    Raises:
        ConfigError: as `parse_data_path`; `2023 2024` where 2023 is a token file; words of one path with spaces.
    """
    parsed = parse_data_path(entries)
    joined = " ".join(entries)
    if len(entries) > 1 and _exists(f"{joined}.idx") and not any(_exists(f"{p}.idx") for _, p in parsed):
        raise ConfigError(
            f"data_path: {joined!r} is one token file, but text is cut at spaces; write ['{joined}'] in YAML, or put it "
            "in quotes on the command line"
        )
    for weight, name in zip((weight for weight, _ in parsed), entries[::2], strict=False):
        if weight is not None and _exists(f"{name}.idx"):
            every = " ".join(f"0.5 {entry}" for entry in entries if _exists(f"{entry}.idx"))
            raise ConfigError(
                f"data_path: {name} is a token file and also reads as a weight; write ./{name}, or {every}"
            )
    return parsed


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
    log: Callable[[str], None] | None = None,
    small_bytes: int = SMALL_BYTES,
) -> Datasets:
    """Open the token files and make the datasets of `splits`.

    data_path is divided by `split`; train_, valid_ and test_data_path are each one split whole; mock_data needs no
    files. Datasets without weights are mixed in proportion to their tokens. A split that is not named in `splits` is
    not made, so that nobody stumbles over a test split that is too short and never read.

    Args:
        data: the settings.
        seq_length, seed, vocab_size: of the run.
        splits: which to make.
        pad_token: what fills up samples of packed documents.
        tokenizer: of the run, if it has one: token files that say that they were made with another are refused.
        num_samples: samples that the run asks of each split; Megatron's order depends on them, ours does not.
        log: is told where indices could not be kept.
        small_bytes: indices below this are made in memory.

    Raises:
        ConfigError: no data, a path that does not exist, a damaged file, a token id not below vocab_size, a split
            with fewer than seq_length + 1 tokens.
    """
    assert set(splits) <= set(SPLITS), splits
    per_split = {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}
    assert data.mock_data or any((data.data_path, *per_split.values())), (
        "validate has let a run without data pass"
    )
    built: dict[str, SampleSource | None] = dict.fromkeys(SPLITS)
    files = TokenFiles(vocab_size, tokenizer)
    builder = _Builder(data, seq_length, seed, vocab_size, pad_token)
    caches: dict[Path, IndexCache] = {}
    for number, name in enumerate(SPLITS):
        if name not in splits:
            continue
        if data.mock_data:
            built[name] = MockDataset(vocab_size=vocab_size, seq_length=seq_length, seed=seed, split=number)
            continue
        parts: list[_Part] = []
        for weight, prefix in weighted_prefixes(data.data_path or per_split[name]):
            indexed = files.open(prefix)
            share = range(len(indexed))
            if data.data_path:
                share = split_documents(data.split or DEFAULT_SPLIT, len(indexed))[number]
            folder = Path(data.data_cache_path or Path(prefix).parent / "cache")
            cache = caches.setdefault(
                folder,
                IndexCache(folder, data.data_cache_path is not None, log or _silent, small_bytes),
            )
            parts.append(_Part(weight, indexed, share, cache))
        built[name] = builder.build(name, parts, (num_samples or {}).get(name))
    return Datasets(**built)


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:
        return False


def _silent(line: str) -> None:
    """Nobody asked."""
