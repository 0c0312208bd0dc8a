"""`megalite data index`: make the large indices of a run before it starts, on one process and without devices."""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from megalite.cli.byte_progress import decimal_bytes
from megalite.cli.dry_run import world_size_of
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation, parse_arguments
from megalite.config.help import full_help
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.blended import BlendedDataset
from megalite.data.dataset import SampleSource
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.megatron_dataset import MegatronBlend, MegatronDataset
from megalite.data.sources import open_run_datasets, samples_to_read
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

_USAGE = """usage: megalite data index [SETTINGS ...]   (any flags of megalite train; --world-size N, --json)

Makes the indices that a run with these settings will need and that are large enough to be kept on disk, so that no
rank waits for them: documents and samples in the order of each epoch. Small ones are made by the run itself, in
memory. The folder is --data-cache-path, or "cache" beside each token file.

example: megalite data index --config run.yaml --world-size 64

--help-all lists all settings."""

_NO_INDEX_PACKED = "packing best-fit keeps no index: which documents go together is found in memory for each epoch"


@dataclass(frozen=True)
class IndexReport:
    """What was made for one token file, or for a blend, in one split."""

    split: str
    name: str
    samples: tuple[int, int]
    """Which of it the run reads, half open."""
    index_bytes: int
    """Of each index."""
    indices: int
    """Kept on disk."""
    built: int
    """Of them, now."""
    folder: str | None
    """Where they are kept; None for small ones."""
    seconds: float
    documents: int | None = None
    """None for a blend, as what follows."""
    tokens: int | None = None
    samples_per_epoch: int | None = None


@command("megalite data index")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError or where an index could not be kept."""
    if not argv or {"--help", "-h", "--help-all"} & set(argv):
        show(full_help("megalite data index") if "--help-all" in argv else _USAGE)
        return 0
    invocation = parse_arguments(["--dry-run", *argv])
    reports = []
    for report in index(invocation):
        reports.append(asdict(report))
        if not invocation.json:
            show(_text(report))
    if invocation.json:
        show(json.dumps(reports, indent=2))
    elif not reports:
        packs = invocation.config.data.packing == "best-fit"
        show(_NO_INDEX_PACKED if packs else "mock data needs no index")
    return 0


def index(invocation: Invocation) -> Iterator[IndexReport]:
    """Make the indices, one dataset after the other.

    Raises:
        ConfigError: bad settings or data, or an index that cannot be kept.
    """
    config, tokenizer = _resolve(invocation)
    notes: list[str] = []
    datasets, remarks = open_run_datasets(config, tokenizer=tokenizer, log=notes.append)
    for remark in remarks:
        print(remark, file=sys.stderr)
    for split, (first, stop) in samples_to_read(config).items():
        source = getattr(datasets, split)
        if source is None:
            continue
        for part, start, end in _parts(source, first, stop):
            report = _prepare(split, part, start, end, notes)
            for note in dict.fromkeys(notes):
                print(note, file=sys.stderr)
            notes.clear()
            yield report


def _resolve(invocation: Invocation) -> tuple[RunConfig, Tokenizer | None]:
    """The complete config, and its tokenizer."""
    world_size = world_size_of(invocation)
    config = validate(invocation.config, world_size, invocation.explicit, startable=True)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    if config.model.vocab_size is None:
        assert tokenizer is not None
        config = replace(config, vocab_size=tokenizer.vocab_size)
    return validate(config, world_size, invocation.explicit), tokenizer


def _parts(
    source: SampleSource, first: int, stop: int
) -> Iterator[tuple[GPTDataset | MegatronDataset | MegatronBlend, int, int]]:
    """The datasets with an index, and which of their samples are read."""
    if isinstance(source, BlendedDataset):
        for part, start, end in zip(source.datasets, source.counts(first), source.counts(stop), strict=True):
            yield from _parts(part, start, end)
    elif isinstance(source, MegatronBlend):
        for part in source.datasets:
            assert isinstance(part, MegatronDataset)
            yield part, 0, len(part)
        yield source, first, stop
    elif isinstance(source, GPTDataset | MegatronDataset):
        yield source, first, stop


def _prepare(
    split: str, part: GPTDataset | MegatronDataset | MegatronBlend, first: int, stop: int, notes: list[str]
) -> IndexReport:
    cache = part.cache
    assert cache is not None, "build_datasets gives each a cache"
    started = time.perf_counter()
    made = part.prepare(first, stop)
    if isinstance(part, MegatronBlend):
        made = made[:1]  # its own; those of its datasets have had their turn
    kept = [one for one in made if one is not None]
    small = part.index_bytes < cache.small_bytes
    if not small and len(kept) < len(made):
        raise ConfigError("; ".join(notes) or f"the index of {part.name} could not be kept in {cache.folder}")
    if isinstance(part, MegatronBlend):
        name, facts = f"the choice among {len(part.datasets)} datasets", {}
    else:
        name = part.indexed.prefix
        facts = {
            "documents": len(part.documents),
            "tokens": part.num_tokens,
            "samples_per_epoch": part.samples_per_epoch,
        }
    return IndexReport(
        split=split,
        name=name,
        samples=(first, stop),
        index_bytes=part.index_bytes,
        indices=len(kept),
        built=sum(one.built for one in kept),
        folder=None if small else str(cache.folder),
        seconds=time.perf_counter() - started,
        **facts,
    )


def _text(report: IndexReport) -> str:
    """Two lines: what is read, and what was made for it."""
    first, stop = report.samples
    read = f"{report.split}: {report.name}"
    if report.documents is not None:
        read += f": {report.documents} documents, {report.tokens} tokens"
    if report.samples_per_epoch:
        read += f", {report.samples_per_epoch} samples an epoch; the run reads {(stop - first) / report.samples_per_epoch:.2f}"
        read += f" epochs, samples {first} to {stop}"
    else:
        read += f"; the run reads samples {first} to {stop}"
    size = decimal_bytes(report.index_bytes)
    if report.folder is None:
        return f"{read}\n  its index has {size}: made in memory when the run starts, nothing to keep"
    made = f"{report.built} built, {report.indices - report.built} found, in {report.seconds:.1f} s"
    return f"{read}\n  {report.indices} indices of {size} in {report.folder}: {made}"
