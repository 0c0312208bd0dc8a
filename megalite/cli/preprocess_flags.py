"""Flags of `megalite preprocess`, and those of Megatron-LM's script that it has no use for."""

import argparse
import re
from collections.abc import Sequence

from megalite.cli.parser import Parser
from megalite.cli.tokenizer_flags import add_tokenizer, tokenizer_config
from megalite.config.errors import ConfigError
from megalite.preprocess.job import MAX_FAULTS, PreprocessJob, usable_cores
from megalite.preprocess.pieces import Limits

MIB = 1 << 20
_DOCUMENT_MB = Limits.max_document_bytes // MIB
_MAX_DOCUMENT_MB = 1 << 20
_ONE_SEQUENCE = "leave it out: a document is one sequence here, as training GPTs wants it"
_ONE_RUN = "leave it out: --input takes many files, and the output is in their order with any --workers"
_ALL_CORES = "leave it out: --workers is all usable cores by default"
_IN_FILES = "leave it out: special tokens come from the tokenizer's own files"
_PADDED_LATER = "leave it out: training pads the vocabulary"
REFUSED = {
    "--split-sentences": _ONE_SEQUENCE,
    "--keep-newlines": "leave it out: newlines are always kept",
    "--lang": _ONE_SEQUENCE,
    "--keep-empty": "leave it out: a document without text is a bad line",
    "--partitions": _ONE_RUN,
    "--keep-sequential-samples": _ONE_RUN,
    "--log-interval": "leave it out: progress is shown every few seconds",
    "--chunk-size": "leave it out: work is handed out by bytes",
    "--dataset-impl": "leave it out: there is one format, .bin and .idx",
    "--find-optimal-num-workers": _ALL_CORES,
    "--workers-to-check": _ALL_CORES,
    "--max-documents": _ALL_CORES,
    "--performance-dir": _ALL_CORES,
    "--vocab-extra-ids": _PADDED_LATER,
    "--make-vocab-size-divisible-by": _PADDED_LATER,
    "--padded-vocab-size": _PADDED_LATER,
    "--special-tokens": _IN_FILES,
    "--tokenizer-special-tokens": _IN_FILES,
    "--tiktoken-special-tokens": _IN_FILES,
    "--tiktoken-num-special-tokens": _IN_FILES,
    "--tokenizer-metadata": "leave it out: the kind of tokenizer is known by its files, or by --tokenizer-type",
    "--legacy-tokenizer": "leave it out: there is one set of tokenizers",
}
"""Flag -> what to do instead."""
_FITTING = {"--dataset-impl": "mmap", "--log-interval": "[0-9]+", "--partitions": "1"}
"""Flag -> values with which it asks for what happens anyway."""


def parse(argv: Sequence[str] | None) -> tuple[PreprocessJob, argparse.Namespace]:
    """The job, and all flags (show_bad, dry_run and notice, something to tell, are not of the job).

    Raises:
        ConfigError: a flag of Megatron-LM's that does nothing here, or a value that cannot be.
    """
    foreign = _foreign_parser()
    notice = _check_foreign(foreign.parse_known_args(argv)[0])
    flags = _parser(foreign).parse_args(argv)
    flags.notice = notice
    if not 0 <= flags.show_bad <= MAX_FAULTS:
        raise ConfigError(f"--show-bad {flags.show_bad} must be from 0 to {MAX_FAULTS}")
    if not 0 < flags.max_document_mb < _MAX_DOCUMENT_MB:
        raise ConfigError(
            f"--max-document-mb {flags.max_document_mb} must be above 0 and below {_MAX_DOCUMENT_MB:,}; "
            f"try {_DOCUMENT_MB}"
        )
    job = PreprocessJob(
        inputs=tuple(flags.input),
        output_prefix=flags.output_prefix,
        tokenizer=tokenizer_config(flags),
        vocab_size=flags.vocab_size,
        json_keys=tuple(flags.json_keys),
        append_eod=flags.append_eod,
        max_document_bytes=max(int(flags.max_document_mb * MIB), 1),
        text_documents=flags.text_documents,
        workers=usable_cores() if flags.workers is None else flags.workers,
        strict=flags.strict,
        restart=flags.restart,
    )
    return job, flags


def _foreign_parser() -> argparse.ArgumentParser:
    """A parser of the flags that this command has no use for; dest is the flag itself."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in REFUSED:
        parser.add_argument(flag, nargs="*", dest=flag, help=argparse.SUPPRESS)
    return parser


def _check_foreign(given: argparse.Namespace) -> str:
    """What to say about flags that ask for what happens anyway; empty if there are none.

    Raises:
        ConfigError: there are others; it names them all.
    """
    values = {flag: " ".join(words) for flag, words in vars(given).items() if words is not None}
    fitting = [flag for flag in values if flag in _FITTING and re.fullmatch(_FITTING[flag], values[flag])]
    refused = [flag for flag in values if flag not in fitting]
    if refused:
        raise ConfigError("; ".join(f"{flag}: {REFUSED[flag]}" for flag in refused))
    if not fitting:
        return ""
    shown = ", ".join(f"{flag} {values[flag]}" for flag in fitting)
    return f"{shown}: not needed, it makes no difference here"


def _parser(foreign: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser = Parser(
        "megalite preprocess",
        "Turn jsonl, text or parquet files into token files. A run that was stopped resumes when the same command is "
        "given again.",
        examples=(
            "megalite preprocess --input corpus/*.jsonl.zst --output-prefix corpus --tokenizer-model tokenizer.model "
            "--append-eod",
        ),
        parents=[foreign],
    )
    _add_data(parser)
    add_tokenizer(parser.add_argument_group("tokenizer"), "for NullTokenizer")
    _add_running(parser)
    return parser


def _add_data(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .ndjson, .txt (.gz, .zst) and .parquet files, folders and globs of them; - is jsonl from stdin",
    )
    group.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin, .idx and .json; PREFIX.unfinished until all is done",
    )
    group.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text; default text")
    group.add_argument(
        "--text-documents",
        choices=("file", "line", "paragraph"),
        default="file",
        help="what a document is in a text file; default file",
    )
    group.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    group.add_argument(
        "--max-document-mb",
        type=float,
        default=float(_DOCUMENT_MB),
        metavar="MB",
        help="leave out longer ones; a tokenizer may need 70 times the document's size in memory, in each worker; "
        f"default {_DOCUMENT_MB}",
    )


def _add_running(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("running")
    group.add_argument("--workers", type=int, metavar="N", help="tokenizer processes; default: the usable cores")
    group.add_argument("--strict", action="store_true", help="stop at the first bad line")
    group.add_argument("--show-bad", type=int, default=3, metavar="N", help="show the first N bad lines; default 3")
    group.add_argument(
        "--restart", action="store_true", help="drop what a stopped run has left, and replace finished files"
    )
    group.add_argument(
        "--dry-run", action="store_true", help="show the inputs and the first document's tokens, write nothing"
    )
