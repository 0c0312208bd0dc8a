"""Rules about what a run shows: writers of metrics, timers, the profiler, the memory history."""

from megalite.config.errors import ConfigError
from megalite.config.rules.effect import refuse_idle
from megalite.config.run import RunConfig
from megalite.config.values import nearest

WRITERS = ("csv", "wandb")
"""What `metrics` can name beside metrics.jsonl and TensorBoard."""


def check_visibility(config: RunConfig, explicit: frozenset[str]) -> None:
    """Settings of what is shown that need a folder, or one another."""
    _check_metrics(config, explicit)
    if config.logging.timing_log_level == 0:
        refuse_idle(
            config,
            explicit,
            ["straggler_threshold"],
            cause="with timing_log_level 0",
            remedy="use --timing-log-level 1",
        )
    _check_profile(config, explicit)
    _check_memory_history(config)


def _check_metrics(config: RunConfig, explicit: frozenset[str]) -> None:
    logging = config.logging
    for name in logging.metrics:
        if name not in WRITERS:
            raise ConfigError(
                f"metrics has {name!r} in it{nearest(name, WRITERS)}; each is one of {', '.join(WRITERS)}"
            )
    if "csv" in logging.metrics and logging.run_dir is None:
        raise ConfigError("metrics csv has no folder to write to; add --run-dir runs/mine")
    if "wandb" not in logging.metrics:
        names = ["wandb_project", "wandb_entity", "wandb_exp_name"]
        refuse_idle(config, explicit, names, cause="without metrics wandb", remedy="add --metrics wandb")
    elif logging.wandb_project is None:
        raise ConfigError("metrics wandb needs a project to write to; add --wandb-project NAME")
    elif logging.wandb_exp_name is None and logging.run_dir is None:
        raise ConfigError(
            "metrics wandb needs a name for the run; add --wandb-exp-name NAME or --run-dir runs/NAME"
        )


def _check_profile(config: RunConfig, explicit: frozenset[str]) -> None:
    logging, steps = config.logging, config.training.train_iters
    start, end = logging.profile_step_start, logging.profile_step_end
    if not logging.profile:
        names = ["profile_step_start", "profile_step_end", "profile_ranks"]
        refuse_idle(config, explicit, names, cause="without profile", remedy="add --profile")
        return
    if logging.run_dir is None:
        raise ConfigError("profile has no folder to write to; add --run-dir runs/mine")
    if end <= start:
        raise ConfigError(
            f"profile_step_start {start} and profile_step_end {end} leave no step to profile; use "
            f"--profile-step-end {start + 2}"
        )
    if steps is not None and end > steps + 1:
        remedy = f"--profile-step-start {min(start, steps)} --profile-step-end {steps + 1}"
        raise ConfigError(
            f"profile_step_end {end} is beyond the last step: train_iters is {steps}; use "
            f"{remedy if steps > 1 else '--train-iters 12'}"
        )
    p = config.parallel
    world = p.tp * p.pp * p.cp * (p.dp or 1)
    missing = [rank for rank in logging.profile_ranks if rank >= world]
    if missing:
        raise ConfigError(
            f"profile_ranks has {missing[0]} in it, but ranks go from 0 to {world - 1}; use --profile-ranks 0"
        )


def _check_memory_history(config: RunConfig) -> None:
    if not config.logging.record_memory_history:
        return
    if config.training.device == "cpu":
        raise ConfigError(
            "record_memory_history has no effect with device cpu; use --device cuda or remove it"
        )
    if config.logging.run_dir is None:
        raise ConfigError("record_memory_history has no folder to write to; add --run-dir runs/mine")
