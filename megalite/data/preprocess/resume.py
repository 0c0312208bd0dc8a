"""What an earlier run of a job has left: refused, finished, gone on from, or dropped."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.data.inputs.find import Input
from megalite.data.preprocess.job import PreprocessJob
from megalite.data.preprocess.journal import Journal, JournalContent, Mark, read_journal
from megalite.data.preprocess.output import Kept, OutputFiles, fresh, verify_kept
from megalite.data.preprocess.target import require_free
from megalite.data.preprocess.workplace import Workplace, any_has_its_name, complete_output_fault
from megalite.data.tokenizers.base import Tokenizer

JOB_FORMAT = 1
_REMEDY = "add --restart to drop it and begin again, or choose another --output-prefix"


@dataclass
class Beginning:
    """Where a run starts."""

    journal: Journal
    kept: list[Kept]
    """For each key, what its files hold."""
    mark: Mark | None = None
    """The last one that the files bear out; None to start from nothing."""
    faults: list[str] = field(default_factory=list)
    """The first bad lines up to there."""
    notice: str = ""
    """What became of an earlier run's work."""


def job_facts(job: PreprocessJob, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that the output depends on, but for the inputs."""
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


def input_stamp(item: Input) -> list[Any]:
    """[absolute path, bytes, mtime in ns] by which a file is known again; stdin is known by its content.

    Raises:
        ConfigError: it is gone.
    """
    if item.size is None:
        return [item.path, None, None]
    try:
        status = Path(item.path).stat()
    except OSError as error:
        raise ConfigError(f"input {item.path} cannot be read: {error.strerror}; put it back") from None
    path = os.path.abspath(item.path)  # noqa: PTH100 resolve() would tell of another path than the user gave
    return [path, status.st_size, status.st_mtime_ns]


def complete_output(
    workplace: Workplace, job: PreprocessJob, facts: Mapping[str, Any], stamps: Sequence[Sequence[Any]]
) -> Mark | None:
    """The last mark of an earlier run that was stopped while it gave its files their names, else None.

    It is finished only if the inputs are those that it had, each of them, and its files are what it made. Else, if no
    file has its name yet, `begin` goes on from the last mark that holds.

    Raises:
        ConfigError: what an earlier run left belongs to another job, or cannot be finished nor gone on from.
    """
    content = None if job.restart else read_journal(workplace.journal)
    if content is None or content.files is None or not content.marks:
        return None
    _require_same(workplace.folder, content, content.marks[-1], facts, stamps)
    fault = _inputs_fault(content.inputs, stamps) or complete_output_fault(
        workplace.folder, job.prefixes, content.files
    )
    if fault is None:
        return content.marks[-1]
    if any_has_its_name(workplace.folder, len(job.json_keys)):
        raise ConfigError(
            f"an earlier run was stopped while it gave its finished files their names, and {fault}; add --restart to "
            "begin again and replace them, or choose another --output-prefix"
        )
    return None


def _inputs_fault(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> str | None:
    """Why finished files may not be those of the inputs there are now, or None."""
    if [list(stamp) for stamp in now] != [list(stamp) for stamp in before]:
        known = [list(stamp) for stamp in before]
        other = next((stamp for stamp in now if list(stamp) not in known), None)
        return (
            f"input {other[0]} is not one that it read"
            if other
            else "its inputs were others, or in another order"
        )
    # Content can be compared only by reading it, which `begin` does; files that have their names cannot be gone on from.
    return "it read standard input, which cannot be compared" if any(s[1] is None for s in now) else None


def begin(
    workplace: Workplace, job: PreprocessJob, facts: Mapping[str, Any], stamps: Sequence[Sequence[Any]]
) -> Beginning:
    """Go on where an earlier run was stopped, as far as its files hold what its journal says, or start afresh.

    Raises:
        ConfigError: what an earlier run left belongs to another job, or a finished output is there.
    """
    content = None if job.restart else read_journal(workplace.journal)
    files = [OutputFiles(workplace.folder, number) for number in range(len(job.json_keys))]
    dtype, vocab_size = token_dtype(facts["vocabulary"]), facts["vocabulary"]
    notice = ""
    if content is not None and content.marks:
        _require_same(workplace.folder, content, content.marks[-1], facts, stamps)
        kept = verify_kept(files, content.marks, dtype, vocab_size)
        if kept[0].marks:
            return _go_on(workplace, content, kept, stamps)
        notice = f"what an earlier run left in {workplace.folder} is damaged and is done again"
    else:
        try:
            require_free(job)
        except ConfigError:
            workplace.remove()
            raise
    workplace.clear()
    journal = Journal(workplace.journal, None)
    journal.start(facts)
    journal.inputs(stamps)
    return Beginning(journal, [fresh(dtype, vocab_size) for _ in files], notice=notice)


def _go_on(
    workplace: Workplace, content: JournalContent, kept: list[Kept], stamps: Sequence[Sequence[Any]]
) -> Beginning:
    good = kept[0].marks
    mark = content.marks[good - 1]
    journal = Journal(workplace.journal, content.ends[good - 1])
    journal.inputs(stamps)
    notice = f"going on after {mark.outputs[0].documents:,} documents that an earlier run has done"
    if good < len(content.marks):
        lost = content.marks[-1].outputs[0].documents - mark.outputs[0].documents
        notice += f"; {lost:,} more are damaged in {workplace.folder} and are done again"
    faults = [fault for earlier in content.marks[:good] for fault in earlier.faults]
    return Beginning(journal, kept, mark, faults, notice)


def _require_same(
    folder: Path,
    content: JournalContent,
    mark: Mark,
    facts: Mapping[str, Any],
    stamps: Sequence[Sequence[Any]],
) -> None:
    for name, value in facts.items():
        if content.job.get(name) != value:
            raise ConfigError(
                f"{folder} holds the unfinished work of another job: {name} was {content.job.get(name)}, now it is {value}; "
                f"{_REMEDY}"
            )
    for number in range(mark.place.source + 1):
        before, now = content.inputs[number], stamps[number] if number < len(stamps) else None
        if now is None or list(now) != before:
            raise ConfigError(
                f"{folder} holds unfinished work that has read {before[0]} ({_describe(before)}), "
                + (
                    f"now it is {_describe(now)}"
                    if now and now[0] == before[0]
                    else f"now input {number + 1} is {now[0] if now else 'missing'}"
                )
                + f"; {_REMEDY}"
            )
        if before[1] is None and number < mark.place.source:
            raise ConfigError(
                f"{folder} holds unfinished work that has read all of standard input, which cannot be compared; {_REMEDY}"
            )


def _describe(stamp: Sequence[Any]) -> str:
    if stamp[1] is None:
        return "standard input"
    seconds = np.datetime64(stamp[2] // 10**9, "s")
    return f"{stamp[1]} bytes of {seconds} UTC"
