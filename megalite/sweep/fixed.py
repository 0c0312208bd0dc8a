"""What a sweep decides itself in every run: its length, and that it only trains."""

from collections.abc import Iterable
from typing import Any

from megalite.config.describe import replace, settings, values_of
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig

_WHY = {
    "train_iters": "the length of a run is steps",
    "train_samples": "the length of a run is steps",
    "exit_interval": "the length of a run is steps",
    "rampup_batch_size": "every step has the full batch",
    "eval_interval": "the runs of a sweep only train",
    "eval_iters": "the runs of a sweep only train",
    "test_data_path": "the runs of a sweep only train",
    "run_dir": "each run has a folder of its own",
    "tensorboard_dir": "each run has a folder of its own",
    "log_interval": "every step is written",
    "trace": "tracing takes time of its own",
    "trace_steps": "tracing takes time of its own",
    "profile": "profiling takes time of its own",
    "profile_step_start": "profiling takes time of its own",
    "profile_step_end": "profiling takes time of its own",
    "profile_ranks": "profiling takes time of its own",
    "record_memory_history": "noting allocations takes time of its own",
    "metrics": "the sweep reads metrics.jsonl alone",
    "wandb_project": "the sweep reads metrics.jsonl alone",
    "wandb_entity": "the sweep reads metrics.jsonl alone",
    "wandb_exp_name": "the sweep reads metrics.jsonl alone",
    "min_lr": "so short a run needs no schedule of the learning rate",
}


def _why(name: str) -> str | None:
    """Why the sweep itself decides a setting, or None."""
    if settings()[name].section == "checkpoint":
        return "the runs of a sweep neither load nor save"
    if name.startswith("lr_"):
        return _WHY["min_lr"]
    return _WHY.get(name)


def refuse_fixed(names: Iterable[str], where: str) -> None:
    """Raise ConfigError for the first setting that the sweep decides."""
    for name in names:
        why = _why(name)
        if why is not None:
            raise ConfigError(f"{where}: {name} cannot be set: {why}; remove it")


def fix(config: RunConfig, steps: int) -> tuple[RunConfig, frozenset[str]]:
    """The config as a sweep runs it, but for the run folder, and the settings that it no longer goes by."""
    plain = RunConfig()
    values: dict[str, Any] = values_of(plain)
    names = frozenset(name for name in settings() if _why(name) is not None)
    fixed = {name: values[name] for name in names} | {"train_iters": steps, "log_interval": 1}
    return replace(config, **fixed), names


def ignored(config: RunConfig) -> list[str]:
    """Settings of the base that no run of the sweep goes by, though they are not the default."""
    given, plain = values_of(config), values_of(RunConfig())
    return [name for name in settings() if _why(name) is not None and given[name] != plain[name]]
