"""The folder of an unfinished run, its lock and journal, and how the next run resumes from it.

Each line of the journal is a digest, a space and a JSON object; the digest covers the line and all before it. So a line
that a kill or a full disk cut off, and all that might follow it, is recognised and dropped.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.files import create, lock_folder, named, sync_folder, write_all
from megalite.config.errors import ConfigError
from megalite.data.indexed_dataset import token_dtype
from megalite.data.indexed_writer import LENGTH, TokenCounts
from megalite.data.token_files import SUFFIXES
from megalite.preprocess.inputs import Input
from megalite.preprocess.job import PreprocessJob, require_free
from megalite.preprocess.output import DatasetStatistics, OutputState
from megalite.preprocess.pieces import Place
from megalite.tokenizers.base import Tokenizer

JOURNAL = "journal"
_DIGEST_CHARACTERS = 24
_OURS = re.compile(r"journal|[0-9]+\.(bin|idx|json|lengths)")

Facts = Mapping[str, Any]
Stamp = list[Any]  # [absolute path, bytes, mtime in ns] of an input; of standard input [-, None, None]


class FolderInUse(ConfigError):
    """Another process works in the folder."""


class UnfinishedFolder:
    """`{output_prefix}.unfinished`, locked against a second process. Raises ConfigError: another process works there,
    it holds other files, or it cannot be made."""

    def __init__(self, path: Path) -> None:
        self.path, self.journal = path, path / JOURNAL
        self._lock: int | None = None
        # A process that has just finished removes the folder: then we have locked what is gone, and make another.
        while not self._open():
            self.close()
        foreign = sorted(file.name for file in path.iterdir() if not _OURS.fullmatch(file.name))
        if foreign:
            self.close()
            raise ConfigError(f"{path} holds {foreign[0]!r}, which is none of ours; choose another --output-prefix")

    def clear(self) -> None:
        """Remove all files, the journal last: what is left of a half-cleared folder is then known to be damaged."""
        for file in self.path.iterdir():
            if file.name != JOURNAL:
                file.unlink()
        self.journal.unlink(missing_ok=True)

    def remove(self) -> None:
        self.clear()
        self.path.rmdir()
        sync_folder(self.path.parent)

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _open(self) -> bool:
        remedy = "choose another --output-prefix"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_folder(self.path)
        except FileExistsError:
            raise ConfigError(f"{self.path} is not a folder; move it away or {remedy}") from None
        except BlockingIOError:
            raise FolderInUse(f"{self.path} is in use by another process; wait for it, or {remedy}") from None
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be made: {error.strerror}; {remedy}") from None
        if self._lock is None:
            return True
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(self._lock), self.path.stat())
        return False


def move_into_place(folder: Path, prefixes: Sequence[str]) -> None:
    """Give complete output its names; files that have theirs are left, so a second call continues after a kill. An .idx
    or .json of an earlier output goes before its .bin does: neither ever stands beside a .bin that it does not
    describe."""
    for number, prefix in enumerate(prefixes):
        for suffix in SUFFIXES:
            made = folder / f"{number}{suffix}"
            if not made.exists():
                continue
            if suffix == ".bin":
                for old in (".json", ".idx"):
                    Path(f"{prefix}{old}").unlink(missing_ok=True)
                sync_folder(Path(f"{prefix}{suffix}").parent)
            made.replace(f"{prefix}{suffix}")
    sync_folder(folder.parent)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A state of the run that is on the disk."""

    place: Place  # the input is done up to here
    input_bytes: int
    disk_bytes: int
    bad: dict[str, int]  # lines left out, by kind, since the start
    faults: list[str]  # the first bad lines, as far as the mark before does not have them
    outputs: list[OutputState]  # in the order of the keys

    @classmethod
    def of(cls, record: Facts) -> "Mark":
        place, outputs = Place(*record["place"]), [OutputState(*state) for state in record["outputs"]]
        return cls(**{**record, "place": place, "outputs": outputs})


@dataclass(frozen=True)
class JournalContent:
    """All that can be trusted of a journal."""

    job: dict[str, Any]  # what the job is
    inputs: list[Stamp]  # as the last run to write here found them
    marks: list[Mark]
    ends: list[int]  # where the line of each mark ends
    files: list[dict[str, dict[str, Any]]] | None  # once complete: for each key, suffix -> bytes, sha256


