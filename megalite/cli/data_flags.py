"""Flags of `megalite data`."""

import argparse

from megalite.cli.parser import Parser
from megalite.cli.tokenizer_flags import add_tokenizer
from megalite.data.indexed_dataset import TOKEN_DTYPES

SHOWN_TOKENS = 64
"""Of a document, by default."""
_STOPPED = "130 after Ctrl-C, 143 after SIGTERM."


def parser() -> argparse.ArgumentParser:
    """Of all commands but `index`, which reads its own."""
    main = Parser(
        "megalite data",
        "Look into token files, verify, merge and split them. megalite data COMMAND --help tells more.",
        examples=("megalite data inspect corpus_text_document --documents 0:3",),
    )
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")

    verifying = commands.add_parser(
        "verify",
        help="read every byte and name the first that is wrong",
        description="Check index, tokens and hashes of datasets.",
        examples=("megalite data verify corpus_text_document --tokenizer-model tokenizer.model",),
        epilog="Exit status: 0 all are sound, 1 one is damaged, 2 one could not be checked or its side file not be read. "
        + _STOPPED,
    )
    _add_datasets(verifying)
    add_tokenizer(verifying, "ids must be below it, and below the side file's")
    verifying.add_argument("--no-hash", action="store_true", help="do not compare sha256 with the side file: faster")
    verifying.add_argument("--json", action="store_true", help="print JSON")

    looking = commands.add_parser(
        "inspect",
        help="show counts, lengths and documents",
        description="Show what datasets hold.",
        examples=("megalite data inspect corpus_text_document --documents 0:3",),
        epilog="Exit status: 0 all were shown, 2 one could not be. " + _STOPPED,
    )
    _add_datasets(looking)
    looking.add_argument("--documents", metavar="A:B", help="show the tokens of these documents, as in 0:3")
    looking.add_argument(
        "--max-tokens", type=int, default=SHOWN_TOKENS, metavar="N", help=f"of each; default {SHOWN_TOKENS}"
    )
    add_tokenizer(looking, "for NullTokenizer")
    looking.add_argument("--json", action="store_true", help="print JSON")

    _add_merge(commands)
    _add_split(commands)
    commands.add_parser(
        "index", help="build the sample index of a run beforehand (index --help says more)", add_help=False
    )
    return main


def _add_merge(commands: "argparse._SubParsersAction[Parser]") -> None:
    merging = commands.add_parser(
        "merge",
        help="lay datasets end to end",
        description="Write several datasets as one.",
        examples=("megalite data merge --input first second --output-prefix both",),
        epilog="Exit status: 0 written, 2 bad input or a disk that is full: nothing is written. " + _STOPPED,
    )
    merging.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PREFIX",
        help="datasets, or folders of them (in the order of their names)",
    )
    _add_output(merging, "of the new dataset")
    merging.add_argument(
        "--dtype",
        choices=[known.name for known in TOKEN_DTYPES.values()],
        help="type of the new tokens; needed if the datasets' types differ",
    )


def _add_split(commands: "argparse._SubParsersAction[Parser]") -> None:
    splitting = commands.add_parser(
        "split",
        help="cut a dataset between documents",
        description="Write parts of a dataset as datasets of their own: whole documents, in order.",
        examples=("megalite data split --input both --output-prefix part --parts 4",),
        epilog="Exit status: 0 written, 2 bad input or a disk that is full: nothing is written. " + _STOPPED,
    )
    splitting.add_argument("--input", required=True, metavar="PREFIX", help="the dataset")
    _add_output(
        splitting,
        "of the parts: PREFIX_0, PREFIX_1, ... (of a single one, its own), or PREFIX_train, PREFIX_valid, PREFIX_test",
    )
    how = splitting.add_mutually_exclusive_group(required=True)
    how.add_argument("--parts", type=int, metavar="N", help="so many, of about as many tokens each")
    how.add_argument("--documents", action="append", metavar="A:B", help="these documents; may be repeated")
    how.add_argument("--split", metavar="A,B,C", help="train, valid and test, cut where a run's --split cuts")


def _add_datasets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets",
        nargs="+",
        metavar="PREFIX",
        help="a path without .bin and .idx, one of a dataset's files, or a folder of datasets",
    )


def _add_output(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help=text)
