"""`megalite preprocess` and `megalite train-tokenizer`: turn jsonl, text or parquet into token files or a tokenizer."""

import os
from argparse import Namespace
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from megalite.cli.display import ByteProgress, ProgressLine
from megalite.cli.model_commands import BYTE_LEVEL, DOCUMENT_MB, KINDS, SENTENCEPIECE
from megalite.cli.output import first_signal_raises, notify, occupy_closed_streams, show
from megalite.config.data import DataConfig, is_address
from megalite.config.describe import redact_text
from megalite.config.errors import ConfigError, nearest
from megalite.config.numbers import decimal_bytes
from megalite.config.run import RunConfig
from megalite.data.indexed_dataset import token_dtype
from megalite.data.remote import redacted
from megalite.preprocess import text_data
from megalite.preprocess.inputs import find_inputs
from megalite.preprocess.job import PreprocessJob, Progress, parse_shard, shard_name
from megalite.preprocess.run import plan, preprocess
from megalite.preprocess.train_tokenizer import TrainingText, train_byte_level, train_sentencepiece
from megalite.tokenizers.base import Tokenizer
from megalite.tokenizers.build import build_tokenizer
from megalite.watchdog.processes import usable_cores

MIB = 1 << 20
_MAX_DOCUMENT_MB = 1 << 20
_SHOWN_INPUTS, _SHOWN_IDS, _SHOWN_CHARACTERS = 10, 16, 60


