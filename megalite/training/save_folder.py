"""The folder that a run saves to: made, locked, checked, with room; and restarts that make no progress are refused."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.commit import correct_latest, remove_unfinished
from megalite.checkpoint.files import lock_folder, replace_durably
from megalite.config.describe import redact_text, sectioned
from megalite.config.errors import ConfigError
from megalite.config.exit_codes import NO_PROGRESS
from megalite.config.run import RunConfig
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group
from megalite.training.replica import Replica
from megalite.training.resume import refuse_foreign_checkpoints, same_folder
from megalite.training.saving import Saver
from megalite.training.setup import make_save_folder
from megalite.training.sinks import last_record
from megalite.training.stopping import StopRequests

FILE_NAME = "attempts.json"
_UNTOLD = "it left no error: killed, out of memory, or crashed"
_MOST = 300
"""Characters of an error that are kept."""


class RestartLoopError(ConfigError):
    """The same step has failed again and again."""

    exit_code = NO_PROGRESS


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """A start that failed."""

    start: int
    """Step of the checkpoint that it went on from."""
    failed_in: int
    """The step that it did not bring to its end, as far as is known."""
    error: str


class RestartGuard:
    """Of one start; rank 0 alone has one.

    Args:
        folder: of checkpoints.
        most: failures in the same step after which there is no further start; 0: any number.
        settings: digest of the settings: a run with others is another attempt, and counts anew.
    """

    def __init__(self, folder: Path, *, most: int, settings: str) -> None:
        self._path, self._most, self._settings = folder / FILE_NAME, most, settings
        self._start = 0
        self._failed: list[Attempt] = []

    @classmethod
    def of(cls, config: RunConfig) -> "RestartGuard | None":
        """None where nothing is saved, or nobody wants it."""
        most = config.checkpoint.max_failures_at_step
        if config.checkpoint.save is None or most == 0:
            return None
        return cls(Path(config.checkpoint.save), most=most, settings=settings_digest(config))

    def begin(self, start: int, metrics: Path | None) -> None:
        """The run goes on from step `start`.

        Args:
            metrics: `metrics.jsonl` as the start before has left it: it says how far one came that left no error.

        Raises:
            RestartLoopError: the last `most` starts failed in one step, which is still to come.
        """
        self._start = start
        self._failed = self._read(metrics)
        last = self._failed[-self._most :]
        if len(last) == self._most and len({attempt.failed_in for attempt in last}) == 1:
            self._write(running=False)
            raise RestartLoopError(self._diagnosis(last))
        self._write(running=True)

    def failed(self, step: int, error: BaseException) -> None:
        """The start ends by an error in `step`."""
        text = redact_text(f"{type(error).__name__}: {error}")[:_MOST]
        self._failed.append(Attempt(start=self._start, failed_in=step, error=text))
        self._write(running=False)

    def left(self) -> None:
        """It ends because it was asked to while it was failing, or before it did anything: nobody can say why."""
        self._write(running=False)

    def ended(self) -> None:
        """It ends as it was meant to: what failed before is past."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _diagnosis(self, last: list[Attempt]) -> str:
        step = last[0].failed_in
        errors = [f"  {number}. {attempt.error}" for number, attempt in enumerate(last, start=1)]
        return "\n".join(
            [
                f"step {step} has failed in the last {len(last)} starts, and this one would go on from step {self._start}: "
                "starting once more would change nothing",
                *errors,
                "Change what the errors speak of (other settings count anew), go on from an older checkpoint with "
                f"--ckpt-step, or remove {self._path} to try again as it is",
            ]
        )

    def _read(self, metrics: Path | None) -> list[Attempt]:
        """The last failures in steps that are still to come; [] where nothing is known."""
        try:
            state = json.loads(self._path.read_text())
            if state["settings"] != self._settings:
                return []
            failed = [_attempt(one) for one in state["failed"]]
            if state["running"] is not None:
                start = int(state["running"])
                came_to = start if metrics is None else max(start, last_record(metrics))
                failed.append(Attempt(start=start, failed_in=came_to + 1, error=_UNTOLD))
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [attempt for attempt in failed if attempt.failed_in > self._start][-self._most :]

    def _write(self, *, running: bool) -> None:
        state = {
            "settings": self._settings,
            "running": self._start if running else None,
            "failed": [asdict(attempt) for attempt in self._failed],
        }
        with contextlib.suppress(OSError):
            replace_durably(self._path, json.dumps(state, indent=1).encode() + b"\n")


def _attempt(state: Mapping[str, Any]) -> Attempt:
    return Attempt(start=int(state["start"]), failed_in=int(state["failed_in"]), error=str(state["error"])[:_MOST])


def settings_digest(config: RunConfig) -> str:
    """Of all settings but those of the log."""
    tree = {section: values for section, values in sectioned(config).items() if section != "logging"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def require_progress(
    guard: RestartGuard | None, start: int, metrics: Path | None, *, world: Group, device: torch.device
) -> None:
    """Begin, and let all ranks hear of it if the run is not to.

    Args:
        guard: rank 0's; None on the others.

    Collectives: a broadcast.

    Raises:
        RestartLoopError: the same on every rank.
    """
    refused: str | None = None
    if guard is not None:
        try:
            guard.begin(start, metrics)
        except RestartLoopError as error:
            refused = str(error)
    told = world.broadcast_json(refused, device)
    if told is not None:
        raise RestartLoopError(told)


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
    replica: Replica, progress: Progress, *, total: int, tokenizer: str | None, log: Callable[[str], None]
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
