"""`megalite data`: inspect, verify, merge and split token files, and build the large indices of a run in advance."""

import dataclasses
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megalite.cli.display import ByteProgress
from megalite.cli.dry_run import world_size_of
from megalite.cli.output import explain, first_signal_raises, json_text, notify, show, visible
from megalite.cli.preprocess import tokenizer_config
from megalite.config.data import SPLITS
from megalite.config.describe import replace
from megalite.config.errors import BAD_INPUT, ConfigError
from megalite.config.flags import Invocation
from megalite.config.numbers import decimal_bytes
from megalite.config.reading import as_yaml
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.data.blended import BlendedDataset
from megalite.data.dataset import GPTDataset, SampleSource
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.megatron_dataset import MegatronBlend, MegatronDataset
from megalite.data.sources import WholeSplit, open_run_datasets, samples_to_read
from megalite.data.token_files import require_recorded_tokenizer
from megalite.preprocess.merge_split import Part, Written, merge, parts_of_equal_tokens, parts_of_split, split_dataset
from megalite.preprocess.output import check_output_prefix
from megalite.preprocess.text_data import tokenize_text
from megalite.preprocess.verify import (
    Verified,
    dataset_bytes,
    find_prefixes,
    inspect,
    parse_documents,
    read_documents,
    verify,
)
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

OK, DAMAGED = 0, 1
_BAR = 30


def verify_datasets(flags: Namespace) -> int:
    """Return 0 if all datasets are sound, 1 if one is damaged, 2 if one could not be read."""
    tokenizer = _tokenizer(flags)
    vocab_size = flags.vocab_size if tokenizer is None else tokenizer.vocab_size
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"vocab_size {vocab_size} must be at least 1; give the tokenizer's")

    def check(prefix: str) -> tuple[int, dict[str, Any], str]:
        if tokenizer is not None:
            require_recorded_tokenizer(prefix, tokenizer)
        with _byte_progress(dataset_bytes(prefix)) as on_bytes:
            result = verify(prefix, vocab_size=vocab_size, hashes=not flags.no_hash, on_bytes=on_bytes)
        status = OK if result.fault is None else DAMAGED
        if result.bad_side_file is not None:
            notify(f"error: {visible(result.bad_side_file)}")
            status = BAD_INPUT
        return status, asdict(result), _format_verified(result)

    return _for_each_dataset(flags, check)


def inspect_datasets(flags: Namespace) -> int:
    """Return 0 if all datasets were shown, 2 if one could not be read."""
    tokenizer = _tokenizer(flags)
    if tokenizer is None and flags.vocab_size is not None:
        raise ConfigError(
            f"vocab_size {flags.vocab_size} has no effect without a tokenizer: add --tokenizer-type NullTokenizer"
        )
    if tokenizer is not None and flags.documents is None:
        raise ConfigError("a tokenizer shows the text of documents: choose them, e.g. --documents 0:3")

    def describe(prefix: str) -> tuple[int, dict[str, Any], str]:
        dataset = IndexedDataset(prefix)
        facts = inspect(dataset)
        if flags.documents is not None:
            if tokenizer is not None:
                require_recorded_tokenizer(prefix, tokenizer)
            chosen = parse_documents(flags.documents, dataset)
            facts["shown_documents"] = [
                document | _text(document["tokens"], tokenizer, dataset)
                for document in read_documents(dataset, chosen, max_tokens=flags.max_tokens)
            ]
        parts = [_format_facts(facts), *map(_format_document, facts.get("shown_documents", []))]
        return OK, facts, "\n".join(parts)

    return _for_each_dataset(flags, describe)


def _for_each_dataset(flags: Namespace, report: Callable[[str], tuple[int, dict[str, Any], str]]) -> int:
    """Print the (status, data, text) of each dataset and return the worst status. Unreadable datasets are skipped."""
    worst, results = OK, []
    with first_signal_raises():
        for prefix in find_prefixes(flags.datasets):
            try:
                status, data, text = report(prefix)
            except (ConfigError, OSError) as error:
                _, reason = explain(error, "megalite data")
                notify(f"error: {visible(reason)}")
                status, data, text = BAD_INPUT, {"prefix": prefix, "error": reason}, ""
            worst = max(worst, status)
            results.append(data)
            if text and not flags.json:
                show(visible(text))
    if flags.json:
        show(json_text(results))
    return worst


