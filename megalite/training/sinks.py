"""Sinks of metrics on rank 0: `metrics.jsonl`, and files that survive a full disk."""

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megalite.checkpoint.files import with_path, write_all
from megalite.config.describe import redact_text
from megalite.config.reading import open_regular

_RETRY_SECONDS = 30.0  # interval between retries after a failed write
_TAIL = 1 << 19  # bytes at the end of a metrics.jsonl, enough for a few hundred steps


class MetricSink(Protocol):
    """Writes records: `kind` (train, valid or test), `step`, `consumed_samples` and numbers."""

    def write(self, record: dict[str, Any]) -> None:
        """Write one record; may raise any exception."""

    def close(self) -> None:
        """Write buffered records."""


class BestEffort:
    """Wraps a sink so that its exceptions do not end the run: it drops records, and tries a new one now and then."""

    def __init__(self, sink: MetricSink, name: str, log: Callable[[str], None]) -> None:
        self._sink, self._name, self._log = sink, name, log
        self._dropped = 0
        self._next_try = 0.0

    def write(self, record: dict[str, Any]) -> None:
        if self._dropped and time.monotonic() < self._next_try:
            self._dropped += 1
            return
        try:
            self._sink.write(record)
        except Exception as error:
            if not self._dropped:
                self._log(
                    f"warning: cannot write {self._name}: {_reason(error)}; training continues, and records are dropped until "
                    "it can be written again"
                )
            self._dropped += 1
            self._next_try = time.monotonic() + _RETRY_SECONDS
            return
        if self._dropped:
            self._log(f"{self._name} is written again; {self._dropped} records are missing in it")
            self._dropped = 0

    def close(self) -> None:
        """Close the sink, and log missing records."""
        try:
            self._sink.close()
        except Exception as error:
            if not self._dropped:
                self._log(f"warning: cannot finish {self._name}: {_reason(error)}")
        if self._dropped:
            self._log(f"warning: the last {self._dropped} records are missing in {self._name}")


def _reason(error: Exception) -> str:
    """Return an error in one line, without credentials, which a service's message may contain."""
    return getattr(error, "strerror", None) or redact_text(" ".join(str(error).split()))


class AppendedFile:
    """A file of whole records after a `head`. If the disk is full, a partial record is removed."""

    def __init__(self, path: Path, *, head: bytes = b"") -> None:
        self._path, self._head = path, head
        self._descriptor: int | None = None
        self._open()

    def append(self, record: bytes) -> None:
        """Write a record without buffering, so that readers see it at once. Raises OSError once if the file was
        removed; the next call creates it and its folder again."""
        try:
            descriptor = self._open()
            status = os.fstat(descriptor)
            if status.st_nlink == 0:
                self.close()
                raise FileNotFoundError(errno.ENOENT, "it has been removed")
            try:
                write_all(descriptor, memoryview(record if status.st_size else self._head + record))
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, status.st_size)
                raise
        except OSError as error:
            raise with_path(error, self._path) from None

    def _open(self) -> int:
        if self._descriptor is None:
            # Create no parents: the disk may not be mounted any more.
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class JsonLines:
    """`metrics.jsonl`: one object per line. NaN and infinities are strings "nan" and "inf", since JSON has no others.

    Drops damaged lines, and records after `step`, which a killed run has written and this run writes again. Keeps one
    record of the test split per step, even if a finished run is started several times."""

    def __init__(self, path: Path, *, step: int) -> None:
        self._tested: set[int] = set()
        if path.exists():
            # After a crash of the machine a line may be cut off or contain arbitrary bytes.
            lines, kept = path.read_text(errors="replace").splitlines(keepends=True), []
            for line in lines:
                record = parse_record(line)
                if record is not None and record["step"] <= step:
                    kept.append(line)
                    if record["kind"] == "test":
                        self._tested.add(record["step"])
            if kept != lines:
                temporary = path.with_suffix(".tmp")
                temporary.write_text("".join(kept))
                temporary.replace(path)
        self._file = AppendedFile(path)
        self.close = self._file.close

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "test" and record["step"] in self._tested:
            return
        row = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in record.items()
        }
        self._file.append(f"{json.dumps(row)}\n".encode())
        if record["kind"] == "test":
            self._tested.add(record["step"])


def parse_record(line: str) -> dict[str, Any] | None:
    """Return the record in a line of metrics.jsonl; None if it is damaged or incomplete."""
    try:
        record = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):  # not JSON, or nested too deeply
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


def read_records(path: Path, *kinds: str, tail: int | None = None) -> list[dict[str, Any]]:
    """Return the valid records of a metrics.jsonl, optionally only those of some kinds, or of the last `tail` bytes."""
    try:
        with open_regular(path) as file:
            if tail is not None:
                file.seek(max(0, file.seek(0, 2) - tail))
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    found = [record for record in map(parse_record, lines) if record is not None]
    return [record for record in found if not kinds or record["kind"] in kinds]


def last_records(run_dir: str | None, kind: str) -> list[dict[str, Any]]:
    """Return the last few hundred records of a kind in a run's metrics.jsonl; none if it cannot be read."""
    return [] if run_dir is None else read_records(Path(run_dir) / "metrics.jsonl", kind, tail=_TAIL)
