"""The folder that a run saves to: made, locked, looked through, and with room; and everything that may forbid the start."""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.commit import correct_latest, remove_unfinished
from megalite.checkpoint.files import lock_folder
from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.training.checkpointing import refuse_foreign_checkpoints, same_folder
from megalite.training.replica import Replica
from megalite.training.restart_guard import RestartGuard, require_progress
from megalite.training.saving import Saver
from megalite.training.setup import make_save_folder
from megalite.training.stopping import StopRequests


@dataclass(frozen=True)
class SaveFolder:
    """What rank 0 holds of it while the run lasts; nothing on the others, and where nothing is saved."""

    lock: int | None
    guard: RestartGuard | None

    def release(self) -> None:
        """Another run may have it."""
        if self.lock is not None:
            with contextlib.suppress(OSError):
                os.close(self.lock)


def goes_on(config: RunConfig) -> bool:
    """The run has resumed from the folder that it saves to."""
    checkpoint = config.checkpoint
    return same_folder(checkpoint.load, checkpoint.save) and not checkpoint.finetune


def take_save_folder(
    replica: Replica, progress: Progress, *, stops: StopRequests, log: Callable[[str], None]
) -> SaveFolder:
    """Have the folder for this run alone.

    Collectives: a gather and a broadcast over the world.

    Raises:
        ConfigError: it cannot be written, another run has it, its checkpoints are another run's, or the exit file is there;
            the same on every rank.
        RestartLoopError: the same step has failed again and again.
    """
    config, topology = replica.config, replica.topology
    found: ConfigError | None = None
    lock: int | None = None
    guard: RestartGuard | None = None
    if topology.rank == 0:
        try:
            stops.refuse_old_file()
            make_save_folder(config)
            lock = _lock(config, log)
            refuse_foreign_checkpoints(config, progress)
            if goes_on(config) and progress.step > 0:
                correct_latest(Path(str(config.checkpoint.save)), progress.step)
            if config.checkpoint.save is not None:
                remove_unfinished(Path(config.checkpoint.save))
            guard = RestartGuard.of(config)
        except ConfigError as error:
            found = error
        except OSError as error:
            found = ConfigError(f"cannot write to {config.checkpoint.save}: {error.strerror}")
    topology.world.agree(found, topology.device)
    run_dir = config.logging.run_dir
    metrics = None if run_dir is None else Path(run_dir) / "metrics.jsonl"
    folder = SaveFolder(lock, guard)
    try:
        require_progress(guard, progress.step, metrics, world=topology.world, device=topology.device)
    except ConfigError:
        folder.release()
        raise
    return folder


def _lock(config: RunConfig, log: Callable[[str], None]) -> int | None:
    """Two runs that save into one folder would remove each other's unfinished files (rank 0)."""
    folder = config.checkpoint.save
    if folder is None:
        log("no checkpoint will be saved; --save-interval N with --run-dir (or --save) would save some")
        return None
    try:
        return lock_folder(Path(folder))
    except BlockingIOError:
        raise ConfigError(
            f"another run is saving into {folder}: wait for it, end it (also ranks that a killed launcher has left "
            "behind), or give another --save"
        ) from None


def make_saver(
    replica: Replica,
    progress: Progress,
    *,
    total: int,
    tokenizer: str | None,
    log: Callable[[str], None],
) -> Saver:
    """Ready to save; the folder has room.

    Args:
        total: the run's last step.
    """
    saver = Saver(replica, tokenizer=tokenizer, log=log)
    if goes_on(replica.config):
        saver.saved_at = progress.step
    first, every = progress.step + 1, replica.config.checkpoint.save_interval
    steps = [step for step in range(first, total + 1) if every and step % every == 0]
    if first <= total:
        saver.preflight(steps if steps[-1:] == [total] else [*steps, total])
    return saver