def _text(tokens: list[int], tokenizer: Tokenizer | None, dataset: IndexedDataset) -> dict[str, str]:
    if tokenizer is None:
        return {}
    bad = next((token for token in tokens if not 0 <= token < tokenizer.vocab_size), None)
    if bad is not None:
        raise ConfigError(
            f"{dataset.bin_path}: token id {bad}, but {tokenizer.name} has ids below {tokenizer.vocab_size}; give the "
            "tokenizer that wrote it"
        )
    return {"text": tokenizer.decode(tokens)}


def merge_datasets(flags: Namespace) -> int:
    check_output_prefix(flags.output_prefix, example="whole")
    prefixes = find_prefixes(flags.input)
    files = [path for path in (Path(f"{prefix}.bin") for prefix in prefixes) if path.exists()]
    with _byte_progress(sum(path.stat().st_size for path in files)) as on_bytes:
        written = merge(prefixes, flags.output_prefix, dtype=flags.dtype, on_bytes=on_bytes)
    show(visible(f"{_format_written(written)}, of {len(prefixes)} datasets"))
    if not written.files:
        show("no side file written: a dataset has none, or vocabularies differ; tokenizers were not compared")
    return OK


def split_one(flags: Namespace) -> int:
    check_output_prefix(flags.output_prefix, example="part")
    [prefix, *more] = find_prefixes([flags.input])
    if more:
        raise ConfigError(f"{flags.input} contains {1 + len(more)} datasets; give the prefix of one")
    dataset = IndexedDataset(prefix)
    if not dataset.num_documents:
        raise ConfigError(f"{prefix} has no documents to split; give a dataset with documents")
    base = flags.output_prefix
    empty: list[str] = []
    if flags.split is not None:
        parts = parts_of_split(dataset, flags.split)
        named = [(f"{base}_{name}", part) for name, part in zip(SPLITS, parts, strict=True)]
        outputs = [(name, part) for name, part in named if part]
        empty = [name for name, part in named if not part]
    else:
        if flags.parts is not None:
            parts = parts_of_equal_tokens(dataset, flags.parts)
        else:
            parts = [parse_documents(text, dataset) for text in flags.documents]
        # Zero-padded, so that a listing of the folder is in order.
        width = len(str(len(parts) - 1))
        names = [f"{base}_{number:0{width}d}" for number in range(len(parts))]
        outputs = list(zip(names if len(parts) > 1 else [base], parts, strict=True))
    total = sum(Part.of(dataset, part).num_bytes for part in parts)
    with _byte_progress(total) as on_bytes:
        all_written = split_dataset(prefix, outputs, on_bytes=on_bytes)
    for written, (_, part) in zip(all_written, outputs, strict=True):
        show(visible(f"{_format_written(written)}, documents {part.start} to {part.stop - 1}"))
    for name in empty:
        show(visible(f"{name}: no documents, not written"))
    return OK


@contextmanager
def _byte_progress(total: int) -> Iterator[Callable[[int], None]]:
    """Show progress of `total` bytes; Ctrl-C ends it cleanly."""
    with first_signal_raises(), closing(ByteProgress(total)) as progress:
        yield progress.advance


def _tokenizer(flags: Namespace) -> Tokenizer | None:
    tokenizer = build_tokenizer(tokenizer_config(flags), flags.vocab_size)
    if tokenizer is not None and flags.vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"vocab_size {flags.vocab_size} has no effect: {tokenizer.name} has {tokenizer.vocab_size}; leave it out"
        )
    return tokenizer


