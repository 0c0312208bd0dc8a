"""How a run resumes from what an earlier one has left: refused, finished, continued, or dropped."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.data.indexed_writer import LENGTH, TokenCounts
from megalite.data.token_files import SUFFIXES
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import PreprocessJob, require_free
from megalite.preprocess.output import DatasetStatistics, OutputState
from megalite.preprocess.unfinished import Journal, JournalContent, Mark, Stamp, UnfinishedFolder, read_journal
from megalite.tokenizers.base import Tokenizer

JOB_FORMAT = 1
_BLOCK = 1 << 22
_REMEDY = "add --restart to drop it and begin again, or choose another --output-prefix"

Facts = Mapping[str, Any]


def job_facts(job: PreprocessJob, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that the output depends on, except the inputs."""
    return {
        "format": JOB_FORMAT,
        "json keys": list(job.json_keys),
        "append_eod": job.append_eod,
        "tokenizer": tokenizer.name,
        "tokenizer's sha256": tokenizer.fingerprint(),
        "vocabulary": tokenizer.vocab_size,
        "end of document": tokenizer.eod,
        "token type": token_dtype(tokenizer.vocab_size).name,
        "max_document_bytes": job.max_document_bytes,
        "text_documents": job.text_documents,
    }


def input_stamp(item: Input) -> Stamp:
    """What identifies an input; stdin is identified by its content.

    Raises:
        ConfigError: it is gone.
    """
    if item.size is None:
        return [item.path, None, None]
    try:
        status = Path(item.path).stat()
    except OSError as error:
        raise ConfigError(f"input {item.path} cannot be read: {error.strerror}; put it back") from None
    path = os.path.abspath(item.path)  # noqa: PTH100 resolve() would name another path than the user gave
    return [path, status.st_size, status.st_mtime_ns]


def complete_output(folder: UnfinishedFolder, job: PreprocessJob, facts: Facts, stamps: Sequence[Stamp]) -> Mark | None:
    """The last mark of an earlier run that was stopped while it gave its files their names, else None.

    It is finished only if the inputs are exactly those that it had, and its files are what it made. Else, if no file
    has its name yet, `begin` resumes from the last mark that holds.

    Raises:
        ConfigError: what an earlier run left belongs to another job, or can be neither finished nor resumed.
    """
    content = None if job.restart else read_journal(folder.journal)
    if content is None or content.files is None or not content.marks:
        return None
    _require_same(folder.path, content, content.marks[-1], facts, stamps)
    fault = _inputs_fault(content.inputs, stamps)
    are_renamed = False
    for number, (prefix, wanted) in enumerate(zip(job.prefixes, content.files, strict=True)):
        for suffix in SUFFIXES:
            made = folder.path / f"{number}{suffix}"
            are_renamed |= not made.exists()
            fault = fault or _file_fault(made if made.exists() else Path(f"{prefix}{suffix}"), wanted[suffix])
    if fault is None:
        return content.marks[-1]
    if are_renamed:
        raise ConfigError(
            f"an earlier run was stopped while it gave its finished files their names, and {fault}; add --restart to "
            "begin again and replace them, or choose another --output-prefix"
        )
    return None


def _inputs_fault(before: Sequence[Stamp], now: Sequence[Stamp]) -> str | None:
    """Why finished files may not be those of the inputs there are now, or None."""
    if list(now) != list(before):
        other = next((stamp for stamp in now if stamp not in before), None)
        return f"input {other[0]} is not one that it read" if other else "it read other inputs, or in another order"
    # Content can be compared only by reading it, which `begin` does; files that have their names cannot be resumed from.
    return "it read standard input, which cannot be compared" if any(s[1] is None for s in now) else None


def _file_fault(path: Path, wanted: Facts) -> str | None:
    if not path.is_file() or path.stat().st_size != wanted["bytes"]:
        return f"{path} is missing or has changed"
    with path.open("rb") as file:
        is_same = hashlib.file_digest(file, "sha256").hexdigest() == wanted["sha256"]
    return None if is_same else f"{path} has changed"


@dataclass
class Kept:
    """What of the files of one key is as the journal says."""

    counts: TokenCounts
    statistics: DatasetStatistics
    marks: int = 0
    """Leading marks that the files agree with; the counts are those of the last of them."""


@dataclass
class Beginning:
    journal: Journal
    kept: list[Kept]
    """For each key."""
    mark: Mark | None = None
    """The last one that the files agree with; None to start from nothing."""
    faults: list[str] = field(default_factory=list)
    """The first bad lines up to there."""
    notice: str = ""
    """What became of an earlier run's work."""