class Journal:
    """Appends lines; each is on the disk when the call returns. `length`: continue after so many bytes; None starts a
    new file."""

    def __init__(self, path: Path, length: int | None) -> None:
        self._path = path
        if length is None:
            os.close(create(path))
            sync_folder(path.parent)
        self._length, self._digest = length or 0, b""
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self._length)
        for line in path.read_bytes().split(b"\n")[:-1]:
            self._digest = _link(self._digest, line.partition(b" ")[2])

    def mark(self, mark: Mark) -> None:
        self.append({**vars(mark), "place": astuple(mark.place)})

    def append(self, record: Facts) -> None:
        """One line: `job` first, `inputs` at the start of each run, marks, and `complete` when all output files are made."""
        text = json.dumps(record).encode("ascii")
        digest = _link(self._digest, text)
        line = digest.hex()[:_DIGEST_CHARACTERS].encode() + b" " + text + b"\n"
        try:
            write_all(self._file, memoryview(line))
            os.fsync(self._file)
        except OSError as error:
            # Half a line would hide all that comes after it.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._length)
            raise named(error, self._path) from None
        self._digest, self._length = digest, self._length + len(line)

    def close(self) -> None:
        os.close(self._file)


def read_journal(path: Path) -> JournalContent | None:
    """What an earlier run left; None if there is no journal, or not even its first two lines are whole. Raises OSError:
    it cannot be read."""
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    digest, position = b"", 0
    records: list[tuple[dict[str, Any], int]] = []
    for line in lines:
        check, _, text = line.partition(b" ")
        digest = _link(digest, text)
        position += len(line) + 1
        if check != digest.hex()[:_DIGEST_CHARACTERS].encode():
            break
        records.append((json.loads(text), position))
    if len(records) < 2 or "job" not in records[0][0] or "inputs" not in records[1][0]:
        return None
    marks = [(Mark.of(record), end) for record, end in records if "place" in record]
    return JournalContent(
        job=records[0][0]["job"],
        inputs=[record["inputs"] for record, _ in records if "inputs" in record][-1],
        marks=[mark for mark, _ in marks],
        ends=[end for _, end in marks],
        files=next((record["complete"] for record, _ in reversed(records) if "complete" in record), None),
    )


def _link(before: bytes, text: bytes) -> bytes:
    return hashlib.sha256(before + text).digest()


JOB_FORMAT = 1
_BLOCK = 1 << 22
_REMEDY = "add --restart to drop it and begin again, or choose another --output-prefix"


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
    """What identifies an input; stdin is identified by its content. Raises ConfigError: it is gone."""
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

    Raises ConfigError: what an earlier run left belongs to another job, or can be neither finished nor resumed."""
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
        raise ConfigError(f"an earlier run was stopped while renaming, and {fault}; add --restart to replace its files")
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
    marks: int = 0  # leading marks that the files agree with; the counts are those of the last of them


@dataclass
class Beginning:
    journal: Journal
    kept: list[Kept]  # for each key
    mark: Mark | None = None  # the last one that the files agree with; None to start from nothing
    faults: list[str] = field(default_factory=list)  # the first bad lines up to there
    notice: str = ""  # what became of an earlier run's work


def begin(folder: UnfinishedFolder, job: PreprocessJob, facts: Facts, stamps: Sequence[Stamp]) -> Beginning:
    """Resume where an earlier run was stopped, as far as its files hold what its journal says, or start from nothing.
    Raises ConfigError: what an earlier run left belongs to another job, or a finished output exists."""
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
            raise ConfigError(f"{folder} holds another job: {name} was {content.job.get(name)}, now {value}; {_REMEDY}")
    for number in range(mark.place.source + 1):
        before, now = content.inputs[number], stamps[number] if number < len(stamps) else None
        if now != before:
            found = _describe(now) if now else "missing"
            raise ConfigError(f"{folder} holds work on {_describe(before)}, now it is {found}; {_REMEDY}")
        if before[1] is None and number < mark.place.source:
            raise ConfigError(f"{folder} holds work on standard input, which cannot be compared; {_REMEDY}")


def _describe(stamp: Stamp) -> str:
    state = "" if stamp[1] is None else f" ({stamp[1]} bytes of {np.datetime64(stamp[2] // 10**9, 's')} UTC)"
    return f"{stamp[0]}{state}"