def _format_verified(result: Verified) -> str:
    """Return the result for a dataset in one line: sound, with the checks done and skipped, or the first fault."""
    if result.fault is not None:
        return f"{result.prefix}: damaged: {result.fault.text}"
    counts = f"{result.documents:,} documents, {result.tokens:,} {result.dtype} tokens, {decimal_bytes(result.bytes)}"
    if result.largest_id is None:
        ids = "no ids"
    elif result.vocab_size is None:
        ids = f"ids up to {result.largest_id} (not compared: give --vocab-size)"
    else:
        ids = f"ids up to {result.largest_id}, vocab_size {result.vocab_size}"
    parts = [counts, ids]
    if result.eod is not None:
        parts.append(f"every document ends with {result.eod}")
    if result.hashed:
        parts.append("sha256 as in the side file")
    else:
        unknown = result.bad_side_file or not result.has_side_file
        parts.append("sha256 not compared" + (": no side file" if unknown else ""))
    return f"{result.prefix}: sound: {'; '.join(parts)}"


def _format_written(written: Written) -> str:
    files = ".bin, .idx and .json" if written.files else ".bin and .idx"
    return f"{written.prefix}{files}: {written.documents:,} documents, {written.tokens:,} {written.dtype.name} tokens"


def _format_facts(facts: dict[str, Any]) -> str:
    """Format the dict of `preprocess.verify.inspect`."""
    lengths, files = facts["document_lengths"], facts["bytes"]
    notes = [f"{facts['empty_documents']:,} without tokens"] if facts["empty_documents"] else []
    if facts["sequences"] != facts["documents"]:
        notes.append(f"{facts['sequences']:,} sequences")
    rows = [
        ("tokens", f"{facts['tokens']:,} of type {facts['dtype']}"),
        ("documents", f"{facts['documents']:,}" + (f" ({', '.join(notes)})" if notes else "")),
        ("files", f".bin {decimal_bytes(files['.bin'])}, .idx {decimal_bytes(files['.idx'])}"),
        ("lengths", f"{lengths['min']:,} to {lengths['max']:,} tokens, mean {lengths['mean']:,.1f}"),
    ]
    side = facts["side_file"]
    side_lines = _rows([("side file", "none")]) if side is None else _side_file(side)
    lines = [facts["prefix"], *_rows(rows), *_histogram(lengths["buckets"]), *side_lines]
    return "\n".join(lines)


def _rows(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"  {name:<10} {value}" for name, value in rows]


def _format_document(document: dict[str, Any]) -> str:
    more = document["length"] - len(document["tokens"])
    sequences = f", {document['sequences']} sequences" if document["sequences"] != 1 else ""
    ids = " ".join(map(str, document["tokens"])) + (f" ... {more:,} more" if more else "")
    lines = [f"  document {document['number']}: {document['length']:,} tokens{sequences}", f"    {ids}".rstrip()]
    if "text" in document:
        lines += [f"    | {line}" for line in document["text"].splitlines()]
    return "\n".join(lines)


def _histogram(buckets: dict[str, int]) -> list[str]:
    """Return bars of the number of documents by length. A bucket extends up to twice its start."""
    if not buckets:
        return []
    most = max(buckets.values())
    lines = []
    for start, count in buckets.items():
        low = int(start)
        label = f"{low:,}" if low < 2 else f"{low:,} to {2 * low - 1:,}"
        lines.append(f"    {label:>26} {count:>14,} {'#' * max(1, round(_BAR * count / most))}")
    return lines


def _side_file(side: dict[str, Any]) -> list[str]:
    """Format the fields of the side file that the data files do not contain; --json shows all."""
    names = ("tokenizer", "append_eod", "key", "bad_lines", "part_of")
    fields = {name: side[name] for name in names if name in side}
    text = as_yaml(fields, default_flow_style=None, width=110)
    return ["  side file", *(f"    {line}" for line in text.splitlines())]


