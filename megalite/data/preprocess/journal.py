"""The journal of an unfinished run: a line for what the job is, and one for each time that its files were made safe.

Each line is a digest, a space and a JSON object; the digest covers the line and all before it. So a line that a kill
or a full disk cut off, and all that might follow it, is known and dropped.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import create, named, sync_folder, write_all
from megalite.data.inputs.places import Place

_DIGEST_CHARACTERS = 24


@dataclass(frozen=True, kw_only=True)
class OutputState:
    """What the files of one key held."""

    documents: int
    tokens: int
    bin_sha256: str
    """Of the whole .bin up to here."""
    lengths_sha256: str
    """Of the documents' lengths up to here."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A state of the run that is on the disk."""

    place: Place
    """The input is done up to here."""
    input_bytes: int
    disk_bytes: int
    bad: Mapping[str, int]
    """Lines left out, by kind, since the start."""
    faults: Sequence[str]
    """The first bad lines, as far as the mark before does not have them."""
    outputs: Sequence[OutputState]
    """In the order of the keys."""


@dataclass(frozen=True)
class JournalContent:
    """All that can be trusted of a journal."""

    job: dict[str, Any]
    """What the job is."""
    inputs: list[list[Any]]
    """[path, bytes, mtime in ns] of each input, as the last run to write here found them."""
    marks: list[Mark]
    ends: list[int]
    """Where the line of each mark ends."""
    files: list[dict[str, dict[str, Any]]] | None
    """Once the output is complete: for each key, suffix -> bytes and sha256."""


class Journal:
    """Appends lines; every one is on the disk when the call returns."""

    def __init__(self, path: Path, length: int | None) -> None:
        """Go on after the first `length` bytes, or start a new file (None)."""
        self._path = path
        if length is None:
            os.close(create(path))
        self._length, self._digest = length or 0, b""
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self._length)
        for line in path.read_bytes().split(b"\n")[:-1]:
            self._digest = _link(self._digest, line.partition(b" ")[2])

    def start(self, job: Mapping[str, Any]) -> None:
        """The first line."""
        self._append({"job": job})
        sync_folder(self._path.parent)

    def inputs(self, inputs: Sequence[Sequence[Any]]) -> None:
        """What the inputs are, at the start of each run."""
        self._append({"inputs": inputs})

    def mark(self, mark: Mark) -> None:
        """The output files hold, on the disk, what `mark` says."""
        place = mark.place
        self._append(
            {
                "place": [place.source, place.offset, place.lines, place.digest],
                "input_bytes": mark.input_bytes,
                "disk_bytes": mark.disk_bytes,
                "bad": dict(mark.bad),
                "faults": list(mark.faults),
                "outputs": [
                    [output.documents, output.tokens, output.bin_sha256, output.lengths_sha256]
                    for output in mark.outputs
                ],
            }
        )

    def complete(self, files: Sequence[Mapping[str, Mapping[str, Any]]]) -> None:
        """All output files are there; what remains is to give them their names."""
        self._append({"complete": files})

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _append(self, record: Mapping[str, Any]) -> None:
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
    marks = [(_mark(record), end) for record, end in records if "place" in record]
    return JournalContent(
        job=records[0][0]["job"],
        inputs=[record["inputs"] for record, _ in records if "inputs" in record][-1],
        marks=[mark for mark, _ in marks],
        ends=[end for _, end in marks],
        files=next((record["complete"] for record, _ in reversed(records) if "complete" in record), None),
    )


def _link(before: bytes, text: bytes) -> bytes:
    return hashlib.sha256(before + text).digest()


def _mark(record: dict[str, Any]) -> Mark:
    source, offset, lines, digest = record["place"]
    return Mark(
        place=Place(source, offset, lines, digest),
        input_bytes=record["input_bytes"],
        disk_bytes=record["disk_bytes"],
        bad=record["bad"],
        faults=record["faults"],
        outputs=[
            OutputState(
                documents=documents, tokens=tokens, bin_sha256=bin_sha256, lengths_sha256=lengths_sha256
            )
            for documents, tokens, bin_sha256, lengths_sha256 in record["outputs"]
        ],
    )
