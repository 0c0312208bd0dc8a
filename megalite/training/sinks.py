"""Where metrics go: a JSON line a step and TensorBoard with Megatron-LM's tags. Rank 0 alone has any."""

import contextlib
import errno
import importlib.util
import io
import itertools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from megalite.checkpoint.files import named, write_all
from megalite.config.errors import ConfigError

_TRY_AGAIN_SECONDS = 30.0
"""Between two tries to write where it was not possible."""


class MetricSink(Protocol):
    """Takes one record at a time."""

    def write(self, record: dict[str, Any]) -> None:
        """Take a record: `kind` (train, valid or test), `step`, `consumed_samples` and numbers."""

    def close(self) -> None:
        """Finish what is buffered."""


class BestEffort:
    """A sink whose failures end no run: records that cannot be written are dropped, and now and then one is tried.

    Args:
        name: what the log calls it.
        log: prints a line.
    """

    def __init__(self, sink: MetricSink, name: str, log: Callable[[str], None]) -> None:
        self._sink, self._name, self._log = sink, name, log
        self._dropped = 0
        self._next_try = 0.0

    def write(self, record: dict[str, Any]) -> None:
        """Hand the record on, or drop it."""
        if self._dropped and time.monotonic() < self._next_try:
            self._dropped += 1
            return
        try:
            self._sink.write(record)
        except OSError as error:
            if not self._dropped:
                self._log(
                    f"warning: cannot write {self._name}: {error.strerror or error}; training continues, and records are "
                    "dropped until it can be written again"
                )
            self._dropped += 1
            self._next_try = time.monotonic() + _TRY_AGAIN_SECONDS
            return
        if self._dropped:
            self._log(f"{self._name} is written again; {self._dropped} records are missing in it")
            self._dropped = 0

    def close(self) -> None:
        """Close the sink, and say what is missing at its end."""
        try:
            self._sink.close()
        except OSError as error:
            if not self._dropped:
                self._log(f"warning: cannot finish {self._name}: {error.strerror or error}")
        if self._dropped:
            self._log(f"warning: the last {self._dropped} records are missing in {self._name}")


class AppendedFile:
    """A file that gets whole records: one that the disk has no room for is cut off again.

    Args:
        head: stands at the start of the file.
    """

    def __init__(self, path: Path, *, head: bytes = b"") -> None:
        self._path, self._head = path, head
        self._descriptor: int | None = None
        self._open()

    def append(self, record: bytes) -> None:
        """Write, not only to memory of this process: whoever follows the file sees each record.

        Raises:
            OSError: it cannot be written. If it has been removed, the next call makes it and its folder again.
        """
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
            raise named(error, self._path) from None

    def _open(self) -> int:
        if self._descriptor is None:
            # Its own folder alone: above it may be a disk that is not mounted any more.
            self._path.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o666)
        return self._descriptor

    def close(self) -> None:
        """Close it."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)


class JsonLines:
    """`metrics.jsonl`: one object a line. NaN and infinities are the strings "nan", "inf": JSON has no others.

    Args:
        path: the file, appended to.
        step: the run stands here: later records, of steps that a killed run had made and that will be made again,
            are dropped, and with them lines that are no records. What the test split gave at a step is kept once,
            however often a run that has come to its end is started again.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._tested: set[int] = set()
        if path.exists():
            # A machine that dies can leave a line cut off, or bytes of anything.
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

    def write(self, record: dict[str, Any]) -> None:
        """Append a line.

        Raises:
            OSError: it cannot be written.
        """
        if record["kind"] == "test" and record["step"] in self._tested:
            return
        line = json.dumps({name: _plain(value) for name, value in record.items()})
        self._file.append(f"{line}\n".encode())
        if record["kind"] == "test":
            self._tested.add(record["step"])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_record(line: str) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if it is damaged or not complete."""
    try:
        record = json.loads(line) if line.endswith("\n") else None
    except (ValueError, RecursionError):  # no JSON, or nested more deeply than any record
        return None
    is_record = isinstance(record, dict) and isinstance(record.get("step"), int) and "kind" in record
    return record if is_record else None


_TAIL = 1 << 19
"""Bytes at the end of a metrics.jsonl in which the last few hundred steps are."""


def last_losses(path: Path, count: int) -> list[float]:
    """Losses of the last training steps in a metrics.jsonl, `count` at most, the oldest first."""
    records = [record for record in _tail(path) if record["kind"] == "train"]
    return [float(record["loss"]) for record in records[-count:] if "loss" in record]


def last_record(path: Path) -> int:
    """The last training step in a metrics.jsonl; 0 if there is none."""
    return max((record["step"] for record in _tail(path) if record["kind"] == "train"), default=0)


def has_record(path: Path, kind: str, step: int) -> bool:
    """A metrics.jsonl has what a split gave at a step, among its last records."""
    return any(record["kind"] == kind and record["step"] == step for record in _tail(path))


def _tail(path: Path) -> list[dict[str, Any]]:
    """The last records of a file; none where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL))
            lines = file.read().decode(errors="replace").splitlines(keepends=True)
    except OSError:
        return []
    return [record for line in lines if (record := parse_record(line)) is not None]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


