"""The folder that a run saves to: made, locked, checked, with room; and restarts that make no progress are refused."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megalite.checkpoint.commit import correct_latest, remove_unfinished
from megalite.checkpoint.files import lock_folder, replace_durably
from megalite.config.describe import redact_text, sectioned
from megalite.config.errors import ConfigError, TakenError
from megalite.config.exit_codes import NO_PROGRESS
from megalite.config.run import RunConfig, resumes, saves_at
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group
from megalite.training.replica import Replica
from megalite.training.saving import Saver, destination_of, folder_here, newest_saved
from megalite.training.sinks import last_records

if TYPE_CHECKING:
    from megalite.training.upload import Destination

FILE_NAME = "attempts.json"
_MOST = 300
"""Characters of an error that are kept."""


class RestartLoopError(ConfigError):
    """The same step has failed again and again."""

    exit_code = NO_PROGRESS


class Attempt(NamedTuple):
    """A start, from the checkpoint of a step, that failed in a later one, as far as is known."""

    start: int
    failed_in: int
    error: str


class RestartGuard:
    """Of one start; rank 0 alone has one. After `most` failures in the same step there is no further start.

    A run with other settings, by their digest, starts a new count.
    """

    def __init__(self, folder: Path, *, most: int, settings: str) -> None:
        self._path, self._most, self._settings = folder / FILE_NAME, most, settings
        self._start = 0
        self._failed: list[Attempt] = []

    @classmethod
    def of(cls, config: RunConfig) -> "RestartGuard | None":
        """None where nothing is saved, or max_failures_at_step is 0."""
        c = config.checkpoint
        if c.save is None or c.max_failures_at_step == 0:
            return None
        return cls(folder_here(config), most=c.max_failures_at_step, settings=settings_digest(config))

    def begin(self, start: int, run_dir: str | None) -> None:
        """The run continues from step `start`; the metrics.jsonl in `run_dir` says how far a start came that left no error."""
        self._start = start
        self._failed = self._read(run_dir)
        last = self._failed[-self._most :]
        loops = len(last) == self._most and len({attempt.failed_in for attempt in last}) == 1
        self._write(running=not loops)
        if loops:
            errors = "\n".join(f"  {number}. {attempt.error}" for number, attempt in enumerate(last, start=1))
            raise RestartLoopError(
                f"step {last[0].failed_in} has failed in the last {len(last)} starts, and this one would continue from step "
                f"{start}: starting once more would change nothing\n{errors}\nChange what the errors speak of "
                "(other settings start a new count), continue from an older checkpoint with --ckpt-step, or remove "
                f"{self._path} to try again as it is"
            )

    def failed(self, step: int, error: BaseException) -> None:
        """The start ends by an error in `step`."""
        text = redact_text(f"{type(error).__name__}: {error}")[:_MOST]
        self._failed.append(Attempt(self._start, step, text))
        self._write(running=False)

    def left(self) -> None:
        """It ends because it was asked to while it was failing, or before it did anything: the cause is unknown."""
        self._write(running=False)

    def ended(self) -> None:
        """It ends as it was meant to: what failed before is past."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self, run_dir: str | None) -> list[Attempt]:
        """The last failures in steps that are still to come; [] where nothing is known."""
        try:
            state = json.loads(self._path.read_text())
            if state["settings"] != self._settings:
                return []
            failed = [
                Attempt(int(one["start"]), int(one["failed_in"]), str(one["error"])[:_MOST]) for one in state["failed"]
            ]
            if state["running"] is not None:
                start = int(state["running"])
                came_to = max((record["step"] for record in last_records(run_dir, "train")), default=0)
                left_none = "it left no error: killed, out of memory, or crashed"
                failed.append(Attempt(start, max(start, came_to) + 1, left_none))
        except (OSError, ValueError, KeyError, TypeError):
            return []
        return [attempt for attempt in failed if attempt.failed_in > self._start][-self._most :]

    def _write(self, *, running: bool) -> None:
        state = {
            "settings": self._settings,
            "running": self._start if running else None,
            "failed": [attempt._asdict() for attempt in self._failed],
        }
        with contextlib.suppress(OSError):
            replace_durably(self._path, json.dumps(state, indent=1).encode() + b"\n")


