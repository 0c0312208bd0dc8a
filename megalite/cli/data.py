"""`megalite data`: look into token files, verify, merge and split them, and build their sample index beforehand."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.cli import data_index
from megalite.cli.byte_progress import ByteProgress
from megalite.cli.data_flags import SHOWN_TOKENS, parser
from megalite.cli.data_text import format_document, format_facts, format_verified, format_written
from megalite.cli.failures import command, explained
from megalite.cli.output import show, tell, visible
from megalite.cli.stopping import first_signal_raises
from megalite.cli.tokenizer_flags import tokenizer_config
from megalite.config.data import SPLITS
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.token_files import require_recorded_tokenizer, unused_side_file
from megalite.preprocess.copying import Part, check_output_prefix
from megalite.preprocess.merge_split import merge, parts_of_equal_tokens, parts_of_split, split_dataset
from megalite.preprocess.verify import dataset_bytes, find_prefixes, inspect, parse_documents, read_documents, verify
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

OK, DAMAGED, BAD_INPUT = 0, 1, 2
_BAR_SECONDS = 0.1


@command("megalite data")
def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 if all went well; 1 if `verify` found damage; 2 after bad input or an error of the file system; 130 or 143
        after Ctrl-C or SIGTERM.
    """
    with first_signal_raises():
        if argv[:1] == ["index"]:
            return data_index.main(argv[1:])
        arguments = parser().parse_args(argv)
        return _COMMANDS[arguments.command](arguments)


def _fail(error: Exception) -> str:
    """Name one of several datasets that cannot be looked at; the others still are."""
    _, text = explained(error, "megalite data")
    tell(f"error: {visible(text)}")
    return text


def _verify(arguments: argparse.Namespace) -> int:
    prefixes = find_prefixes(arguments.datasets)
    tokenizer = _tokenizer(arguments)
    vocab_size = arguments.vocab_size if tokenizer is None else tokenizer.vocab_size
    if vocab_size is not None and vocab_size < 1:
        raise ConfigError(f"vocab_size {vocab_size} must be at least 1; give the tokenizer's")
    status = OK
    results: list[dict[str, Any]] = []
    for prefix in prefixes:
        try:
            _note_unused_side_file(prefix)
            if tokenizer is not None:
                require_recorded_tokenizer(prefix, tokenizer)
            with _showing(dataset_bytes(prefix)) as on_bytes:
                result = verify(prefix, vocab_size=vocab_size, hashes=not arguments.no_hash, on_bytes=on_bytes)
        except (ConfigError, OSError) as error:
            results.append({"prefix": prefix, "error": _fail(error)})
            status = BAD_INPUT
            continue
        status = max(status, OK if result.fault is None else DAMAGED)
        results.append(asdict(result))
        if not arguments.json:
            show(visible(format_verified(result)))
        if result.bad_side_file is not None:
            tell(f"error: {visible(result.bad_side_file)}")
            status = BAD_INPUT
    if arguments.json:
        show(json.dumps(results, indent=2))
    return status


def _inspect(arguments: argparse.Namespace) -> int:
    tokenizer = _tokenizer(arguments)
    if tokenizer is None and arguments.vocab_size is not None:
        raise ConfigError(
            f"vocab_size {arguments.vocab_size} has no effect without a tokenizer: add --tokenizer-type NullTokenizer"
        )
    if tokenizer is not None and arguments.documents is None:
        raise ConfigError("a tokenizer shows the text of documents: say which, as in --documents 0:3")
    if arguments.max_tokens < 1:
        raise ConfigError(f"max_tokens {arguments.max_tokens} must be at least 1; try {SHOWN_TOKENS}")
    status = OK
    results: list[dict[str, Any]] = []
    for prefix in find_prefixes(arguments.datasets):
        try:
            _note_unused_side_file(prefix)
            facts = _facts(prefix, arguments, tokenizer)
        except (ConfigError, OSError) as error:
            results.append({"prefix": prefix, "error": _fail(error)})
            status = BAD_INPUT
            continue
        results.append(facts)
        if not arguments.json:
            parts = [format_facts(facts), *map(format_document, facts.get("shown_documents", []))]
            show(visible("\n".join(parts)))
    if arguments.json:
        show(json.dumps(results, indent=2))
    return status


