"""Rules of a run beside its numbers: hang limits, stops, reports, elastic starts."""

from pathlib import PurePath

from megalite.config.errors import Findings
from megalite.config.optimizer import ONEBIT_OPTIMIZERS
from megalite.config.rules.effect import refuse_idle, shown
from megalite.config.rules.files import save_folder
from megalite.config.run import RunConfig
from megalite.config.values import nearest


def check_hang_timeout(config: RunConfig, _: frozenset[str]) -> Findings:
    """Collectives must not fail, naming no rank, before the watch can say which one stands still."""
    p = config.parallel
    assert p.dp is not None
    hang, collective = p.hang_timeout_minutes, p.distributed_timeout_minutes
    saving, alone = p.hang_save_timeout_minutes, p.tp * p.pp * p.cp * p.dp == 1
    if hang is not None and not alone and hang >= collective:
        yield (
            f"hang_timeout_minutes {hang:g} is not below distributed_timeout_minutes {collective:g}: collectives would "
            f"fail before anyone could say which rank stands still; use --hang-timeout-minutes {0.8 * collective:g} or "
            f"--distributed-timeout-minutes {1.25 * hang:g}"
        )
    if saving is None:
        return
    if p.hang_timeout == 0:
        yield (f"hang_save_timeout_minutes {saving:g} has no effect with hang_timeout_minutes 0; remove one of them")
    if saving < p.hang_timeout:
        yield (
            f"hang_save_timeout_minutes {saving:g} is below hang_timeout_minutes {p.hang_timeout:g}, and is for what "
            f"may take longer; use --hang-save-timeout-minutes {p.hang_timeout:g} or "
            f"--hang-timeout-minutes {saving:g}"
        )
    if saving >= collective and not alone:
        yield (
            f"hang_save_timeout_minutes {saving:g} is not below distributed_timeout_minutes {collective:g}: collectives would "
            f"fail before anyone could say which rank stands still; use --hang-save-timeout-minutes {0.9 * collective:g} or "
            f"--distributed-timeout-minutes {saving / 0.9:g}"
        )


EXIT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP")
"""Those that may stop a run; SIGINT always does."""


