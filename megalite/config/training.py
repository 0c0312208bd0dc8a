"""Settings of the run: batch sizes, length, precision, recompute, evaluation, checkpoints, logging."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.registry import Registry, option

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_ENTRY = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([KMBT]?):(\d{1,7})", re.IGNORECASE)


def parse_batch_schedule(text: str) -> list[tuple[int, int]]:
    """Parse `step_batch_size_schedule` into (first token, batch size) pairs, as Megatron-LM does. Raises ConfigError:
    not FROM:SIZE pairs that start at 0 and rise."""
    found, example = [], 'e.g. "0:384 200B:768 400B:1152"'
    for entry in text.replace(",", " ").split():
        match = _ENTRY.fullmatch(entry)
        if match is None or int(match[3]) < 1:
            raise ConfigError(f"step_batch_size_schedule has {entry} in it, which is not FROM:SIZE; {example}")
        found.append((int(float(match[1]) * _UNITS[match[2].upper()]), int(match[3])))
    thresholds = [tokens for tokens, _ in found]
    if not found or thresholds[0] != 0 or any(after <= before for before, after in pairwise(thresholds)):
        raise ConfigError(f"step_batch_size_schedule {text!r} must start from 0 tokens and rise; {example}")
    return found


MOST_LAYERS = 10_000
"""Above the layers of any stage."""


@dataclass(frozen=True, kw_only=True)
class LossFacts:
    """Facts about one loss."""

    logits: float = 3.0
    """Most tensors of the size of the logits, [s/cp, b, V] in fp32 (fp64), that exist at once in forward and backward, by
    which memory is planned. Default: one that torch's cross-entropy saves, its gradient, and that of the logits."""


