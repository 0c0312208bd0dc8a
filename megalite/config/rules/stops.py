"""Rules about what ends a run early, and about faults that do or do not."""

from megalite.config.errors import ConfigError
from megalite.config.rules.effect import refuse_idle, shown
from megalite.config.run import RunConfig
from megalite.config.values import nearest

EXIT_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGHUP")
"""Those that may stop a run; SIGINT always does."""


def check_stops(config: RunConfig, explicit: frozenset[str]) -> None:
    """What stops a run has somewhere to save, and policies for faults have an effect.

    Raises:
        ConfigError: naming the setting, what it clashes with and a value that works.
    """
    t = config.training
    for name in ("exit_duration_in_mins", "exit_file"):
        if getattr(t, name) is not None and config.checkpoint.save is None and config.logging.run_dir is None:
            raise ConfigError(
                f"{shown(config, name)} would stop the run with nothing saved; add --save checkpoints or --run-dir runs/1"
            )
    for name in t.exit_signals:
        if name not in EXIT_SIGNALS:
            raise ConfigError(
                f"exit_signals cannot have {name}{nearest(name, EXIT_SIGNALS)} (any of {', '.join(EXIT_SIGNALS)}; Ctrl-C, "
                "SIGINT, always stops a run)"
            )
    _check_non_finite(config, explicit)
    if config.logging.loss_spike_threshold == 0:
        cause = "with loss_spike_threshold 0"
        remedy = "use --loss-spike-threshold 10"
        refuse_idle(config, explicit, ["loss_spike_window"], cause=cause, remedy=remedy)


def _check_non_finite(config: RunConfig, explicit: frozenset[str]) -> None:
    t = config.training
    if t.precision == "fp16" and t.loss_scale is None:
        cause = "with precision fp16 and a dynamic loss scale, which skips such steps by itself"
        names = ["on_non_finite", "max_consecutive_skips"]
        refuse_idle(config, explicit, names, cause=cause, remedy="use --precision bf16")
    if t.on_non_finite == "stop":
        cause = "with on_non_finite stop"
        remedy = "use --on-non-finite skip"
        refuse_idle(config, explicit, ["max_consecutive_skips"], cause=cause, remedy=remedy)
        return
    if not t.check_for_nan_in_loss_and_grad:
        raise ConfigError(
            "on_non_finite skip does not go with check_for_nan_in_loss_and_grad false, which lets such steps pass; keep "
            "one of them"
        )
    if config.parallel.dp_strategy == "async-parameter-server":
        raise ConfigError(
            "on_non_finite skip does not go with dp_strategy async-parameter-server, where the server waits for a push in "
            "every step; use --on-non-finite stop"
        )