def check_stops(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """What stops a run has somewhere to save, and policies for faults have an effect."""
    t = config.training
    for name in ("exit_duration_in_mins", "exit_file"):
        if getattr(t, name) is not None and config.checkpoint.save is None and config.logging.run_dir is None:
            yield (
                f"{shown(config, name)} would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1"
            )
    for name in t.exit_signals:
        if name not in EXIT_SIGNALS:
            yield (
                f"exit_signals cannot have {name}{nearest(name, EXIT_SIGNALS)} (any of {', '.join(EXIT_SIGNALS)}; Ctrl-C, "
                "SIGINT, always stops a run)"
            )
    yield _check_non_finite(config, explicit)
    if config.logging.loss_spike_threshold == 0:
        cause = "with loss_spike_threshold 0"
        remedy = "use --loss-spike-threshold 10"
        yield refuse_idle(config, explicit, ["loss_spike_window"], cause=cause, remedy=remedy)


def _check_non_finite(config: RunConfig, explicit: frozenset[str]) -> Findings:
    t = config.training
    if t.on_non_finite == "stop":
        if t.precision != "fp16" or t.loss_scale is not None:
            cause = "with on_non_finite stop"
            remedy = "use --on-non-finite skip"
            yield refuse_idle(config, explicit, ["max_consecutive_skips"], cause=cause, remedy=remedy)
        return
    if not t.check_for_nan_in_loss_and_grad:
        yield (
            "on_non_finite skip does not go with check_for_nan_in_loss_and_grad false, which lets such steps pass; keep "
            "one of them"
        )
    if config.parallel.dp_strategy == "async-parameter-server":
        yield (
            "on_non_finite skip does not go with dp_strategy async-parameter-server, where the server waits for a push in "
            "every step; use --on-non-finite stop"
        )


WRITERS = ("csv", "wandb")
"""What `metrics` can name beside metrics.jsonl and TensorBoard."""


def check_visibility(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """Settings of what is shown that need a folder, or one another."""
    yield _check_metrics(config, explicit)
    if config.logging.timing_log_level == 0:
        yield refuse_idle(
            config,
            explicit,
            ["straggler_threshold"],
            cause="with timing_log_level 0",
            remedy="use --timing-log-level 1",
        )
    yield _check_profile(config, explicit)
    yield _check_memory_history(config)


def _check_metrics(config: RunConfig, explicit: frozenset[str]) -> Findings:
    logging = config.logging
    for name in logging.metrics:
        if name not in WRITERS:
            yield f"metrics has {name!r} in it{nearest(name, WRITERS)}; each is one of {', '.join(WRITERS)}"
    if "csv" in logging.metrics and logging.run_dir is None:
        yield "metrics csv has no folder to write to; add --run-dir runs/mine"
    if "wandb" not in logging.metrics:
        names = ["wandb_project", "wandb_entity", "wandb_exp_name"]
        yield refuse_idle(config, explicit, names, cause="without metrics wandb", remedy="add --metrics wandb")
    elif logging.wandb_project is None:
        yield "metrics wandb needs a project to write to; add --wandb-project NAME"
    elif logging.wandb_exp_name is None and logging.run_dir is None:
        yield "metrics wandb needs a name for the run; add --wandb-exp-name NAME or --run-dir runs/NAME"


def _check_profile(config: RunConfig, explicit: frozenset[str]) -> Findings:
    logging, steps = config.logging, config.training.train_iters
    start, end = logging.profile_step_start, logging.profile_step_end
    if not logging.profile:
        names = ["profile_step_start", "profile_step_end", "profile_ranks"]
        yield refuse_idle(config, explicit, names, cause="without profile", remedy="add --profile")
        return
    if logging.run_dir is None:
        yield "profile has no folder to write to; add --run-dir runs/mine"
    if end <= start:
        yield (
            f"profile_step_start {start} and profile_step_end {end} leave no step to profile; use "
            f"--profile-step-end {start + 2}"
        )
    if steps is not None and end > steps + 1:
        remedy = f"--profile-step-start {min(start, steps)} --profile-step-end {steps + 1}"
        yield (
            f"profile_step_end {end} is beyond the last step: train_iters is {steps}; use "
            f"{remedy if steps > 1 else '--train-iters 12'}"
        )
    p = config.parallel
    world = p.tp * p.pp * p.cp * (p.dp or 1)
    missing = [rank for rank in logging.profile_ranks if rank >= world]
    if missing:
        yield (f"profile_ranks has {missing[0]} in it, but ranks go from 0 to {world - 1}; use --profile-ranks 0")


def _check_memory_history(config: RunConfig) -> Findings:
    if not config.logging.record_memory_history:
        return
    if config.training.device == "cpu":
        yield "record_memory_history has no effect with device cpu; use --device cuda or remove it"
    if config.logging.run_dir is None:
        yield "record_memory_history has no folder to write to; add --run-dir runs/mine"


STRATEGIES = ("all-reduce", "distributed-optimizer", "fully-sharded")
"""The strategies that the planner chooses among."""
_OF_ONE_LAYOUT = (
    *("pipeline_schedule_file", "pipeline_costs", "pipeline_memory_limit", "recompute_ahead"),
    *("recompute_method", "recompute_num_layers"),
)


def check_elastic(config: RunConfig, explicit: frozenset[str]) -> Findings:
    """An elastic run goes on from what it saves, and its numbers do not depend on how many ranks there are."""
    p, c, t = config.parallel, config.checkpoint, config.training
    if not p.elastic:
        remedy = "add --elastic"
        yield refuse_idle(config, explicit, ["elastic_cluster"], cause="without elastic", remedy=remedy)
        return
    if t.global_batch_size is None:
        yield (
            "elastic needs global_batch_size: by default it is micro_batch_size·dp, which depends on the ranks; add e.g. "
            "--global-batch-size 512"
        )
    if c.save_interval is None or c.load is None:
        missing = "save_interval" if c.save_interval is None else "load"
        yield (
            f"elastic needs {missing}: a run whose ranks change goes on from its last checkpoint; add --save-interval 100 "
            "--load FOLDER --fresh-if-missing"
        )
    save = save_folder(config)
    if save is not None and c.load is not None and PurePath(save) != PurePath(c.load):
        yield f"elastic goes on from what it saves, but load is {c.load} and save {save}; use --load {save}"
    for name in ("finetune", "ckpt_step"):
        value = getattr(c, name)
        if value not in (None, False):
            yield (
                f"elastic and {shown(config, name)} contradict: each restart would begin there again; remove one of them"
            )
    yield _check_numbers(config)
    for name in _OF_ONE_LAYOUT:
        if name in explicit:
            yield (f"elastic and {shown(config, name)} contradict: that is for one layout; remove one of them")
    if p.pipeline_schedule == "auto":
        yield (
            "elastic and pipeline_schedule auto contradict: that is built for one layout; use --pipeline-schedule 1f1b, or "
            "leave it out"
        )


def _check_numbers(config: RunConfig) -> Findings:
    p, d, o = config.parallel, config.data_parallel, config.optimizer
    depends = None
    if p.dp_strategy not in STRATEGIES:
        depends, remedy = f"dp_strategy {p.dp_strategy}", f"use one of {', '.join(STRATEGIES)}"
    elif d.grad_compression != "none":
        depends, remedy = f"grad_compression {d.grad_compression}", "use none"
    elif o.optimizer in ONEBIT_OPTIMIZERS:
        depends, remedy = f"optimizer {o.optimizer}", "use adam"
    if depends is not None:
        yield (
            f"elastic and {depends} contradict: its numbers, or what a rank has of its own, depend on the number of ranks; "
            f"{remedy}, or leave out --elastic"
        )