LOSSES: Registry[Callable[..., Any]] = Registry(
    "loss", {"cross-entropy": "megalite.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy"}, LossFacts
)
"""Losses. Register a function of (logits [s/cp, b, V] in fp32 or fp64, labels [s/cp, b]) that returns each token's loss
[s/cp, b] with `@LOSSES.register("mine")`. It gets the logits of all tp ranks; the built-in one works on each rank's."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Length, batch sizes and number format of the run."""

    micro_batch_size: int = option(1, at_least=1, below=2**24, basic=True)
    """Sequences per forward pass of one data-parallel rank."""
    global_batch_size: int | None = option(None, at_least=1, below=2**24, basic=True)
    """Sequences per step over all ranks; default: micro_batch_size · dp."""
    rampup_batch_size: list[int] | None = option(None)
    """START INCREMENT SAMPLES: grow the batch from START by INCREMENT over SAMPLES samples."""
    step_batch_size_schedule: str | None = option(None)
    """FROM:SIZE ...: batch size SIZE from token FROM on, e.g. "0:384 200B:768"; global_batch_size is the last SIZE."""
    train_iters: int | None = option(None, at_least=1, basic=True)
    """Length of the run in steps."""
    train_samples: int | None = option(None, at_least=1)
    """Length of the run in samples, instead of train_iters."""
    seq_length: int = option(256, at_least=1, below=2**31, basic=True)
    """Tokens per sequence."""
    seq_length_warmup: list[int] | None = option(None)
    """START STEPS: train on the first START tokens of each sample, growing to the full sequence at step STEPS."""
    seed: int = option(1234, at_least=0, below=2**63)
    """Seed of initial weights, data order and dropout."""
    precision: str = option("fp32", choices=("fp32", "bf16", "fp16", "fp64"), basic=True)
    """Number format of parameters and activations; bf16 and fp16 keep fp32 main parameters and gradients."""
    loss: str = option("cross-entropy", choices=LOSSES)
    """Loss of a token, of which the run minimises the mean: cross-entropy, or one registered by --import."""
    loss_scale: float | None = option(None, above=0, below=2**64)
    """Fixed loss scale for fp16; default: dynamic."""
    initial_loss_scale: float = option(65536.0, above=0, below=2**64)
    """Initial dynamic loss scale."""
    min_loss_scale: float = option(1.0, above=0, below=2**64)
    """Smallest dynamic loss scale."""
    loss_scale_window: int = option(1000, at_least=1)
    """Steps without overflow before the loss scale doubles."""
    hysteresis: int = option(2, at_least=1)
    """Overflows before the loss scale halves."""
    recompute_granularity: str = option("none", choices=("none", "selective", "full"), basic=True)
    """Activation recomputation in the backward: none, recompute_modules (selective), or whole layers (full)."""
    recompute_modules: list[str] = option(["core_attn"])
    """selective: modules to recompute, of core_attn, mla_up_proj, mlp_act, layernorm, mlp, shared_experts, moe."""
    recompute_method: str = option("uniform", choices=("uniform", "block"))
    """full: recompute units of recompute_num_layers layers (uniform), or that many single layers per stage (block)."""
    recompute_num_layers: int = option(
        1, flags=("--checkpoint-num-layers", "--activations-checkpoint-num-layers"), at_least=1, below=MOST_LAYERS
    )
    """See recompute_method."""
    recompute_ahead: bool = option(False)
    """Full recompute ahead of the wait for the gradient: shorter bubble, one more microbatch of activations."""
    cpu_offloading_num_layers: int = option(0, at_least=0, below=MOST_LAYERS)
    """First layers of each stage that offload their saved activations to host memory."""
    fine_grained_activation_offloading: bool = option(False)
    """Offload only the activations of offload_modules; in all layers unless cpu_offloading_num_layers is set."""
    offload_modules: list[str] = option([])
    """fine_grained_activation_offloading: modules to offload, of attn_norm, qkv_linear, core_attn, attn_proj,
    mlp_norm, expert_fc1, mlp_act."""
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    """Device; auto: cuda if available."""
    imports: list[str] = option([], flags=("--import",), basic=True)
    """Your modules that register parts (docs/extend.md); e.g. my_package.my_module. May be repeated."""
    eval_interval: int | None = option(None, at_least=1, basic=True)
    """Steps between evaluations on the validation split; default: 1000 with valid_data_path and no dataset, else none."""
    eval_iters: int = option(10, at_least=0)
    """Global batches per evaluation; 0: no evaluation."""
    full_validation: bool = option(False)
    """Evaluate on each sample of the validation split once, instead of on eval_iters batches."""
    exit_interval: int | None = option(None, at_least=1)
    """Stop after a step divisible by this, and save if save or run_dir is set."""
    exit_duration_in_mins: float | None = option(None, above=0)
    """Stop (and save) after this many minutes, with exit status 75."""
    exit_file: str | None = option(None)
    """Stop (and save) when this file appears; default: <run_dir>/STOP."""
    exit_signals: list[str] = option(["SIGTERM", "SIGUSR1"], flags=("--exit-signal",))
    """Signals that stop (and save) the run with exit status 75: SIGTERM, SIGUSR1, SIGHUP."""
    exit_timeout_seconds: float = option(300.0, above=0)
    """Seconds that a signalled rank waits for the other ranks to agree before it exits without a checkpoint."""
    iterations_to_skip: list[int] = option([], at_least=1)
    """Steps that read their batch and update nothing; learning rate and weight decay do not advance."""
    check_for_nan_in_loss_and_grad: bool = option(True)
    """Act before the update if the loss or gradient norm is not finite."""
    on_non_finite: str = option("stop", choices=("stop", "skip"))
    """If the loss or gradient norm is not finite: stop the run, or skip the step."""
    moe_aux_loss_sequences: int = option(1, at_least=1)
    """Consecutive sequences that share a load-balancing loss; must divide micro_batch_size."""
    max_consecutive_skips: int = option(10, at_least=1)
    """Stop after this many skipped steps in a row."""

    @property
    def offloaded_layers(self) -> int:
        """Number of first layers per stage that offload activations."""
        return self.cpu_offloading_num_layers or (MOST_LAYERS if self.fine_grained_activation_offloading else 0)

    @property
    def offloaded_modules(self) -> frozenset[str] | None:
        """Modules that offload their activations in those layers; None: all."""
        return frozenset(self.offload_modules) if self.fine_grained_activation_offloading else None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: str | None = option(None, basic=True)
    """Folder or address (s3://bucket/run) for checkpoints; default: <run_dir>/checkpoints if save_interval is set."""
    save_interval: int | None = option(None, at_least=1, flags=("--persistent-save-interval",), basic=True)
    """Steps between checkpoints; the end of the run writes one too."""
    async_save: bool = option(False, basic=True)
    """Copy the state to host memory and write it while training continues."""
    keep_latest: int | None = option(None, at_least=1, basic=True)
    """Number of checkpoints to keep, once the newest verifies; default: all."""
    keep_every: int | None = option(None, at_least=1)
    """keep_latest: also keep checkpoints at multiples of this step."""
    on_save_error: str = option("stop", choices=("stop", "continue"))
    """If a checkpoint cannot be written: stop the run, or warn and continue."""
    check_weights_before_save: bool = option(True)
    """Stop the run if a tensor to be saved is not finite."""
    max_failures_at_step: int = option(3, at_least=0)
    """Refuse to start after this many failures in the same step; 0: never."""
    load: str | None = option(None, basic=True)
    """Folder or address to resume from, at the newest checkpoint that verifies; hf:FOLDER: start from a Hugging Face
    model."""
    ckpt_step: int | None = option(None, at_least=0)
    """Resume from this step instead of the newest."""
    fresh_if_missing: bool = option(False, basic=True)
    """Start from step 0 if load has no checkpoint."""
    finetune: bool = option(False)
    """Load only the weights: optimizer, step and data position start over."""
    load_optimizer: bool = option(True)
    """Load the optimizer states too; without them the step is still restored."""
    export_hf: str | None = option(None)
    """Hugging Face folder to write at the end; must be new or empty."""
    save_hf_interval: int | None = option(None, at_least=1)
    """Steps between Hugging Face folders <export_hf>-step-N during training, each with a checkpoint."""
    require_same_schedule: bool = option(False)
    """Refuse a checkpoint with a different learning-rate or weight-decay schedule."""


