"""`megalite data index`: make the large indices of a run before it starts, on one process and without devices."""

import dataclasses
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megalite.cli.display import decimal_bytes
from megalite.cli.dry_run import world_size_of
from megalite.cli.model_commands import DATA_INDEX
from megalite.cli.output import json_text, show, tell
from megalite.config.describe import replace
from megalite.config.errors import ConfigError
from megalite.config.flags import Invocation
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.blended import BlendedDataset
from megalite.data.dataset import SampleSource
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.megatron_dataset import MegatronBlend, MegatronDataset
from megalite.data.sources import open_run_datasets, samples_to_read
from megalite.preprocess.text_data import tokenize_text
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

main = DATA_INDEX


def run(flags: Namespace) -> int:
    invocation = flags.invocation
    reports = []
    for report in _index(invocation):
        reports.append(report)
        if not invocation.json:
            show(_text(report))
    if invocation.json:
        show(json_text(reports))
    elif not reports:
        data = invocation.config.data
        packed = f"{'sft' if data.sft else 'packing best-fit'} keeps no index: which documents go together is found in memory"
        show(f"{packed} for each epoch" if data.packs_documents else "this data needs no index")
    return 0


def _index(invocation: Invocation) -> Iterator[dict[str, Any]]:
    config, tokenizer = _resolve(invocation)
    notes: list[str] = []
    datasets, remarks = open_run_datasets(config, tokenizer=tokenizer, log=notes.append)
    for remark in remarks:
        tell(remark)
    for split, (first, stop) in samples_to_read(config).items():
        source = getattr(datasets, split)
        if source is None:
            continue
        for part, start, end in _parts(source, first, stop):
            report = _prepare(part, start, end, notes)
            for note in dict.fromkeys(notes):
                tell(note)
            notes.clear()
            yield {"split": split, **report}


def _resolve(invocation: Invocation) -> tuple[RunConfig, Tokenizer | None]:
    world_size = world_size_of(invocation)
    config = validate(invocation.config, world_size, invocation.explicit, startable=True)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    if config.model.vocab_size is None:
        assert tokenizer is not None
        config = replace(config, vocab_size=tokenizer.vocab_size)
    config = validate(config, world_size, invocation.explicit)
    if config.data.texts:
        places = tokenize_text(config, None, say=tell, stopped=lambda: False)
        config = dataclasses.replace(config, data=config.data.with_paths(places))
    return config, tokenizer


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
    part: GPTDataset | MegatronDataset | MegatronBlend, first: int, stop: int, notes: list[str]
) -> dict[str, Any]:
    """Make the indices of a dataset or blend for the samples first <= i < stop, and say what was made.

    Of a blend there are no documents, tokens and samples per epoch; of small ones, which are not kept, no folder.
    """
    cache = part.cache
    assert cache is not None, "build_datasets gives each a cache"
    started = time.perf_counter()
    made = part.prepare(first, stop)
    facts: dict[str, Any] = dict.fromkeys(("documents", "tokens", "samples_per_epoch"))
    if isinstance(part, MegatronBlend):
        made = made[:1]  # those of its datasets are made before
        name = f"the choice among {len(part.datasets)} datasets"
    else:
        name = part.indexed.prefix
        facts = {
            "documents": len(part.documents),
            "tokens": part.num_tokens,
            "samples_per_epoch": part.samples_per_epoch,
        }
    kept = [one for one in made if one is not None]
    small = part.index_bytes < cache.small_bytes
    if not small and len(kept) < len(made):
        raise ConfigError("; ".join(notes) or f"the index of {part.name} could not be kept in {cache.folder}")
    return {
        "name": name,
        "samples": (first, stop),
        "index_bytes": part.index_bytes,
        "indices": len(kept),
        "built": sum(one.built for one in kept),
        "folder": None if small else str(cache.folder),
        "seconds": time.perf_counter() - started,
        **facts,
    }


def _text(report: dict[str, Any]) -> str:
    """Two lines: what is read, and what was made for it."""
    first, stop = report["samples"]
    read = f"{report['split']}: {report['name']}"
    if report["documents"] is not None:
        read += f": {report['documents']} documents, {report['tokens']} tokens"
    if report["samples_per_epoch"]:
        epochs = (stop - first) / report["samples_per_epoch"]
        read += f", {report['samples_per_epoch']} samples an epoch; the run reads {epochs:.2f} epochs, samples {first} to {stop}"
    else:
        read += f"; the run reads samples {first} to {stop}"
    size = decimal_bytes(report["index_bytes"])
    if report["folder"] is None:
        return f"{read}\n  its index has {size}: made in memory when the run starts, nothing to keep"
    made = f"{report['built']} built, {report['indices'] - report['built']} found, in {report['seconds']:.1f} s"
    return f"{read}\n  {report['indices']} indices of {size} in {report['folder']}: {made}"
