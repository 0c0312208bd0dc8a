"""Creates, locks and checks the folder of a run's checkpoints, and refuses restarts that make no progress."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megalite.checkpoint.files import lock_folder, replace_durably
from megalite.checkpoint.folders import correct_latest, remove_unfinished
from megalite.config.describe import redact_text, sectioned
from megalite.config.errors import NO_PROGRESS, ConfigError, TakenError
from megalite.config.run import RunConfig, resumes, saves_at
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group
from megalite.training.records import last_records
from megalite.training.replica import Replica
from megalite.training.saving import Saver, destination_of, local_folder, newest_saved

if TYPE_CHECKING:
    from megalite.training.copies import Destination

FILE_NAME = "attempts.json"
_MOST = 300  # most characters of a recorded error


class RestartLoopError(ConfigError):
    """The same step has failed again and again."""

    exit_code = NO_PROGRESS


class Attempt(NamedTuple):
    """A start from the checkpoint of step `start` that failed in step `failed_in`, as far as known."""

    start: int
    failed_in: int
    error: str


class RestartGuard:
    """Refuses a start after `most` failures in the same step. Only rank 0 has one.

    Other settings, by their digest, start a new count."""

    def __init__(self, folder: Path, *, most: int, settings: str) -> None:
        self._path, self._most, self._settings = folder / FILE_NAME, most, settings
        self._start = 0
        self._failed: list[Attempt] = []

    @classmethod
    def of(cls, config: RunConfig) -> "RestartGuard | None":
        """Return the guard of a run; None if it saves nothing, or if max_failures_at_step is 0."""
        c = config.checkpoint
        if c.save is None or c.max_failures_at_step == 0:
            return None
        return cls(local_folder(config), most=c.max_failures_at_step, settings=settings_digest(config))

    def begin(self, start: int, run_dir: str | None) -> None:
        """Record a start from step `start`, or raise RestartLoopError. The metrics.jsonl in `run_dir` contains the last
        step of a killed start."""
        self._start = start
        self._failed = self._read(run_dir)
        last = self._failed[-self._most :]
        loops = len(last) == self._most and len({attempt.failed_in for attempt in last}) == 1
        self._write(running=not loops)
        if loops:
            errors = "\n".join(f"  {number}. {attempt.error}" for number, attempt in enumerate(last, start=1))
            raise RestartLoopError(
                f"step {last[0].failed_in} has failed in the last {len(last)} starts, and this one would continue from step "
                f"{start}: starting once more would change nothing\n{errors}\nFix the cause of the errors "
                "(other settings start a new count), continue from an older checkpoint with --ckpt-step, or remove "
                f"{self._path} to try again unchanged"
            )

    def failed(self, step: int, error: BaseException) -> None:
        """Record that this start ended with an error in `step`."""
        text = redact_text(f"{type(error).__name__}: {error}")[:_MOST]
        self._failed.append(Attempt(self._start, step, text))
        self._write(running=False)

    def left(self) -> None:
        """Record an end with unknown cause: a stop during a failure, or before the first step."""
        self._write(running=False)

    def ended(self) -> None:
        """Forget earlier failures after a regular end."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _read(self, run_dir: str | None) -> list[Attempt]:
        """Return the last failures in steps after the start; [] if the file is missing or damaged."""
        try:
            state = json.loads(self._path.read_text())
            if state["settings"] != self._settings:
                return []
            failed = [
                Attempt(int(one["start"]), int(one["failed_in"]), str(one["error"])[:_MOST]) for one in state["failed"]
            ]
            if state["running"] is not None:
                start = int(state["running"])
                reached = max((record["step"] for record in last_records(run_dir, "train")), default=0)
                no_error = "it left no error: killed, out of memory, or crashed"
                failed.append(Attempt(start, max(start, reached) + 1, no_error))
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
    """Return the SHA-256 of all settings except the logging section."""
    tree = {section: values for section, values in sectioned(config).items() if section != "logging"}
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def require_progress(guard: RestartGuard | None, start: int, run_dir: str | None, *, world: Group) -> None:
    """Begin rank 0's guard. Raises RestartLoopError on all ranks if it refuses the run.

    Collectives: a broadcast."""
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
    """Return whether `load` and `save` are the same folder or address, even if spelled differently."""
    load, save = config.checkpoint.load, config.checkpoint.save
    if not resumes(config) or load is None or save is None:
        return False
    destination = destination_of(config)
    return Path(load).resolve() == Path(save).resolve() if destination is None else destination.is_start(load)


def refuse_foreign_checkpoints(config: RunConfig, progress: Progress) -> None:
    """Raise ConfigError if `save` contains later checkpoints of another run, from which the next start would resume, or
    checkpoints of another run that `keep_latest` would remove.

    Later checkpoints in the folder from which the run has just resumed are damaged, or it would have loaded them."""
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
            f"{c.save} holds checkpoints up to step {newest} of another run, and keep_latest "
            f"{c.keep_latest} would remove them; give another --save, add --load {c.save} to continue from them, or leave "
            "out --keep-latest"
        )


class SaveFolder:
    """The folder of one run's checkpoints, which rank 0 locks during the run. Every rank raises the same errors. If
    `save` is an address, this is the local folder on rank 0's machine, and the address is claimed too (`upload`).

    Collectives: a gather and a broadcast over the world."""

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
                        self._take(local_folder(config))
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
                f"cannot write checkpoints to {folder}: it is a link to {folder.readlink()}, which does not exist"
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):  # fail now, not at the first save
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
        """Return a saver for the steps up to `total`, after checking that the folder has room."""
        saver = Saver(self._replica, tokenizer=tokenizer, log=self._log, destination=self._destination)
        if resumes_own(self._replica.config):
            saver.saved_at = self._progress.step
        first, config = self._progress.step + 1, self._replica.config
        if first <= total:
            saver.preflight([step for step in range(first, total + 1) if step == total or saves_at(config, step)])
        return saver

    def leave(self, error: BaseException | None, *, step: int, stopping: bool) -> None:
        """Release the folder at the end of the run, or after an error in `step`. `stopping`: the run was requested to
        stop, or could not begin."""
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