TENSORBOARD_TAGS = {
    "loss": "lm loss",
    "loss_z": "loss-z-score",
    "load_balancing_loss": "load_balancing_loss",
    "z_loss": "z_loss",
    "lr": "learning-rate",
    "grad_norm": "grad-norm",
    "loss_scale": "loss-scale",
    "batch_size": "batch-size",
    "ms_per_step": "iteration-time",
    "data_wait_ms": "batch-generator-time",
    "forward_ms": "forward-compute-time",
    "backward_ms": "backward-compute-time",
    "reduce_ms": "all-grads-sync-time",
    "optimizer_ms": "optimizer-time",
    "other_ms": "other-time",
    "evaluation_seconds": "eval-time",
    "save_seconds": "save-checkpoint-time",
    "straggler_factor": "straggler-factor",
    "goodput": "goodput",
    "tflops_per_rank": "throughput",
    "tokens_per_second": "tokens-per-second",
    "mfu": "mfu",
    "bubble_fraction": "pipeline-bubble-fraction",
    "memory_bytes": "mem-max-allocated-bytes",
    "memory_allocated_bytes": "mem-allocated-bytes",
    "memory_reserved_bytes": "mem-reserved-bytes",
    "memory_allocated_count": "mem-allocated-count",
    "valid_loss": "lm loss validation",
    "valid_perplexity": "lm loss validation ppl",
    "test_loss": "lm loss test",
    "test_perplexity": "lm loss test ppl",
}
"""Our names -> Megatron-LM's tags; each also gets a twin " vs samples". Times, `_ms` here, are in seconds there."""


def tensorboard_installed() -> bool:
    """The optional package is there."""
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """Event files. A run that resumes before its last record writes some steps once more, to the same values.

    Written here rather than by torch's SummaryWriter: that one writes in a thread, which a full disk ends with a traceback
    and for good.

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise ConfigError(
                "tensorboard_dir is set but the tensorboard package is not installed; pip install tensorboard"
            ) from None
        self._event, self._summary, self._record_writer = event_pb2.Event, summary_pb2.Summary, RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        version = self._event(wall_time=time.time(), file_version="brain.Event:2")
        # No session start: readers would also drop the curves over samples, whose steps are samples, beyond it.
        self._file = AppendedFile(_new_event_file(folder), head=self._framed([version]))

    def write(self, record: dict[str, Any]) -> None:
        """One scalar a known name, over steps and over samples.

        Raises:
            OSError: it cannot be written.
        """
        by_step, by_samples = [], []
        for name, tag in TENSORBOARD_TAGS.items():
            value = record.get(name)
            if value is not None:
                value = float(value / 1e3 if name == "ms_per_step" or name.endswith("_ms") else value)
                by_step.append(self._summary.Value(tag=tag, simple_value=value))
                by_samples.append(self._summary.Value(tag=f"{tag} vs samples", simple_value=value))
        now = time.time()
        self._file.append(
            self._framed(
                self._event(wall_time=now, step=at, summary=self._summary(value=values))
                for at, values in ((record["step"], by_step), (record["consumed_samples"], by_samples))
            )
        )

    def _framed(self, events: Iterable[Any]) -> bytes:
        """Events as their file has them: with lengths and checksums."""
        buffer = io.BytesIO()
        writer = self._record_writer(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        return buffer.getvalue()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _new_event_file(folder: Path) -> Path:
    """A name that sorts behind those of earlier starts, as TensorBoard reads them."""
    start = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{platform.node()}.{os.getpid()}"
    return next(path for number in itertools.count() if not (path := folder / f"{start}.{number}").exists())