def _facts(prefix: str, arguments: argparse.Namespace, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Of one dataset, with the documents that are asked for."""
    dataset = IndexedDataset(prefix)
    facts = inspect(dataset)
    if arguments.documents is not None:
        if tokenizer is not None:
            require_recorded_tokenizer(prefix, tokenizer)
        chosen = parse_documents(arguments.documents, dataset)
        facts["shown_documents"] = [
            asdict(document) | _text(document.tokens, tokenizer, dataset)
            for document in read_documents(dataset, chosen, max_tokens=arguments.max_tokens)
        ]
    return facts


def _note_unused_side_file(prefix: str) -> None:
    """Say that a file which looks like a side file is none; one that is damaged is named by whoever needs it."""
    with suppress(ConfigError):
        note = unused_side_file(prefix)
        if note is not None:
            print(f"note: {visible(note)}", file=sys.stderr)


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


def _merge(arguments: argparse.Namespace) -> int:
    check_output_prefix(arguments.output_prefix, example="whole")
    prefixes = find_prefixes(arguments.input)
    for prefix in prefixes:
        _note_unused_side_file(prefix)
    with _showing(sum(_bin_bytes(prefix) for prefix in prefixes)) as on_bytes:
        written = merge(prefixes, arguments.output_prefix, dtype=arguments.dtype, on_bytes=on_bytes)
    show(visible(f"{format_written(written)}, of {len(prefixes)} datasets"))
    if not written.files:
        show("no side file: a dataset has none, or they name different vocabularies; tokenizers were not compared")
    return OK


def _split(arguments: argparse.Namespace) -> int:
    check_output_prefix(arguments.output_prefix, example="part")
    [prefix, *more] = find_prefixes([arguments.input])
    if more:
        raise ConfigError(f"{arguments.input} holds {1 + len(more)} datasets; give the prefix of one")
    dataset = IndexedDataset(prefix)
    if not dataset.num_documents:
        raise ConfigError(f"{prefix} has no documents to split; give one that has")
    _note_unused_side_file(prefix)
    base = arguments.output_prefix
    left_out: list[str] = []
    if arguments.split is not None:
        parts = parts_of_split(dataset, arguments.split)
        named = [(f"{base}_{name}", part) for name, part in zip(SPLITS, parts, strict=True)]
        outputs = [(name, part) for name, part in named if part]
        left_out = [name for name, part in named if not part]
    else:
        if arguments.parts is not None:
            parts = parts_of_equal_tokens(dataset, arguments.parts)
        else:
            parts = [parse_documents(text, dataset) for text in arguments.documents]
        # As wide as the last, so that a folder lists them in order.
        width = len(str(len(parts) - 1))
        names = [f"{base}_{number:0{width}d}" for number in range(len(parts))]
        outputs = list(zip(names if len(parts) > 1 else [base], parts, strict=True))
    total = sum(Part.of(dataset, part).num_bytes for part in parts)
    with _showing(total) as on_bytes:
        all_written = split_dataset(prefix, outputs, on_bytes=on_bytes)
    for written, (_, part) in zip(all_written, outputs, strict=True):
        show(visible(f"{format_written(written)}, documents {part.start} to {part.stop - 1}"))
    for name in left_out:
        show(visible(f"{name}: no documents, not written"))
    return OK


@contextmanager
def _showing(total: int) -> Iterator[Callable[[int], None]]:
    """Progress of `total` bytes, on a line that is left before an answer is printed."""
    progress = ByteProgress(total)
    try:
        yield progress.advance
    finally:
        # A shorter run has drawn no bar.
        if progress.seconds >= _BAR_SECONDS:
            progress.end()


def _bin_bytes(prefix: str) -> int:
    path = Path(f"{prefix}.bin")
    return path.stat().st_size if path.exists() else 0


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    """The tokenizer of the flags, if they name one."""
    tokenizer = build_tokenizer(tokenizer_config(arguments), arguments.vocab_size)
    if tokenizer is not None and arguments.vocab_size not in (None, tokenizer.vocab_size):
        raise ConfigError(
            f"vocab_size {arguments.vocab_size} has no effect: {tokenizer.name} has {tokenizer.vocab_size}; leave it out"
        )
    return tokenizer


_COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"verify": _verify, "inspect": _inspect, "merge": _merge, "split": _split}
)


if __name__ == "__main__":
    sys.exit(main())