WRITERS: Registry[Callable[..., Any]] = Registry(
    "metrics",
    {
        "csv": "megalite.training.writers:csv_writer",
        "prometheus": "megalite.training.writers:Prometheus",
        "mlflow": "megalite.training.writers:MLflow",
        "comet": "megalite.training.writers:Comet",
        "wandb": "megalite.training.writers:Wandb",
    },
)
"""Factories of `training.records.MetricSink`, called with (config, step=) on rank 0; the run continues after step."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines, TensorBoard, JSONL, timers, profiler."""

    log_interval: int = option(10, at_least=1, basic=True)
    """Steps between log lines."""
    log_params_norm: bool = option(False)
    """Log the L2 norm of all weights."""
    log_num_zeros_in_grad: bool = option(False)
    """Log the number of gradient elements that are 0."""
    log_gradient_noise_scale: bool = option(False)
    """Log an estimate of the critical batch size, in samples."""
    run_dir: str | None = option(None, basic=True)
    """Folder for config.yaml, metrics.jsonl, sessions.json and tensorboard/; default: none."""
    tensorboard_dir: str | None = option(None)
    """TensorBoard folder; default: <run_dir>/tensorboard."""
    metrics: list[str] = option([])
    """Additional writers: csv, prometheus, mlflow, comet, wandb, or one registered by --import."""
    wandb_project: str | None = option(None)
    """Weights & Biases project; the key comes from WANDB_API_KEY or `wandb login`."""
    wandb_entity: str | None = option(None)
    """Weights & Biases team or user; default: the key's owner."""
    wandb_exp_name: str | None = option(None)
    """Weights & Biases run name; default: the name of run_dir."""
    timing_log_level: int = option(1, at_least=0, at_most=1)
    """1: time each phase of the step and detect slow ranks; 0: off."""
    log_phases: bool = option(False)
    """Add a log line with the time of each phase, and memory."""
    straggler_threshold: float = option(1.2, above=1)
    """Report ranks with forward and backward times above this multiple of their peers' median."""
    trace: bool = option(False)
    """Write the measured pipeline of trace_steps beside the simulated one."""
    trace_steps: list[int] = option([3], at_least=1)
    """Steps to trace, counted from this run's start."""
    loss_spike_threshold: float = option(10.0, at_least=0)
    """Warn if the loss exceeds the recent median by this many times its usual scatter; 0: never."""
    loss_spike_window: int = option(100, at_least=8)
    """Number of recent steps for loss_spike_threshold's median and scatter."""
    profile: bool = option(False)
    """Write torch.profiler traces and tables of some steps to <run_dir>/profile."""
    profile_step_start: int = option(10, at_least=2)
    """First step to profile, counted from this run's start."""
    profile_step_end: int = option(12, at_least=3)
    """Step before which profiling ends."""
    profile_ranks: list[int] = option([0], at_least=0)
    """Ranks to profile."""
    record_memory_history: bool = option(False)
    """CUDA: write all allocations if memory runs out."""
    peak_tflops: float | None = option(None, above=0)
    """Peak TFLOP/s of one device, for MFU; default: known for data-centre GPUs."""