def settings_digest(config: RunConfig) -> str:
    """Of all settings but those of the log."""
    tree = {section: values for section, values in sectioned(config).items() if section != "logging"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def require_progress(guard: RestartGuard | None, start: int, run_dir: str | None, *, world: Group) -> None:
    """Begin, and let all ranks hear of it if rank 0's guard refuses the run.

    Collectives: a broadcast.
    """
    refused: str | None = None
    if guard is not None:
        try:
            guard.begin(start, run_dir)
        except RestartLoopError as error:
            refused = str(error)
    refused = world.broadcast_json(refused)
    if refused is not None:
        raise RestartLoopError(refused)


def resumes_own(config: RunConfig) -> bool:
    """The run continues from the folder that it saves to, however the two are spelled."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if not resumes(config) or load is None or save is None:
        return False
    destination = destination_of(config)
    return Path(load).resolve() == Path(save).resolve() if destination is None else destination.is_start(load)


def refuse_foreign_checkpoints(config: RunConfig, progress: Progress) -> None:
    """A run must not save among later checkpoints of another one: the next resume would take those for its own.

    Later ones in the folder that the run has just resumed from are damaged, or they would have been taken. Nor may a
    run remove checkpoints that it has not made.
    """
    c, resumes = config.checkpoint, resumes_own(config)
    if c.save is None or (resumes and c.ckpt_step is None):
        return
    newest = newest_saved(config)
    if newest is None:
        return
    if newest > progress.step:
        raise ConfigError(
            f"{c.save} holds checkpoints up to step {newest} but this run starts at step {progress.step}; "
            f"{'leave out --ckpt-step' if resumes else f'add --load {c.save}'} to continue from the newest, or give another --save"
        )
    if c.keep_latest is not None and not resumes:
        raise ConfigError(
            f"{c.save} holds checkpoints up to step {newest} that this run has not made, and keep_latest "
            f"{c.keep_latest} would remove them; give another --save, add --load {c.save} to continue from them, or leave "
            "out --keep-latest"
        )


class SaveFolder:
    """The folder, for this run alone. Rank 0 locks and guards it while the run lasts. Every rank gets the same errors.
    Of an address it is the one on rank 0's machine, and the address is taken as far as a store allows (`upload`).

    Collectives: a gather and a broadcast over the world.
    """

    def __init__(self, replica: Replica, progress: Progress, *, log: Callable[[str], None]) -> None:
        self._replica, self._progress, self._log = replica, progress, log
        self._lock: int | None = None
        self._guard: RestartGuard | None = None
        self._destination: Destination | None = None
        config, topology = replica.config, replica.topology
        try:
            with topology.world.errors_on_all_ranks():
                try:
                    self._destination = destination_of(config)
                    if self._destination is not None:
                        self._destination.probe(topology.rank)
                    if topology.rank == 0:
                        self._take(folder_here(config))
                except OSError as error:
                    raise ConfigError(f"cannot write to {config.checkpoint.save}: {error.strerror}") from None
            require_progress(self._guard, progress.step, config.logging.run_dir, world=topology.world)
        except ConfigError:
            self._release()
            raise

    def _take(self, folder: Path) -> None:
        config = self._replica.config
        if folder.is_symlink() and not folder.exists():
            raise ConfigError(
                f"cannot write checkpoints to {folder}: it is a link to {folder.readlink()}, which is not there"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # rather than find out at the first save
                pass
        except OSError as error:
            raise ConfigError(
                f"cannot write checkpoints to {folder}: {error.strerror}; give a folder that can be written with "
                f"{'--save' if self._destination is None else '--data-cache-path'}"
            ) from None
        try:
            self._lock = lock_folder(folder)
        except BlockingIOError:
            raise TakenError(
                f"another run is saving into {folder}: wait for it, end it (also ranks that a killed launcher has left "
                "behind), or give another --save"
            ) from None
        if self._destination is not None:
            self._destination.take(self._log)
        refuse_foreign_checkpoints(config, self._progress)
        if self._destination is not None:
            self._destination.remove_unfinished()
        elif resumes_own(config) and self._progress.step > 0:
            correct_latest(folder, self._progress.step)
        remove_unfinished(folder)
        self._guard = RestartGuard.of(config)

    def make_saver(self, *, total: int, tokenizer: str | None) -> Saver:
        """Ready to save up to the run's last step, `total`; the folder has room."""
        saver = Saver(self._replica, tokenizer=tokenizer, log=self._log, destination=self._destination)
        if resumes_own(self._replica.config):
            saver.saved_at = self._progress.step
        first, config = self._progress.step + 1, self._replica.config
        if first <= total:
            saver.preflight([step for step in range(first, total + 1) if step == total or saves_at(config, step)])
        return saver

    def leave(self, error: BaseException | None, *, step: int, stopping: bool) -> None:
        """The run is over, or fails in `step`; `stopping`: it was asked to stop, or could not begin. Another one may have the
        folder."""
        try:
            if self._guard is not None and error is None:
                self._guard.ended()
            elif self._guard is not None and isinstance(error, Exception):
                if stopping:
                    self._guard.left()
                else:
                    self._guard.failed(step, error)
        finally:
            self._release()

    def _release(self) -> None:
        if self._destination is not None:
            self._destination.leave()
        if self._lock is not None:
            with contextlib.suppress(OSError):
                os.close(self._lock)
