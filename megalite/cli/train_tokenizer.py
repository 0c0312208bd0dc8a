"""`megalite train-tokenizer`: train a SentencePiece BPE tokenizer on the corpus that a model will be trained on."""

import argparse
import sys
from collections.abc import Iterator, Sequence

from megalite.config.errors import ConfigError
from megalite.data.documents import BadDocument, find_inputs, parse_document, read_batches
from megalite.data.tokenizers.train import train_sentencepiece


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError or a disk that is full or read-only."""
    arguments = _parser().parse_args(argv)
    try:
        texts = _texts(arguments.input, arguments.json_keys, arguments.max_megabytes)
        path = train_sentencepiece(
            texts, output_prefix=arguments.output_prefix, vocab_size=arguments.vocab_size
        )
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{path}: {arguments.vocab_size} pieces")
    return 0


def _texts(inputs: Sequence[str], keys: Sequence[str], max_megabytes: float) -> Iterator[str]:
    """Texts of the corpus until there are enough; bad lines are left to the preprocessor to complain about."""
    left = max_megabytes * 1e6
    for batch in read_batches(find_inputs(inputs)):
        for raw in batch.documents:
            if left <= 0:
                return
            try:
                texts = parse_document(raw, keys if batch.is_json else keys[:1], is_json=batch.is_json)
            except BadDocument:
                continue
            left -= sum(len(text.encode("utf-8")) for text in texts)
            yield from texts


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite train-tokenizer", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .jsonl.gz, .txt; folders and globs of them",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX.model")
    parser.add_argument("--vocab-size", type=int, default=2048, metavar="N", help="pieces; default 2048")
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text; default text"
    )
    parser.add_argument(
        "--max-megabytes",
        type=float,
        default=20.0,
        metavar="MB",
        help="read at most this much text; default 20",
    )
    return parser