def begin(folder: UnfinishedFolder, job: PreprocessJob, facts: Facts, stamps: Sequence[Stamp]) -> Beginning:
    """Resume where an earlier run was stopped, as far as its files hold what its journal says, or start from nothing.

    Raises:
        ConfigError: what an earlier run left belongs to another job, or a finished output exists.
    """
    content = None if job.restart else read_journal(folder.journal)
    vocab_size, notice = facts["vocabulary"], ""
    if content is not None and content.marks:
        _require_same(folder.path, content, content.marks[-1], facts, stamps)
        kept = _verify_kept(folder.path, content.marks, vocab_size)
        good = kept[0].marks
        if good:
            mark = content.marks[good - 1]
            journal = Journal(folder.journal, content.ends[good - 1])
            journal.append({"inputs": stamps})
            notice = f"resuming after {mark.outputs[0].documents:,} documents that an earlier run has done"
            if good < len(content.marks):
                lost = content.marks[-1].outputs[0].documents - mark.outputs[0].documents
                notice += f"; {lost:,} more are damaged in {folder.path} and are done again"
            faults = [fault for earlier in content.marks[:good] for fault in earlier.faults]
            return Beginning(journal, kept, mark, faults, notice)
        notice = f"what an earlier run left in {folder.path} is damaged and is done again"
    else:
        try:
            require_free(job)
        except ConfigError:
            folder.remove()
            raise
    folder.clear()
    journal = Journal(folder.journal, None)
    journal.append({"job": facts})
    journal.append({"inputs": stamps})
    return Beginning(journal, [_nothing(vocab_size) for _ in job.json_keys], notice=notice)


def _nothing(vocab_size: int) -> Kept:
    return Kept(TokenCounts(token_dtype(vocab_size)), DatasetStatistics(vocab_size))


def _verify_kept(folder: Path, marks: Sequence[Mark], vocab_size: int) -> list[Kept]:
    """Read what an earlier run left, up to the last mark that the files of all keys agree with."""
    good = len(marks)
    while True:
        outputs = zip(*(mark.outputs for mark in marks[:good]), strict=True) if good else [()] * len(marks[0].outputs)
        kept = [_read_kept(folder / str(number), states, vocab_size) for number, states in enumerate(outputs)]
        least = min(one.marks for one in kept)
        if least == good:
            return kept
        # The counts have gone past what is good: count again up to there.
        good = least


def _read_kept(stem: Path, states: Sequence[OutputState], vocab_size: int) -> Kept:
    kept = _nothing(vocab_size)
    counts, paths = kept.counts, [stem.with_suffix(suffix) for suffix in (".bin", ".lengths")]
    if not states or not all(path.is_file() for path in paths):
        return kept
    with paths[0].open("rb") as bin_file, paths[1].open("rb") as lengths_file:
        for state in states:
            for tokens in _blocks(bin_file, counts.dtype, state.tokens - counts.tokens):
                if not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
                    return kept
                counts.add_tokens(tokens.view(np.uint8).data)
                kept.statistics.add_tokens(tokens)
            for lengths in _blocks(lengths_file, LENGTH, state.documents - counts.documents):
                counts.add_lengths(lengths)
                kept.statistics.add_lengths(lengths)
            if OutputState.of(counts) != state:
                return kept
            kept.marks += 1
    return kept


def _blocks(file: BinaryIO, dtype: np.dtype, count: int) -> Iterator[NDArray]:
    """The next `count` items of a file, or what there is of them."""
    while count > 0:
        data = file.read(min(count * dtype.itemsize, _BLOCK))
        block = np.frombuffer(data[: len(data) // dtype.itemsize * dtype.itemsize], dtype=dtype)
        if not len(block):
            return
        count -= len(block)
        yield block


def _require_same(folder: Path, content: JournalContent, mark: Mark, facts: Facts, stamps: Sequence[Stamp]) -> None:
    for name, value in facts.items():
        if content.job.get(name) != value:
            raise ConfigError(
                f"{folder} holds the unfinished work of another job: {name} was {content.job.get(name)}, now it is {value}; "
                f"{_REMEDY}"
            )
    for number in range(mark.place.source + 1):
        before, now = content.inputs[number], stamps[number] if number < len(stamps) else None
        if now != before:
            if now and now[0] == before[0]:
                found = f"now it is {_describe(now)}"
            else:
                found = f"now input {number + 1} is {now[0] if now else 'missing'}"
            raise ConfigError(
                f"{folder} holds unfinished work that has read {before[0]} ({_describe(before)}), {found}; {_REMEDY}"
            )
        if before[1] is None and number < mark.place.source:
            raise ConfigError(
                f"{folder} holds unfinished work that has read all of standard input, which cannot be compared; {_REMEDY}"
            )


def _describe(stamp: Stamp) -> str:
    if stamp[1] is None:
        return "standard input"
    return f"{stamp[1]} bytes of {np.datetime64(stamp[2] // 10**9, 's')} UTC"
