"""`megalite preprocess`: jsonl and text files to token files."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import fields

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.preprocess import PreprocessJob, Progress, preprocess

_TTY_SECONDS = 0.2
_LOG_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if all went well, 2 after a ConfigError or a disk that is full or read-only."""
    arguments = _parser().parse_args(argv)
    tokenizer = DataConfig(
        tokenizer_type=arguments.tokenizer_type,
        tokenizer_model=arguments.tokenizer_model,
        vocab_file=arguments.vocab_file,
        merge_file=arguments.merge_file,
    )
    job = PreprocessJob(
        inputs=tuple(arguments.input),
        output_prefix=arguments.output_prefix,
        tokenizer=tokenizer,
        vocab_size=arguments.vocab_size,
        json_keys=tuple(arguments.json_keys),
        append_eod=arguments.append_eod,
        workers=arguments.workers,
        strict=arguments.strict,
    )
    line = ProgressLine()
    try:
        result = preprocess(job, line.update)
    except (ConfigError, OSError) as error:
        line.end()
        print(f"error: {error}", file=sys.stderr)
        return 2
    line.end(result)
    if result.bad_lines:
        print(f"{result.bad_lines} bad lines were left out, the first of them:", file=sys.stderr)
        for fault in result.faults:
            print(f"  {fault}", file=sys.stderr)
    for prefix in result.outputs:
        print(f"{prefix}.bin and .idx: {result.documents} documents")
    return 0


class ProgressLine:
    """Totals and rates on stderr: one line rewritten on a terminal, a line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._start = self._shown = time.monotonic()
        self._is_tty = sys.stderr.isatty()
        self._width = 0

    def update(self, progress: Progress) -> None:
        """Show the totals if it is time to."""
        now = time.monotonic()
        if now - self._shown >= (_TTY_SECONDS if self._is_tty else _LOG_SECONDS):
            self._shown = now
            self._show(progress)

    def end(self, progress: Progress | None = None) -> None:
        """Show the final totals and leave the line."""
        if progress is not None:
            self._show(progress)
        if self._is_tty and self._width:
            print(file=sys.stderr)

    def _show(self, progress: Progress) -> None:
        seconds = max(time.monotonic() - self._start, 1e-9)
        text = (
            f"{progress.documents:,} documents ({progress.documents / seconds:,.0f}/s), "
            f"{progress.tokens:,} tokens ({progress.tokens / seconds:,.0f}/s), "
            f"{progress.input_bytes / 1e6:,.1f} MB ({progress.input_bytes / 1e6 / seconds:.1f} MB/s)"
        )
        if progress.bad_lines:
            text += f", {progress.bad_lines:,} bad lines"
        if self._is_tty:
            print("\r" + text.ljust(self._width), end="", file=sys.stderr, flush=True)
            self._width = len(text)
        else:
            print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megalite preprocess", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".jsonl, .jsonl.gz, .txt; folders and globs of them",
    )
    parser.add_argument(
        "--output-prefix",
        required=True,
        metavar="PREFIX",
        help="writes PREFIX_KEY_document.bin, .idx and .json",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys of the text; default text"
    )
    kinds = next(
        setting.metadata["choices"] for setting in fields(DataConfig) if setting.name == "tokenizer_type"
    )
    parser.add_argument("--tokenizer-type", choices=kinds, help="default: told from the files given")
    parser.add_argument(
        "--tokenizer-model", metavar="FILE", help="SentencePiece .model or Hugging Face tokenizer.json"
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="GPT-2 BPE vocab.json")
    parser.add_argument("--merge-file", metavar="FILE", help="GPT-2 BPE merges.txt")
    parser.add_argument("--vocab-size", type=int, metavar="N", help="for NullTokenizer")
    parser.add_argument(
        "--append-eod", action="store_true", help="end each document with the end-of-document token"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="tokenizer processes; default 1")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line")
    return parser
