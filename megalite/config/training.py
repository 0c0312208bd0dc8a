"""The run: batch sizes, length, precision, recompute, evaluation."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How long, how much at a time, and in which number format."""

    micro_batch_size: int = option(1, basic=True)
    """Sequences in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = option(None, basic=True)
    """Sequences in one step over all ranks; default micro_batch_size · dp."""
    rampup_batch_size: list[int] | None = option(None)
    """START INCREMENT SAMPLES: grow the batch from START to global_batch_size by INCREMENT over SAMPLES samples."""
    train_iters: int | None = option(None, basic=True)
    """Length of the run in steps."""
    train_samples: int | None = option(None)
    """Length of the run in samples (instead of train_iters)."""
    seq_length: int = option(256, basic=True)
    """Tokens in one sequence."""
    seed: int = option(1234)
    """Initial weights, data order and dropout are pure functions of it."""
    precision: str = option("fp32", choices=("fp32", "bf16", "fp16", "fp64"), basic=True)
    """Parameters and activations; bf16 and fp16 keep fp32 main parameters and gradients; fp64 is for proofs."""
    loss_scale: float | None = option(None)
    """Fixed loss scale for fp16; default: dynamic."""
    initial_loss_scale: float = option(65536.0)
    """First dynamic loss scale."""
    min_loss_scale: float = option(1.0)
    """Lowest dynamic loss scale."""
    loss_scale_window: int = option(1000)
    """Good steps before the loss scale doubles."""
    hysteresis: int = option(2)
    """Overflows before the loss scale halves."""
    recompute_granularity: str = option("none", choices=("none", "selective", "full"), basic=True)
    """Activations recomputed in the backward: none, those of recompute_modules (selective), or whole layers (full)."""
    recompute_modules: list[str] = option(["core_attn"])
    """What selective recompute runs again: core_attn, mlp_act, layernorm, mlp, moe."""
    recompute_method: str = option("uniform", choices=("uniform", "block"))
    """Full recompute: every recompute_num_layers layers are one unit (uniform), or only that many layers of each stage
    are recomputed, one by one (block)."""
    recompute_num_layers: int = option(1)
    """See recompute_method."""
    recompute_ahead: bool = option(False)
    """Full recompute as an action of its own, before the wait for the gradient: shorter bubble, the activations of one
    more microbatch of a stage."""
    device: str = option("auto", choices=("auto", "cpu", "cuda"))
    """auto: cuda if there is one."""
    eval_interval: int | None = option(None, basic=True)
    """Steps between evaluations on the validation split; default: none."""
    eval_iters: int = option(10)
    """Global batches in one evaluation."""
    exit_interval: int | None = option(None)
    """Stop (and save) after a step divisible by this, as if the run had been interrupted."""
    exit_duration_in_mins: float | None = option(None)
    """Stop (and save) once the run has gone on for so many minutes, counted from its start; exit status 75."""
    exit_file: str | None = option(None)
    """Stop (and save) when this file appears; default <run_dir>/STOP."""
    exit_signals: list[str] = option(["SIGTERM", "SIGUSR1"], flags=("--exit-signal",))
    """Signals that stop (and save) the run with exit status 75: SIGTERM, SIGUSR1, SIGHUP."""
    exit_timeout_seconds: float = option(300.0)
    """A rank that has got a signal leaves without a checkpoint if the ranks have not agreed by then: one may be gone."""
    check_for_nan_in_loss_and_grad: bool = option(True)
    """Act before the update when the loss or the gradient norm is not finite (fp16's dynamic scale skips by itself)."""
    on_non_finite: str = option("stop", choices=("stop", "skip"))
    """A loss or gradient norm that is not finite stops the run, or the step is skipped and changes nothing."""
    max_consecutive_skips: int = option(10)
    """With on_non_finite skip: stop when more steps in a row would be skipped."""
