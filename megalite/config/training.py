"""The run: batch sizes, length, precision, recompute, evaluation; checkpoints; what is logged."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.option import option
from megalite.config.registry import Registry

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMBT]?):(\d{1,7})", re.IGNORECASE)


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """(tokens from which on, batch size) of each step of `step_batch_size_schedule`, as Megatron-LM reads it.
    Raises ConfigError: not FROM:SIZE pairs that start from 0 and rise."""
    found, example = [], 'e.g. "0:384 200B:768 400B:1152"'
    for entry in text.replace(",", " ").split():
        match = _ENTRY.fullmatch(entry)
        if match is None or int(match[3]) < 1:
            raise ConfigError(f"step_batch_size_schedule has {entry} in it, which is no FROM:SIZE; {example}")
        found.append((int(float(match[1]) * _UNITS[match[2].upper()]), int(match[3])))
    thresholds = [tokens for tokens, _ in found]
    if not found or thresholds[0] != 0 or any(after <= before for before, after in pairwise(thresholds)):
        raise ConfigError(f"step_batch_size_schedule {text!r} must start from 0 tokens and rise; {example}")
    return found


MOST_LAYERS = 10_000
"""No stage has as many."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, how much at a time, and in which number format."""

    micro_batch_size: int = option(1, at_least=1, below=2**24, basic=True)
    """Sequences in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = option(None, at_least=1, below=2**24, basic=True)
    """Sequences in one step over all ranks; default micro_batch_size · dp."""
    rampup_batch_size: list[int] | None = option(None)
    """START INCREMENT SAMPLES: grow the batch from START by INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: str | None = option(None)
    """FROM:SIZE ...: SIZE sequences from that number of tokens on, e.g. "0:384 200B:768"; global_batch_size is the last."""
    train_iters: int | None = option(None, at_least=1, basic=True)
    """Length of the run in steps."""
    train_samples: int | None = option(None, at_least=1)
    """Length of the run in samples, instead."""
    seq_length: int = option(256, at_least=1, below=2**31, basic=True)
    """Tokens in one sequence."""
    seq_length_warmup: list[int] | None = option(None)
    """START STEPS: train on the first START tokens of each sample, growing to all at step STEPS."""
    seed: int = option(1234, at_least=0, below=2**63)
    """Initial weights, data order and dropout are pure functions of it."""
    precision: str = option("fp32", choices=("fp32", "bf16", "fp16", "fp64"), basic=True)
    """Parameters and activations; bf16 and fp16 keep fp32 main parameters and gradients."""
    loss_scale: float | None = option(None, above=0, below=2**64)
    """Fixed loss scale for fp16; default: dynamic."""
    initial_loss_scale: float = option(65536.0, above=0, below=2**64)
    """First dynamic loss scale."""
    min_loss_scale: float = option(1.0, above=0, below=2**64)
    """Lowest dynamic loss scale."""
    loss_scale_window: int = option(1000, at_least=1)
    """Good steps before the loss scale doubles."""
    hysteresis: int = option(2, at_least=1)
    """Overflows before the loss scale halves."""
    recompute_granularity: str = option("none", choices=("none", "selective", "full"), basic=True)
    """Activations recomputed in the backward: none, of recompute_modules (selective), or whole layers (full)."""
    recompute_modules: list[str] = option(["core_attn"])
    """selective: core_attn, mla_up_proj, mlp_act, layernorm, mlp, shared_experts, moe."""
    recompute_method: str = option("uniform", choices=("uniform", "block"))
    """full: units of recompute_num_layers layers (uniform), or that many layers of each stage, one by one (block)."""
    recompute_num_layers: int = option(
        1, flags=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"), at_least=1, below=MOST_LAYERS
    )
    """See recompute_method."""
    recompute_ahead: bool = option(False)
    """Full recompute before the wait for the gradient: shorter bubble, one more microbatch of activations."""
    cpu_offloading_num_layers: int = option(0, at_least=0, below=MOST_LAYERS)
    """Layers at the start of each stage that keep in host memory what they save for the backward."""
    fine_grained_activation_offloading: bool = option(False)
    """Only what offload_modules save; in all layers without cpu_offloading_num_layers."""
    offload_modules: list[str] = option([])
    """fine_grained_activation_offloading: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, mlp_act."""
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    """auto: cuda if there is one."""
    imports: list[str] = option([], flags=("--import",), basic=True)
    """Your modules, such as my_package.my_module, which register parts (docs/extend.md). May be given again."""
    eval_interval: int | None = option(None, at_least=1, basic=True)
    """Steps between evaluations on the validation split; default: none."""
    eval_iters: int = option(10, at_least=0)
    """Global batches in one evaluation; 0: no evaluation."""
    exit_interval: int | None = option(None, at_least=1)
    """Stop (and save) after a step divisible by this."""
    exit_duration_in_mins: float | None = option(None, above=0)
    """Stop (and save) after this many minutes, with exit status 75."""
    exit_file: str | None = option(None)
    """Stop (and save) when this file appears; default <run_dir>/STOP."""
    exit_signals: list[str] = option(["SIGTERM", "SIGUSR1"], flags=("--exit-signal",))
    """Signals that stop (and save) the run with exit status 75: SIGTERM, SIGUSR1, SIGHUP."""
    exit_timeout_seconds: float = option(300.0, above=0)
    """A rank with a signal leaves without a checkpoint if the ranks have not agreed by then."""
    check_for_nan_in_loss_and_grad: bool = option(True)
    """Act before the update when the loss or the gradient norm is not finite."""
    on_non_finite: str = option("stop", choices=("stop", "skip"))
    """Stop the run at a loss or gradient norm that is not finite, or skip the step unchanged."""
    moe_aux_loss_sequences: int = option(1, at_least=1)
    """Neighbouring sequences that share a load-balancing loss; must divide micro_batch_size."""
    max_consecutive_skips: int = option(10, at_least=1)
    """Stop after this many skipped steps in a row."""

    @property
    def offloaded_layers(self) -> int:
        """Of each stage the first so many, if it has them, have activations in host memory."""
        return self.cpu_offloading_num_layers or (MOST_LAYERS if self.fine_grained_activation_offloading else 0)

    @property
    def offloaded_modules(self) -> frozenset[str] | None:
        """Of those layers what these modules save; None: everything."""
        return frozenset(self.offload_modules) if self.fine_grained_activation_offloading else None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are written and which one a run starts from."""

    save: str | None = option(None, basic=True)
    """Folder or address (s3://bucket/run) for checkpoints; default <run_dir>/checkpoints if save_interval is set."""
    save_interval: int | None = option(None, at_least=1, flags=("--persistent-save-interval",), basic=True)
    """Steps between checkpoints; one is also written at the end."""
    async_save: bool = option(False, basic=True)
    """Copy the state to host memory and write it while training continues."""
    keep_latest: int | None = option(None, at_least=1, basic=True)
    """Keep this many checkpoints, once the newest verifies; default: all."""
    keep_every: int | None = option(None, at_least=1)
    """keep_latest: keep multiples of this step too."""
    on_save_error: str = option("stop", choices=("stop", "continue"))
    """If a checkpoint cannot be written: stop the run, or warn and continue."""
    check_weights_before_save: bool = option(True)
    """Stop the run if anything that is about to be saved is not finite."""
    max_failures_at_step: int = option(3, at_least=0)
    """Refuse to start once the run has failed this many times in one step; 0: never."""
    load: str | None = option(None, basic=True)
    """Folder or address to resume from, at the newest checkpoint that verifies. hf:FOLDER starts from a Hugging Face
    model."""
    ckpt_step: int | None = option(None, at_least=0)
    """Resume from this step rather than from the newest."""
    fresh_if_missing: bool = option(False, basic=True)
    """Start from step 0 if load holds no checkpoint."""
    finetune: bool = option(False)
    """Load weights alone: optimizer, step and data position start afresh."""
    load_optimizer: bool = option(True)
    """Resume with the optimizer's states, at the step that was saved."""
    export_hf: str | None = option(None)
    """Hugging Face folder to write at the end of training; must be new or empty."""
    save_hf_interval: int | None = option(None, at_least=1)
    """Steps between Hugging Face folders during training, <export_hf>-step-N, with a checkpoint."""
    require_same_schedule: bool = option(False)
    """Refuse a checkpoint with other schedules of learning rate and weight decay."""


WRITERS: Registry[Callable[..., Any]] = Registry(
    "metrics",
    {
        "csv": "megalite.training.writers:csv_writer",
        "prometheus": "megalite.training.writers:prometheus_writer",
        "mlflow": "megalite.training.writers:MLflow",
        "comet": "megalite.training.writers:Comet",
        "wandb": "megalite.training.writers:Wandb",
    },
)
"""Makers of `training.sinks.MetricSink`, called with (config, step=) on rank 0: the run continues after that step."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, TensorBoard, JSONL, timers, profiler."""

    log_interval: int = option(10, at_least=1, basic=True)
    """Steps between log lines."""
    log_params_norm: bool = option(False)
    """Log the L2 norm of all weights."""
    log_num_zeros_in_grad: bool = option(False)
    """Log how many elements of the gradient are 0."""
    log_gradient_noise_scale: bool = option(False)
    """Log an estimate of the critical batch size, in samples."""
    run_dir: str | None = option(None, basic=True)
    """Folder for config.yaml, metrics.jsonl, sessions.json and tensorboard/; default: none."""
    tensorboard_dir: str | None = option(None)
    """TensorBoard event files; default <run_dir>/tensorboard."""
    metrics: list[str] = option([])
    """Further writers: csv, prometheus, mlflow, comet, wandb, or what an import has registered."""
    wandb_project: str | None = option(None)
    """Project at Weights & Biases; the key comes from WANDB_API_KEY or `wandb login`."""
    wandb_entity: str | None = option(None)
    """Team or user there; default: that of the key."""
    wandb_exp_name: str | None = option(None)
    """Name of the run there; default: that of run_dir."""
    timing_log_level: int = option(1, at_least=0, at_most=1)
    """1: time each phase of the step and find slow ranks; 0: neither."""
    log_phases: bool = option(False)
    """A second log line with the time of each phase, and memory."""
    straggler_threshold: float = option(1.2, above=1)
    """Ranks are named when their forward and backward take this many times the median of their peers."""
    trace: bool = option(False)
    """Write the measured pipeline of trace_steps beside the simulated one."""
    trace_steps: list[int] = option([3], at_least=1)
    """Steps to trace, counted from where this run starts."""
    loss_spike_threshold: float = option(10.0, at_least=0)
    """Warn when the loss is this many times the usual scatter above the recent median; 0: never."""
    loss_spike_window: int = option(100, at_least=8)
    """Recent steps that a loss is compared with."""
    profile: bool = option(False)
    """Write torch.profiler's traces and tables of some steps to <run_dir>/profile."""
    profile_step_start: int = option(10, at_least=2)
    """First step to profile, counted from where this run starts."""
    profile_step_end: int = option(12, at_least=3)
    """The step before which profiling ends."""
    profile_ranks: list[int] = option([0], at_least=0)
    """Ranks to profile."""
    record_memory_history: bool = option(False)
    """CUDA: write every allocation when memory runs out."""
    peak_tflops: float | None = option(None, above=0)
    """Peak TFLOP/s of one device, for MFU; default: known for data-centre GPUs."""
