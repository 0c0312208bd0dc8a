"""What a run tells and where."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, TensorBoard, JSONL."""

    log_interval: int = option(10, basic=True)
    """Steps between log lines."""
    run_dir: str | None = option(None, basic=True)
    """Folder for the resolved config, metrics.jsonl and tensorboard/; default: none of them is written."""
    tensorboard_dir: str | None = option(None)
    """TensorBoard event files; default <run_dir>/tensorboard."""
    trace: bool = option(False)
    """Write the measured pipeline of the steps in trace_steps beside the simulated one: <run_dir>/trace-N.json, for
    Perfetto."""
    trace_steps: list[int] = option([3])
    """Steps to trace, counted from where this run starts."""
    loss_spike_threshold: float = option(10.0)
    """A line in the log when the loss is so many times the usual scatter above the median of recent steps; 0: never."""
    loss_spike_window: int = option(100)
    """Recent steps that a loss is compared with."""
    peak_tflops: float | None = option(None)
    """Peak TFLOP/s of one device, for MFU; default: known for the data-centre GPUs, unknown on CPU."""
