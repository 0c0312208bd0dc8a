"""Saving and resuming."""

from dataclasses import dataclass

from megalite.config.option import option


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where checkpoints are written and which one a run starts from."""

    save: str | None = option(None, basic=True)
    """Folder for checkpoints; default <run_dir>/checkpoints if save_interval is set."""
    save_interval: int | None = option(None, basic=True)
    """Steps between checkpoints; one is also written at the end."""
    async_save: bool = option(False, basic=True)
    """Copy the state to host memory and write it from there while training goes on."""
    keep_latest: int | None = option(None, basic=True)
    """Remove older checkpoints than this many, once the newest has been read back and verifies; default: keep all."""
    keep_every: int | None = option(None)
    """With keep_latest: keep those whose step is a multiple of this for ever."""
    on_save_error: str = option("stop", choices=("stop", "continue"))
    """If a checkpoint cannot be written (disk full, ...): stop the run, or say so and go on to the next one."""
    check_weights_before_save: bool = option(True)
    """Look through all that is about to be saved, and stop the run if anything in it is not finite."""
    max_failures_at_step: int = option(3)
    """Refuse to start once the run has failed that often in the same step with nothing saved in between; 0: never."""
    load: str | None = option(None, basic=True)
    """Folder to resume from: the newest checkpoint in it that verifies."""
    ckpt_step: int | None = option(None)
    """Resume from this step rather than from the newest."""
    fresh_if_missing: bool = option(False, basic=True)
    """Start from step 0 if load holds no checkpoint; otherwise that is an error."""
    finetune: bool = option(False)
    """Load weights alone: optimizer, step and data position start afresh."""
