"""`megalite train-tokenizer`: train a tokenizer on the corpus that a model will be trained on."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from megalite.cli.byte_progress import ByteProgress, decimal_bytes
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.train_tokenizer import WORD_PATTERNS, TrainingText, train_byte_level, train_sentencepiece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer

_BYTE_LEVEL = "byte-level-bpe"
_VOCAB_SIZE, _MEGABYTES = 2048, 20.0
_MODEL_TYPES = {"sentencepiece-bpe": "bpe", "sentencepiece-unigram": "unigram"}


@command("megalite train-tokenizer")
def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError or a disk that is full or read-only."""
    arguments = _parser().parse_args(argv)
    text, path = _train(arguments)
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(path)), None)
    assert tokenizer is not None
    _report(text, path, tokenizer)
    return 0


def _train(arguments: argparse.Namespace) -> tuple[TrainingText, Path]:
    if not (math.isfinite(arguments.max_megabytes) and arguments.max_megabytes * 1e6 >= 1):
        raise ConfigError(f"max_megabytes {arguments.max_megabytes} is no amount of text; try --max-megabytes 20")
    if arguments.pattern is not None and arguments.type != _BYTE_LEVEL:
        raise ConfigError(f"{arguments.type} does not read pattern ({arguments.pattern}); use --type {_BYTE_LEVEL}")
    inputs = find_inputs(arguments.input)
    most = int(arguments.max_megabytes * 1e6)
    sizes = [item.size for item in inputs]
    # On the disk a corpus may be longer than its text, or shorter where it is compressed.
    progress = ByteProgress(min(most, sum(size or most for size in sizes)))
    text = TrainingText(inputs, arguments.json_keys, most, progress.advance)
    try:
        if arguments.type == _BYTE_LEVEL:
            path = train_byte_level(
                text,
                output_prefix=arguments.output_prefix,
                vocab_size=arguments.vocab_size,
                words=arguments.pattern or "gpt2",
            )
        else:
            path = train_sentencepiece(
                text,
                output_prefix=arguments.output_prefix,
                vocab_size=arguments.vocab_size,
                model_type=_MODEL_TYPES[arguments.type],
            )
    finally:
        progress.end()
    return text, path


def _report(text: TrainingText, path: Path, tokenizer: Tokenizer) -> None:
    spread = " (a share that is spread evenly over the inputs; see --max-megabytes)" if text.is_share else ""
    bad = f", {text.bad} bad lines left out" if text.bad else ""
    show(f"read {decimal_bytes(text.num_bytes)} of text in {text.documents} documents{spread}{bad}")
    held = text.held_out
    if held:
        num_bytes = sum(len(document.encode("utf-8")) for document in held)
        tokens = sum(len(ids) for ids in tokenizer.encode_batch(held))
        show(
            f"{num_bytes / max(tokens, 1):.2f} bytes per token on {decimal_bytes(num_bytes)} in {len(held)} documents "
            "that were held out"
        )
    else:
        show("too few documents to hold some out: bytes per token are not measured")
    show(f"{path}: {tokenizer.vocab_size} pieces; use it with --tokenizer-model {path}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite train-tokenizer",
        "Train a tokenizer on the corpus that a model will be trained on. Without flags for it: "
        f"{_VOCAB_SIZE} pieces, made from at most {_MEGABYTES:.0f} MB of the text. A file that is there is not replaced.",
        epilog="Exit status: 0 written, 2 bad input or a disk that is full: nothing is written.",
        examples=("megalite train-tokenizer --input corpus/*.jsonl --output-prefix tokenizer --vocab-size 32000",),
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .txt and .parquet, .jsonl and .txt also as .gz and .zst; folders and globs of them; - for stdin",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX.model, or PREFIX.json for byte-level-bpe",
    )
    parser.add_argument(
        "--type",
        choices=(*_MODEL_TYPES, _BYTE_LEVEL),
        default="sentencepiece-bpe",
        help="default sentencepiece-bpe; byte-level-bpe (GPT-2's) needs the package tokenizers",
    )
    parser.add_argument(
        "--pattern",
        choices=tuple(WORD_PATTERNS),
        help="how byte-level-bpe cuts words: gpt2 (the default) or gpt4, which cuts numbers into threes",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=_VOCAB_SIZE,
        metavar="N",
        help=f"pieces; default {_VOCAB_SIZE}, for trying things out: models have 32000 and more, which takes some 10 MB "
        "of text",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text; default text"
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=_MEGABYTES,
        metavar="MB",
        help=f"read at most this much text, spread evenly over the inputs; default {_MEGABYTES:.0f}",
    )
    return parser