def make_indices(flags: Namespace) -> int:
    invocation = flags.invocation
    reports = []
    for report in _index(invocation):
        reports.append(report)
        if not invocation.json:
            show(_format_index(report))
    if invocation.json:
        show(json_text(reports))
    elif not reports:
        data = invocation.config.data
        packed = (
            f"{'sft' if data.sft else 'packing best-fit'} stores no index: documents are packed in memory in each epoch"
        )
        show(packed if data.packs_documents else "this data needs no index")
    return 0


def _index(invocation: Invocation) -> Iterator[dict[str, Any]]:
    config, tokenizer = _resolve(invocation)
    notes: list[str] = []
    datasets, remarks = open_run_datasets(config, tokenizer=tokenizer, log=notes.append)
    for remark in remarks:
        notify(remark)
    for split, (first, stop) in samples_to_read(config, datasets).items():
        source = getattr(datasets, split)
        if source is None:
            continue
        for part, start, end in _parts(source, first, stop):
            report = _prepare(part, start, end, notes)
            for note in dict.fromkeys(notes):
                notify(note)
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
        places = tokenize_text(config, None, say=notify, stopped=lambda: False)
        config = dataclasses.replace(config, data=config.data.with_paths(places))
    return config, tokenizer


def _parts(
    source: SampleSource, first: int, stop: int
) -> Iterator[tuple[GPTDataset | MegatronDataset | MegatronBlend, int, int]]:
    """Yield (dataset, first, stop) of each dataset with an index and the range of its samples that the run reads."""
    if isinstance(source, BlendedDataset):
        for part, start, end in zip(source.datasets, source.counts(first), source.counts(stop), strict=True):
            yield from _parts(part, start, end)
    elif isinstance(source, WholeSplit):
        for part in source.datasets:
            yield from _parts(part, 0, part.samples_per_epoch)
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
    """Build the indices of a dataset or blend for the samples first <= i < stop, and return a report.

    For a blend, documents, tokens and samples per epoch are None; for a small index (not stored), the folder is None."""
    cache = part.cache
    assert cache is not None, "build_datasets gives each a cache"
    started = time.perf_counter()
    indices = part.prepare(first, stop)
    facts: dict[str, Any] = dict.fromkeys(("documents", "tokens", "samples_per_epoch"))
    if isinstance(part, MegatronBlend):
        indices = indices[:1]  # the others belong to its datasets, which are reported separately
        name = f"the choice among {len(part.datasets)} datasets"
    else:
        name = part.indexed.prefix
        facts = {
            "documents": len(part.documents),
            "tokens": part.num_tokens,
            "samples_per_epoch": part.samples_per_epoch,
        }
    stored = [index for index in indices if index is not None]
    small = part.index_bytes < cache.small_bytes
    if not small and len(stored) < len(indices):
        raise ConfigError("; ".join(notes) or f"the index of {part.name} could not be stored in {cache.folder}")
    return {
        "name": name,
        "samples": (first, stop),
        "index_bytes": part.index_bytes,
        "indices": len(stored),
        "built": sum(index.built for index in stored),
        "folder": None if small else str(cache.folder),
        "seconds": time.perf_counter() - started,
        **facts,
    }


def _format_index(report: dict[str, Any]) -> str:
    """Return two lines: the samples that the run reads, and the indices built for them."""
    first, stop = report["samples"]
    read = f"{report['split']}: {report['name']}"
    if report["documents"] is not None:
        read += f": {report['documents']} documents, {report['tokens']} tokens"
    if report["samples_per_epoch"]:
        epochs = (stop - first) / report["samples_per_epoch"]
        read += f", {report['samples_per_epoch']} samples per epoch; the run reads {epochs:.2f} epochs, samples {first} to {stop}"
    else:
        read += f"; the run reads samples {first} to {stop}"
    size = decimal_bytes(report["index_bytes"])
    if report["folder"] is None:
        return f"{read}\n  its index has {size}: the run builds it in memory"
    counts = f"{report['built']} built, {report['indices'] - report['built']} found, in {report['seconds']:.1f} s"
    return f"{read}\n  {report['indices']} indices of {size} in {report['folder']}: {counts}"
