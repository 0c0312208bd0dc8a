"""Sinks that are imported when a run has them: TensorBoard with Megatron-LM's tags, a CSV file, Prometheus, MLflow, Comet,
Weights & Biases."""

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
from megalite.training.sinks import AppendedFile, MetricSink

TENSORBOARD_TAGS = {
    "loss": "lm loss",
    "loss_z": "loss-z-score",
    "load_balancing_loss": "load_balancing_loss",
    "z_loss": "z_loss",
    "mtp_loss": "mtp_loss",
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
"""Our names -> Megatron-LM's tags; each also gets a twin " vs samples". Times, `_ms` here, are in seconds there."""

COLUMNS = (
    *("kind", "step", "consumed_samples", "loss", "valid_loss", "test_loss", "valid_perplexity", "test_perplexity"),
    *(
        "load_balancing_loss",
        "z_loss",
        "mtp_loss",
        "loss_z",
        "lr",
        "decoupled_lr",
        "grad_norm",
        "params_norm",
        "num_zeros",
    ),
    *("gradient_noise_scale", "loss_scale", "skipped", "batch_size"),
    *("ms_per_step", "tokens_per_second", "tokens_per_second_per_rank", "tflops_per_rank", "mfu"),
    *("hardware_tflops_per_rank", "hfu"),
    *("memory_bytes", "memory_allocated_bytes", "memory_reserved_bytes", "memory_bytes_max"),
    "memory_allocated_count",
    *("data_wait_ms", "forward_ms", "forward_ms_min", "backward_ms", "backward_ms_min", "reduce_ms", "reduce_ms_min"),
    *("optimizer_ms", "optimizer_ms_min", "other_ms", "other_ms_min", "evaluation_seconds", "save_seconds"),
    *("bubble_fraction", "straggler_factor", "goodput", "dp_phase", "dp_wire_bytes"),
)
"""The names of records that get a column in the CSV file; what a row has not stays empty."""


def _tagged(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that have a tag, times in seconds."""
    return {
        tag: record[name] / 1e3 if name == "ms_per_step" or name.endswith("_ms") else record[name]
        for name, tag in TENSORBOARD_TAGS.items()
        if record.get(name) is not None
    }


class TensorBoard:
    """Event files. A run that resumes before its last record writes some steps once more, to the same values.

    Written here rather than by torch's SummaryWriter: that one writes in a thread, which a full disk ends with a traceback
    and for good."""

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
        # A name that sorts behind those of earlier starts, as TensorBoard reads them.
        start = f"events.out.tfevents.{time.time_ns() // 10**9:010}.{platform.node()}.{os.getpid()}"
        file = next(path for number in itertools.count() if not (path := folder / f"{start}.{number}").exists())
        version = self._event(wall_time=time.time(), file_version="brain.Event:2")
        # No session start: readers would also drop the curves over samples, which count samples, beyond it.
        self._file = AppendedFile(file, head=self._framed([version]))
        self.close = self._file.close

    def write(self, record: dict[str, Any]) -> None:
        """One scalar a known name, over steps and over samples."""
        numbers, now = _tagged(record), time.time()
        events = []
        for at, end in ((record["step"], ""), (record["consumed_samples"], " vs samples")):
            values = [self._summary.Value(tag=tag + end, simple_value=float(numbers[tag])) for tag in numbers]
            events.append(self._event(wall_time=now, step=at, summary=self._summary(value=values)))
        self._file.append(self._framed(events))

    def _framed(self, events: Iterable[Any]) -> bytes:
        """Events as their file has them: with lengths and checksums."""
        buffer = io.BytesIO()
        writer = self._record_writer(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        return buffer.getvalue()


class CSVFile:
    """`metrics.csv`: a row a record under one header. Of a run that resumes, the rows of steps that it makes again are
    dropped, as in metrics.jsonl."""

    def __init__(self, path: Path, *, step: int) -> None:
        kept = []
        if path.exists():
            with path.open(newline="", errors="replace") as file:
                # What a machine that dies leaves may be cut off, or hold bytes of anything.
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
    """A whole row of a step that is not made again."""
    number = row.get("step") or ""
    return "more" not in row and None not in row.values() and number.isdecimal() and int(number) <= step


class Prometheus:
    """`metrics.prom`, which node_exporter's text-file collector reads: the newest number of each name. It appears whole."""

    def __init__(self, folder: Path) -> None:
        self._path, self._known = folder / "metrics.prom", dict[str, float]()
        name = folder.name.replace("\\", r"\\").replace('"', r"\"").replace("\n", " ")
        self._label = f'{{run="{name}"}}'

    def write(self, record: dict[str, Any]) -> None:
        self._known |= {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
        lines = (
            f"# TYPE megalite_{name} gauge\nmegalite_{name}{self._label} {_PROMETHEUS.get(str(value), repr(value))}\n"
            for name, value in self._known.items()
        )
        temporary = self._path.with_suffix(".tmp")  # which the collector passes over
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(self._path)

    def close(self) -> None:
        """The last numbers stay."""


_PROMETHEUS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}


class MLflow:
    """MLflow, under TensorBoard's tags. Where to, and who, say MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME and its other
    variables. The config goes without credentials."""

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
    """Comet, under TensorBoard's tags. Where to, and who, say COMET_PROJECT_NAME, COMET_API_KEY and its other variables;
    with COMET_START_ONLINE=0 a file in the run's folder waits for `comet upload`.

    Nothing of the environment, the command line, the console, the code or git is sent, and the config goes without
    credentials."""

    def __init__(self, config: RunConfig, *, step: int) -> None:
        comet_ml, (folder, known) = _package("comet", "comet_ml"), _known_run("comet", config)
        settings: dict[str, Any] = dict.fromkeys(_COMET_SENDS, False)
        if folder is not None:
            settings |= {"name": redact_text(folder.name), "offline_directory": str(folder / "comet")}
        asked = comet_ml.ExperimentConfig(**settings)
        self._experiment = comet_ml.start(experiment_key=known, experiment_config=asked)
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
"""What Comet collects by itself, unless it is switched off."""


class Wandb:
    """Weights & Biases, under TensorBoard's tags; the x axis is `step`, so a step that is made again overwrites none.

    What identifies the user comes from WANDB_API_KEY or `wandb login`, which this never reads; nothing of the environment,
    the command line, the console or git is sent, and the config goes without credentials."""

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
        """Send the numbers that have a tag; NaN and infinities among them."""
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
    """The folder of the run, and of a run that resumes its id there."""
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


def prometheus_writer(config: RunConfig, *, step: int) -> MetricSink:
    return Prometheus(Path(config.logging.run_dir or ""))


_REMEDIES = {
    "comet": "set COMET_API_KEY or COMET_START_ONLINE=0, or leave comet out of --metrics",
    "mlflow": "set MLFLOW_TRACKING_URI, or leave mlflow out",
    "wandb": "run `wandb login`, set WANDB_MODE=offline, or leave wandb out of --metrics",
}


def _start(name: str, config: RunConfig, *, step: int) -> MetricSink:
    """A service's or a user's writer, which may raise anything."""
    try:
        return WRITERS.get(name)(config, step=step)
    except (ConfigError, OSError):
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {redact_text(' '.join(str(error).split()))}"
        remedy = _REMEDIES.get(name, f"leave {name} out of --metrics")
        raise ConfigError(f"metrics {name} does not start: {said}; {remedy}") from error


def open_writers(config: RunConfig, *, step: int) -> tuple[dict[str, MetricSink], bool]:
    """The sinks that a run has besides metrics.jsonl, by what the log calls them; and whether it goes without
    TensorBoard because that is not installed."""
    logging, without = config.logging, False
    sinks: dict[str, MetricSink] = {}
    tensorboard = logging.tensorboard_dir
    if logging.run_dir is not None:
        # Not asked for by name it may be left out: metrics.jsonl has the same numbers.
        without = tensorboard is None and importlib.util.find_spec("tensorboard") is None
        if tensorboard is None and not without:
            tensorboard = str(Path(logging.run_dir) / "tensorboard")
    if tensorboard is not None:
        sinks[tensorboard] = TensorBoard(Path(tensorboard))
    for name in wanted(config):
        shown = str(Path(logging.run_dir or "") / _FILES[name]) if name in _FILES else name
        sinks[shown] = _start(name, config, step=step)
    return sinks, without
