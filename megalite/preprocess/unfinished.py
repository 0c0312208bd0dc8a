"""The folder of an unfinished run: its lock, its journal, and how its files get their names.

Each line of the journal is a digest, a space and a JSON object; the digest covers the line and all before it. So a line
that a kill or a full disk cut off, and all that might follow it, is recognised and dropped.
"""

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import create, lock_folder, named, sync_folder, write_all
from megalite.config.errors import ConfigError
from megalite.data.token_files import SUFFIXES
from megalite.preprocess.output import OutputState
from megalite.preprocess.pieces import Place

JOURNAL = "journal"
_DIGEST_CHARACTERS = 24
_OURS = re.compile(r"journal|[0-9]+\.(bin|idx|json|lengths)")

Facts = Mapping[str, Any]
Stamp = list[Any]
"""[absolute path, bytes, mtime in ns] of an input; of standard input [-, None, None]."""


class UnfinishedFolder:
    """`{output_prefix}.unfinished`, locked against a second process.

    Raises:
        ConfigError: another process works there, it holds other files, or it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.journal = path, path / JOURNAL
        self._lock: int | None = None
        # A process that has just finished removes the folder: then we have locked what is gone, and make another.
        while not self._open():
            self.close()
        foreign = sorted(file.name for file in path.iterdir() if not _OURS.fullmatch(file.name))
        if foreign:
            self.close()
            raise ConfigError(
                f"{path} holds {foreign[0]!r}, which no run has left; move it away or choose another --output-prefix"
            )

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
            raise ConfigError(
                f"{self.path} is in use: another process writes the same output; wait for it, or {remedy}"
            ) from None
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
    """Give complete output its names; files that have theirs are left, so a second call continues after a kill.

    An .idx or .json of an earlier output goes before its .bin does: neither ever stands beside a .bin that it does not
    describe.
    """
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

    place: Place
    """The input is done up to here."""
    input_bytes: int
    disk_bytes: int
    bad: dict[str, int]
    """Lines left out, by kind, since the start."""
    faults: list[str]
    """The first bad lines, as far as the mark before does not have them."""
    outputs: list[OutputState]
    """In the order of the keys."""

    @classmethod
    def of(cls, record: Facts) -> "Mark":
        place, outputs = Place(*record["place"]), [OutputState(*state) for state in record["outputs"]]
        return cls(**{**record, "place": place, "outputs": outputs})


@dataclass(frozen=True)
class JournalContent:
    """All that can be trusted of a journal."""

    job: dict[str, Any]
    """What the job is."""
    inputs: list[Stamp]
    """As the last run to write here found them."""
    marks: list[Mark]
    ends: list[int]
    """Where the line of each mark ends."""
    files: list[dict[str, dict[str, Any]]] | None
    """Once the output is complete: for each key, suffix -> bytes and sha256."""


class Journal:
    """Appends lines; each is on the disk when the call returns.

    Args:
        length: continue after so many bytes; None starts a new file.
    """

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
    """What an earlier run left; None if there is no journal, or not even its first two lines are whole.

    Raises:
        OSError: it cannot be read.
    """
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
