"""`megalite preprocess`: jsonl, text and parquet files to token files."""

import os
from collections.abc import Sequence

from megalite.cli.byte_progress import decimal_bytes
from megalite.cli.closed_streams import occupy_closed_streams
from megalite.cli.failures import command
from megalite.cli.output import show, tell
from megalite.cli.preprocess_flags import parse
from megalite.cli.preprocess_progress import ProgressLine, summary
from megalite.cli.stopping import Stopped, first_signal_raises
from megalite.data.indexed_dataset import token_dtype
from megalite.preprocess.job import PreprocessJob, Progress
from megalite.preprocess.run import plan, preprocess

_SHOWN_INPUTS, _SHOWN_IDS, _SHOWN_CHARACTERS = 10, 16, 60


@command("megalite preprocess")
def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0 if all went well, bad lines or not; 2 after a ConfigError or an error of the file system; 130 or 143 after
        Ctrl-C or SIGTERM.
    """
    # Workers are the parallelism; they inherit this.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    occupy_closed_streams()
    line = ProgressLine()
    try:
        with first_signal_raises():
            job, flags = parse(argv)
            if flags.notice:
                tell(flags.notice)
            if flags.dry_run:
                _show_plan(job)
                return 0
            result = preprocess(job, line.update)
            line.notice(result)
            line.end()
            _report(result, line.seconds, flags.show_bad)
    except Stopped as stopped:
        line.end()
        tell("; ".join([stopped.how, *getattr(stopped, "__notes__", [])]))
        return stopped.status
    except Exception:
        line.end()
        raise
    return 0


def _report(result: Progress, seconds: float, show_bad: int) -> None:
    if result.bad_lines:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result.bad.items()))
        first = ", the first of them:" if show_bad else ""
        tell(f"{result.bad_lines:,} bad lines were left out ({kinds}){first}")
        for fault in result.faults[:show_bad]:
            tell(f"  {fault}")
    tell(summary(result, seconds))
    for prefix in result.outputs:
        show(f"{prefix}.bin, .idx and .json: {result.documents:,} documents")


def _show_plan(job: PreprocessJob) -> None:
    found = plan(job)
    show(f"{len(found.inputs):,} inputs, {decimal_bytes(sum(item.size or 0 for item in found.inputs))}:")
    for item in found.inputs[:_SHOWN_INPUTS]:
        size = "stdin" if item.size is None else decimal_bytes(item.size)
        show(f"  {item.path}: {item.kind}{f', {item.compression}' if item.compression else ''}, {size}")
    if len(found.inputs) > _SHOWN_INPUTS:
        show(f"  and {len(found.inputs) - _SHOWN_INPUTS:,} more")
    tokenizer = found.tokenizer
    stored = token_dtype(tokenizer.vocab_size).name
    show(f"{tokenizer.name}: {tokenizer.vocab_size:,} ids stored as {stored}, end of document {tokenizer.eod}")
    if found.place:
        text, ids = found.text[:_SHOWN_CHARACTERS], " ".join(map(str, found.ids[:_SHOWN_IDS]))
        show(f"first document, {found.place}: {len(found.text):,} characters, {len(found.ids):,} tokens")
        show(f"  {text!r}{'...' if len(found.text) > _SHOWN_CHARACTERS else ''}")
        show(f"  {ids}{' ...' if len(found.ids) > _SHOWN_IDS else ''}")
    show(f"{job.workers} workers would write:")
    for prefix in job.prefixes:
        show(f"  {prefix}.bin, .idx and .json")
