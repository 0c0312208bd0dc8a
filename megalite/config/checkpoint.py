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
    load: str | None = option(None, basic=True)
    """Folder to resume from: the newest checkpoint in it that verifies."""
    ckpt_step: int | None = option(None)
    """Resume from this step rather than from the newest."""
    fresh_if_missing: bool = option(False, basic=True)
    """Start from step 0 if load holds no checkpoint; otherwise that is an error."""
    finetune: bool = option(False)
    """Load weights alone: optimizer, step and data position start afresh."""