def run(flags: Namespace) -> int:
    """Run the command. Return 0 even with bad lines."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the worker processes are the parallelism
    occupy_closed_streams()
    with first_signal_raises():
        job = job_of(flags)
        if flags.ignored:
            notify(f"{', '.join(flags.ignored)}: ignored, it has no effect in megalite")
        if flags.dry_run:
            _show_plan(job)
            return 0
        with closing(JobProgress()) as line:
            result = preprocess(job, line.take)
            line.notice(result)
        if result.outputs:  # a shard without input writes nothing
            _report(result, line.seconds)
    return 0


def job_of(flags: Namespace) -> PreprocessJob:
    if not 0 < flags.max_document_mb < _MAX_DOCUMENT_MB:
        most = f"{_MAX_DOCUMENT_MB:,}; try {DOCUMENT_MB}"
        raise ConfigError(f"--max-document-mb {flags.max_document_mb} must be above 0 and below {most}")
    shard = None if flags.shard is None else parse_shard(flags.shard)
    return PreprocessJob(
        inputs=tuple(flags.input),
        output_prefix=flags.output_prefix if shard is None else shard_name(flags.output_prefix, shard),
        shard=shard,
        tokenizer=tokenizer_config(flags),
        vocab_size=flags.vocab_size,
        json_keys=tuple(flags.json_keys or ("text",)),
        sft=flags.sft,
        append_eod=flags.append_eod,
        max_document_bytes=max(int(flags.max_document_mb * MIB), 1),
        text_documents=flags.text_documents,
        workers=usable_cores() if flags.workers is None else flags.workers,
        strict=flags.strict,
        restart=flags.restart,
    )


def tokenize_text(*args: Any, **more: Any) -> dict[str, str]:
    """Call `preprocess.text_data.tokenize_text` and show its progress on stderr."""
    with closing(JobProgress(shows_notice=False)) as line:
        return text_data.tokenize_text(*args, **more, on_progress=line.take)


def report_texts(config: RunConfig) -> None:
    """Report what a run would do with the texts among its data paths."""
    for path in filter(is_address, config.data.texts):
        notify(f"{redacted(path)} would be fetched and tokenized before training")
    try:
        texts = text_data.find_texts(config)
    except ConfigError as error:  # the files may exist only on the cluster
        notify(redact_text(f"{' '.join(config.data.texts)} would be tokenized before training: {error}"))
        return
    for text in texts:
        documents = text_data.documents_of(text)
        if documents is not None:
            notify(f"{text.path} is tokenized: {documents:,} documents in {text.prefix}")
        else:
            size = f"{text.files:,} file{'s' if text.files > 1 else ''}, {decimal_bytes(text.num_bytes)}"
            notify(f"{text.path} ({size}) would be tokenized into {text.prefix}")


class JobProgress(ProgressLine):
    def __init__(self, *, shows_notice: bool = True) -> None:
        super().__init__()
        self._notice_done = not shows_notice

    def take(self, progress: Progress) -> None:
        self.notice(progress)
        amounts = (progress.documents, progress.tokens, progress.input_bytes)

        def text(rates: Sequence[float]) -> str:
            documents, tokens, num_bytes = rates
            parts = [
                f"{progress.documents:,} documents ({documents:,.0f}/s)",
                f"{progress.tokens:,} tokens ({tokens:,.0f}/s)",
                f"{decimal_bytes(progress.input_bytes)} ({decimal_bytes(num_bytes)}/s)",
                *([f"{progress.bad_lines:,} bad lines"] if progress.bad_lines else []),
            ]
            return ", ".join(parts)

        self.update(progress.disk_bytes, progress.disk_total, amounts, text)

    def notice(self, progress: Progress) -> None:
        """Print once whether the work of an earlier run is used."""
        if progress.notice and not self._notice_done:
            notify(progress.notice)
        self._notice_done = True


def summary(progress: Progress, seconds: float) -> str:
    """Return the totals of a finished job. Rates exclude the work of an earlier run."""
    documents, tokens = progress.documents - progress.kept_documents, progress.tokens - progress.kept_tokens
    text, seconds = progress.input_bytes - progress.kept_bytes, max(seconds, 1e-9)
    return (
        f"{progress.documents:,} documents, {progress.tokens:,} tokens "
        f"({progress.tokens / max(progress.documents, 1):,.1f} per document) from {decimal_bytes(progress.input_bytes)} of "
        f"text in {seconds:.1f} s: {documents / seconds:,.0f} documents/s, {tokens / seconds:,.0f} tokens/s, "
        f"{text / 1e6 / seconds:.1f} MB/s; {decimal_bytes(progress.output_bytes)} written"
    )


def _report(result: Progress, seconds: float) -> None:
    if result.bad_lines:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result.bad.items()))
        notify(f"{result.bad_lines:,} bad lines were left out ({kinds}), the first of them:")
        for fault in result.faults:
            notify(f"  {fault}")
    notify(summary(result, seconds))
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


_KIND_ALIASES = {
    "gptsentencepiecetokenizer": "SentencePieceTokenizer",
    "llama3tokenizer": "HuggingFaceTokenizer",
    "qwentokenizer": "HuggingFaceTokenizer",
}
"""Lower-case name in scripts -> tokenizer type with the same ids."""
_ADDS_START = "llama2tokenizer"


def tokenizer_config(flags: Namespace) -> DataConfig:
    """Return the settings of the tokenizer flags."""
    names = ("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern")
    kind = None if flags.tokenizer_type is None else tokenizer_kind(flags.tokenizer_type)
    return DataConfig(tokenizer_type=kind, **{name: getattr(flags, name) for name in names})


def tokenizer_kind(name: str) -> str:
    """Return the tokenizer type of a name in any case, or of an alias."""
    known = {kind.lower(): kind for kind in KINDS} | _KIND_ALIASES
    if name.lower() in known:
        return known[name.lower()]
    if name.lower() == _ADDS_START:
        raise ConfigError(
            f"--tokenizer-type {name} would put <s> before each document; use SentencePieceTokenizer, which adds nothing"
        )
    raise ConfigError(f"--tokenizer-type {name} is unknown{nearest(name, KINDS)} (one of {', '.join(KINDS)})")


def run_train_tokenizer(flags: Namespace) -> int:
    text, path = _train(flags)
    tokenizer = build_tokenizer(DataConfig(tokenizer_model=str(path)), None)
    assert tokenizer is not None
    _report_training(text, path, tokenizer)
    return 0


def _train(flags: Namespace) -> tuple[TrainingText, Path]:
    if flags.max_megabytes * 1e6 < 1:
        raise ConfigError(f"max_megabytes {flags.max_megabytes} is less than a byte; try --max-megabytes 20")
    if flags.pattern is not None and flags.type != BYTE_LEVEL:
        raise ConfigError(f"--pattern {flags.pattern} has no effect with --type {flags.type}; use --type {BYTE_LEVEL}")
    inputs = find_inputs(flags.input)
    limit = int(flags.max_megabytes * 1e6)
    # An estimate: the files contain more than the text, or less if they are compressed.
    with closing(ByteProgress(min(limit, sum(item.size or limit for item in inputs)))) as progress:
        text = TrainingText(inputs, flags.json_keys, limit, progress.advance)
        target = {"output_prefix": flags.output_prefix, "vocab_size": flags.vocab_size}
        if flags.type == BYTE_LEVEL:
            return text, train_byte_level(text, words=flags.pattern or "gpt2", **target)
        return text, train_sentencepiece(text, model_type=SENTENCEPIECE[flags.type], **target)


def _report_training(text: TrainingText, path: Path, tokenizer: Tokenizer) -> None:
    spread = " (a share that is spread evenly over the inputs; see --max-megabytes)" if text.is_share else ""
    bad = f", {text.bad} bad lines left out" if text.bad else ""
    show(f"read {decimal_bytes(text.num_bytes)} of text in {text.documents} documents{spread}{bad}")
    held_out = text.held_out
    if held_out:
        num_bytes = sum(len(document.encode("utf-8")) for document in held_out)
        tokens = sum(len(ids) for ids in tokenizer.encode_batch(held_out))
        ratio = f"{num_bytes / max(tokens, 1):.2f} bytes per token on {decimal_bytes(num_bytes)}"
        show(f"{ratio} in {len(held_out)} documents that were held out")
    else:
        show("too few documents to hold some out: bytes per token are not measured")
    show(f"{path}: {tokenizer.vocab_size} pieces; use it with --tokenizer-model {path}")
