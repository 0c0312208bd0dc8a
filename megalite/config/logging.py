"""What a run tells and where."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, TensorBoard, JSONL, timers, profiler."""

    log_interval: int = option(10, basic=True)
    """Steps between log lines."""
    run_dir: str | None = option(None, basic=True)
    """Folder for the resolved config, metrics.jsonl, sessions.json and tensorboard/; default: none of them is
    written."""
    tensorboard_dir: str | None = option(None)
    """TensorBoard event files; default <run_dir>/tensorboard."""
    metrics: list[str] = option([])
    """Further writers of the numbers in metrics.jsonl: csv (<run_dir>/metrics.csv), wandb."""
    wandb_project: str | None = option(None)
    """Project at Weights & Biases; its key comes from WANDB_API_KEY or `wandb login`, never from a flag."""
    wandb_entity: str | None = option(None)
    """Team or user there; default: that of the key."""
    wandb_exp_name: str | None = option(None)
    """Name of the run there; default: that of run_dir."""
    timing_log_level: int = option(1)
    """1: a line a log interval with the time of each phase of the step, least and most over ranks, and ranks that are
    slower than their peers; 0: neither."""
    straggler_threshold: float = option(1.2)
    """A rank is named when its forward and backward take that many times the median of the ranks with the same stages."""
    trace: bool = option(False)
    """Write the measured pipeline of the steps in trace_steps beside the simulated one: <run_dir>/trace-N.json, for
    Perfetto."""
    trace_steps: list[int] = option([3])
    """Steps to trace, counted from where this run starts."""
    loss_spike_threshold: float = option(10.0)
    """A line in the log when the loss is so many times the usual scatter above the median of recent steps; 0: never."""
    loss_spike_window: int = option(100)
    """Recent steps that a loss is compared with."""
    profile: bool = option(False)
    """Write torch.profiler's traces and tables of some steps to <run_dir>/profile."""
    profile_step_start: int = option(10)
    """First step to profile, counted from where this run starts; in the one before the profiler warms up."""
    profile_step_end: int = option(12)
    """The step before which profiling ends."""
    profile_ranks: list[int] = option([0])
    """Ranks to profile."""
    record_memory_history: bool = option(False)
    """CUDA: note every allocation, and write them to <run_dir>/out-of-memory-rank-N.pickle when memory runs out."""
    peak_tflops: float | None = option(None)
    """Peak TFLOP/s of one device, for MFU; default: known for the data-centre GPUs, unknown on CPU."""
