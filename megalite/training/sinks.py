"""Where metrics go: a JSON line a step and TensorBoard with Megatron-LM's tags. Rank 0 alone has any."""

import importlib.util
import json
import math
from pathlib import Path
from typing import Any, Protocol

from megalite.config.errors import ConfigError


class MetricSink(Protocol):
    """Takes one record at a time."""

    def write(self, record: dict[str, Any]) -> None:
        """Take a record: `kind` (train, valid or test), `step`, `consumed_samples` and numbers."""

    def close(self) -> None:
        """Finish what is buffered."""


class JsonLines:
    """`metrics.jsonl`: one object a line. NaN and infinities are the strings "nan", "inf": JSON has no others.

    Args:
        path: the file, appended to.
        step: the run stands here: later records, of steps that a killed run had made and that will be made again,
            are dropped, and with them lines that are no records. What the test split gave at a step is kept once,
            however often a run that has come to its end is started again.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = []
        self._tested: set[int] = set()
        if path.exists():
            # A machine that dies can leave a line cut off, or bytes of anything.
            for line in path.read_text(errors="replace").splitlines(keepends=True):
                record = parse_record(line)
                if record is not None and record["step"] <= step:
                    kept.append(line)
                    if record["kind"] == "test":
                        self._tested.add(record["step"])
        temporary = path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        temporary.replace(path)
        self._file = path.open("a")

    def write(self, record: dict[str, Any]) -> None:
        """Append and flush: whoever follows the file sees each step."""
        if record["kind"] == "test":
            if record["step"] in self._tested:
                return
            self._tested.add(record["step"])
        self._file.write(json.dumps({name: _plain(value) for name, value in record.items()}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def parse_record(line: str) -> dict[str, Any] | None:
    """The record in a line of metrics.jsonl; None if it is damaged or not complete."""
    try:
        record = json.loads(line) if line.endswith("\n") else None
    except json.JSONDecodeError:
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

    Raises:
        ConfigError: tensorboard is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "tensorboard_dir is set but the tensorboard package is not installed; "
                "pip install 'megalite[tensorboard]'"
            ) from None
        # No purge_step: it also purges the curves over samples, whose steps are samples and as a rule far above it.
        self._writer = SummaryWriter(str(folder))

    def write(self, record: dict[str, Any]) -> None:
        """One scalar a known name, over steps and over samples."""
        for name, tag in TENSORBOARD_TAGS.items():
            value = record.get(name)
            if value is not None:
                value = value / 1e3 if name == "ms_per_step" or name.endswith("_ms") else value
                self._writer.add_scalar(tag, value, record["step"])
                self._writer.add_scalar(f"{tag} vs samples", value, record["consumed_samples"])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
