"""Optional sinks: TensorBoard with Megatron-LM's tags, a CSV file, Prometheus, MLflow, Comet, Weights & Biases."""

import csv
import importlib.util
import io
import itertools
import os
import platform
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.checkpoint.files import replace_durably
from megalite.config.describe import redact_text, redacted, sectioned
from megalite.config.errors import ConfigError
from megalite.config.registry import optional
from megalite.config.run import RunConfig
from megalite.config.run import writers as wanted
from megalite.config.training import WRITERS
from megalite.training.records import AppendedFile, MetricSink

TENSORBOARD_TAGS = {
    "loss": "lm loss",
    "loss_z": "loss-z-score",
    "load_balancing_loss": "load_balancing_loss",
    "z_loss": "z_loss",
    "mtp_loss": "mtp_loss",
    "indexer_loss": "indexer loss",
    "lr": "learning-rate",
    "decoupled_lr": "decoupled-learning-rate",
    "grad_norm": "grad-norm",
    "num_zeros": "num-zeros",
    "gradient_noise_scale": "gradient-noise-scale",
    "params_norm": "params-norm",
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
    "hardware_tflops_per_rank": "throughput-with-recompute",
    "hfu": "hfu",
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
"""Field of a record -> Megatron-LM's tag. Each tag also has a curve " vs samples". `_ms` fields become seconds."""

COLUMNS = (
    *("kind", "step", "consumed_samples", "loss", "valid_loss", "test_loss", "valid_perplexity", "test_perplexity"),
    *("load_balancing_loss", "z_loss", "mtp_loss", "indexer_loss", "loss_z", "lr", "decoupled_lr", "grad_norm"),
    *("params_norm", "num_zeros", "gradient_noise_scale", "loss_scale", "skipped", "batch_size"),
    *("ms_per_step", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank", "mfu"),
    *("hardware_tflops_per_rank", "hfu"),
    *("memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "memory_bytes_max"),
    "memory_allocated_count",
    *("data_wait_ms", "forward_ms", "forward_ms_min", "backward_ms", "backward_ms_min", "reduce_ms", "reduce_ms_min"),
    *("optimizer_ms", "optimizer_ms_min", "other_ms", "other_ms_min", "evaluation_seconds", "save_seconds"),
    *("bubble_fraction", "straggler_factor", "goodput", "dp_phase", "dp_wire_bytes"),
)
"""Columns of the CSV file; a field that a record does not have stays empty."""


def _tagged(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a record by their tag, times in seconds."""
    return {
        tag: record[name] / 1e3 if name == "ms_per_step" or name.endswith("_ms") else record[name]
        for name, tag in TENSORBOARD_TAGS.items()
        if record.get(name) is not None
    }


class TensorBoard:
    """TensorBoard event files. A run that resumes before its last record writes some steps again, with the same values.

    torch's SummaryWriter is not used, because a full disk ends its writing thread with a traceback."""

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
        # The name sorts after those of earlier starts: TensorBoard reads files in this order.
        start = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{platform.node()}.{os.getpid()}"
        file = next(path for number in itertools.count() if not (path := folder / f"{start}.{number}").exists())
        version = self._event(wall_time=time.time(), file_version="brain.Event:2")
        # No session start event: readers would drop all points beyond its step, so most of the curves over samples.
        self._file = AppendedFile(file, head=self._framed([version]))
        self.close = self._file.close

    def write(self, record: dict[str, Any]) -> None:
        """Write a scalar for each field with a tag, over steps and over samples."""
        numbers, now = _tagged(record), time.time()
        events = []
        for at, end in ((record["step"], ""), (record["consumed_samples"], " vs samples")):
            values = [self._summary.Value(tag=tag + end, simple_value=float(numbers[tag])) for tag in numbers]
            events.append(self._event(wall_time=now, step=at, summary=self._summary(value=values)))
        self._file.append(self._framed(events))

    def _framed(self, events: Iterable[Any]) -> bytes:
        """Return events in the file's format, with lengths and checksums."""
        buffer = io.BytesIO()
        writer = self._record_writer(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        return buffer.getvalue()


class CSVFile:
    """`metrics.csv`: one row per record. Rows of steps that a resumed run repeats are dropped, as in metrics.jsonl."""

    def __init__(self, path: Path, *, step: int) -> None:
        kept = []
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                # After a crash of the machine rows may be cut off or contain arbitrary bytes.
                lines = (line.replace("\0", "") for line in file)
                kept = [row for row in csv.DictReader(lines, restkey="more") if _is_kept(row, step)]
        head = dict(zip(COLUMNS, COLUMNS, strict=True))
        replace_durably(path, _rows([head, *kept]))
        self._file = AppendedFile(path, head=_rows([head]))
        self.close = self._file.close

    def write(self, record: dict[str, Any]) -> None:
        self._file.append(_rows([record]))


def _rows(records: Sequence[Mapping[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    csv.DictWriter(text, COLUMNS, restval="", extrasaction="ignore").writerows(records)
    return text.getvalue().encode()


def _is_kept(row: dict[str, Any], step: int) -> bool:
    """Return whether a row is complete and its step is not repeated."""
    number = row.get("step") or ""
    return "more" not in row and None not in row.values() and number.isdecimal() and int(number) <= step


class Prometheus:
    """`metrics.prom` for node_exporter's text-file collector: the newest value of each field, replaced atomically."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        folder = Path(config.logging.run_dir or "")
        self._path, self._known = folder / _FILES["prometheus"], dict[str, float]()
        name = folder.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", " ")
        self._label = f'{{run="{name}"}}'

    def write(self, record: dict[str, Any]) -> None:
        self._known |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        lines = (
            f"# TYPE megalite_{name} gauge\nmegalite_{name}{self._label} {_PROMETHEUS.get(str(value), repr(value))}\n"
            for name, value in self._known.items()
        )
        temporary = self._path.with_suffix(".tmp")  # the collector ignores this suffix
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(self._path)

    def close(self) -> None:
        """Do nothing: the last values remain."""


_PROMETHEUS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


class MLflow:
    """MLflow, under TensorBoard's tags. MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other variables set server
    and user. The config is sent without credentials."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        self._mlflow, (folder, known) = _package("mlflow"), _known_run("mlflow", config)
        run = self._mlflow.start_run(run_id=known, run_name=None if folder is None else redact_text(folder.name))
        if known is None:
            self._mlflow.log_params(_parameters(config))
        _keep_id("mlflow", folder, run.info.run_id)

    def write(self, record: dict[str, Any]) -> None:
        self._mlflow.log_metrics({tag: float(value) for tag, value in _tagged(record).items()}, step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


class Comet:
    """Comet, under TensorBoard's tags. COMET_PROJECT_NAME, COMET_API_KEY and its other variables set project and user;
    with COMET_START_ONLINE=0 it writes a file in the run's folder for `comet upload`.

    Sends nothing from the environment, command line, console, code or git, and the config without credentials."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        comet_ml, (folder, known) = _package("comet", "comet_ml"), _known_run("comet", config)
        settings: dict[str, Any] = dict.fromkeys(_COMET_SENDS, False)
        if folder is not None:
            settings |= {"name": redact_text(folder.name), "offline_directory": str(folder / "comet")}
        experiment = comet_ml.ExperimentConfig(**settings)
        self._experiment = comet_ml.start(experiment_key=known, experiment_config=experiment)
        if known is None:
            self._experiment.log_parameters(_parameters(config))
        _keep_id("comet", folder, self._experiment.get_key())

    def write(self, record: dict[str, Any]) -> None:
        self._experiment.log_metrics(_tagged(record), step=record["step"])

    def close(self) -> None:
        self._experiment.end()


_COMET_SENDS = (
    *("log_code", "log_graph", "log_git_metadata", "log_git_patch", "log_env_details", "log_env_host", "parse_args"),
    *("auto_param_logging", "auto_metric_logging", "auto_output_logging", "auto_log_co2"),
)
"""Comet's settings that collect data by default."""


class Wandb:
    """Weights & Biases, under TensorBoard's tags. The x axis is `step`, so a repeated step overwrites none.

    wandb itself reads the user's key from WANDB_API_KEY or `wandb login`. Sends nothing from the environment, command
    line, console or git, and the config without credentials."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        wandb, (folder, known) = _package("wandb"), _known_run("wandb", config)
        logging, run_id = config.logging, known or uuid.uuid4().hex[:12]
        self._run = wandb.init(
            project=logging.wandb_project,
            entity=logging.wandb_entity,
            name=redact_text(logging.wandb_exp_name or (folder.name if folder is not None else "")),
            id=run_id,
            resume="allow",
            dir=None if folder is None else str(folder),
            config=redacted(sectioned(config)),
            save_code=False,
            settings={"console": "off", "disable_code": True, "disable_git": True, "x_disable_meta": True},
        )
        self._run.define_metric("*", step_metric="step")
        _keep_id("wandb", folder, run_id)

    def write(self, record: dict[str, Any]) -> None:
        """Send the numbers that have a tag, including NaN and infinities."""
        self._run.log({**_tagged(record), **{name: record[name] for name in ("step", "consumed_samples")}})

    def close(self) -> None:
        self._run.finish()


def _package(name: str, package: str = "") -> Any:
    package = package or name
    remedy = f"pip install {package}, or leave {name} out"
    return optional(package, f"metrics has {name} in it but the {package} package is not installed; {remedy}")


def _parameters(config: RunConfig) -> dict[str, str]:
    values = (section.items() for section in redacted(sectioned(config)).values())
    return {name: str(value)[:500] for section in values for name, value in section}


def _known_run(name: str, config: RunConfig) -> tuple[Path | None, str | None]:
    """Return the run's folder, and, for a resumed run, the service's run id stored there."""
    if config.logging.run_dir is None:
        return None, None
    folder = Path(config.logging.run_dir)
    kept = folder / f"{name}-run-id"
    known = kept.read_text().strip() if config.checkpoint.load is not None and kept.exists() else ""
    return folder, known if known.isalnum() else None


def _keep_id(name: str, folder: Path | None, run_id: str) -> None:
    if folder is not None:
        (folder / f"{name}-run-id").write_text(f"{run_id}\n")


_FILES = {"csv": "metrics.csv", "prometheus": "metrics.prom"}


def csv_writer(config: RunConfig, *, step: int) -> MetricSink:
    return CSVFile(Path(config.logging.run_dir or "") / _FILES["csv"], step=step)


_REMEDIES = {
    "comet": "set COMET_API_KEY or COMET_START_ONLINE=0, or leave comet out of --metrics",
    "mlflow": "set MLFLOW_TRACKING_URI, or leave mlflow out",
    "wandb": "run `wandb login`, set WANDB_MODE=offline, or leave wandb out of --metrics",
}


def _start(name: str, config: RunConfig, *, step: int) -> MetricSink:
    """Create the writer of a service or a user. Turns any exception into a ConfigError."""
    try:
        return WRITERS.get(name)(config, step=step)
    except (ConfigError, OSError):
        raise
    except Exception as error:
        message = f"{type(error).__name__}: {redact_text(' '.join(str(error).split()))}"
        remedy = _REMEDIES.get(name, f"leave {name} out of --metrics")
        raise ConfigError(f"metrics {name} does not start: {message}; {remedy}") from error


def open_writers(config: RunConfig, *, step: int) -> tuple[dict[str, MetricSink], bool]:
    """Open a run's sinks other than metrics.jsonl. Returns them by their name for the log, and whether TensorBoard is
    missing because it is not installed."""
    logging, without = config.logging, False
    sinks: dict[str, MetricSink] = {}
    tensorboard = logging.tensorboard_dir
    if logging.run_dir is not None:
        # Without an explicit tensorboard_dir it is optional, because metrics.jsonl has the same numbers.
        without = tensorboard is None and importlib.util.find_spec("tensorboard") is None
        if tensorboard is None and not without:
            tensorboard = str(Path(logging.run_dir) / "tensorboard")
    if tensorboard is not None:
        sinks[tensorboard] = TensorBoard(Path(tensorboard))
    for name in wanted(config):
        shown = str(Path(logging.run_dir or "") / _FILES[name]) if name in _FILES else name
        sinks[shown] = _start(name, config, step=step)
    return sinks, without
