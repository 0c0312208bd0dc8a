"""Copies of a run's checkpoints at other places: uploads to an address (s3://bucket/run), exports to Hugging Face folders.

A run that saves to an address writes each checkpoint to a local folder and uploads it, manifest last. It is complete once
its manifest exists, so a run killed at any instant resumes from the newest complete one. A killed upload leaves files
without a manifest, which the next start removes. Each save has different file names, so a step that is saved again remains
the old one until the new manifest replaces the old. Object stores have no locks. The run that saves there rewrites an owner
object every few seconds, and another run is refused while that object changes.

Exports are made on rank 0. No other rank waits, and there are no collectives: a thread writes a folder during training, and
the last folder is written after the process groups are closed. So neither a slow disk nor a failed export delays or ends the
run."""

import contextlib
import dataclasses
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from megalite.checkpoint.files import read_text, run_in_daemon
from megalite.checkpoint.folders import LATEST_NAME, step_name, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, listed_files
from megalite.checkpoint.save import same_error_on_all_ranks, steps_to_remove
from megalite.config.errors import NOT_SAVED, CheckpointError, ConfigError, TakenError
from megalite.config.registry import imported
from megalite.config.run import RunConfig
from megalite.data.remote import is_fetched, waiting_folder
from megalite.data.stores import StoreObject, redacted
from megalite.optimizers.schedules import Progress
from megalite.topology.group import Group
from megalite.training.replica import Replica
from megalite.training.stopping import Ending, StopRequests, StopRun

_OWNER = ".owner"
_BEAT_SECONDS = 5.0  # interval between writes of the owner object
_CHECKS = 4  # after this number of checks without a change the other run has ended


class Destination:
    """The address to which a run saves, on each rank."""

    def __init__(self, config: RunConfig) -> None:
        assert config.checkpoint.save is not None
        self._config = config
        self._run = StoreObject(config.checkpoint.save.rstrip("/"))
        self.name = redacted(config.checkpoint.save.rstrip("/"))
        self.folder = waiting_folder(config)
        """Local folder of checkpoints until their upload."""
        self.host = platform.node()
        self._owner, self._beats = self._run.below(_OWNER), 0
        self._me = f"{secrets.token_hex(8)} process {os.getpid()} on {self.host}"
        self._leaving, self._beating = threading.Event(), threading.Thread(target=self._beat, daemon=True)

    def take(self, log: Callable[[str], None]) -> None:
        """Claim the address until `leave` (rank 0). Raises TakenError if another run is saving there."""
        if found := self._owner.content():
            seconds = _CHECKS * _BEAT_SECONDS
            log(f"the last run that saved to {self.name} has not left it: checking for {seconds:.0f} s if it is alive")
        for _ in range(_CHECKS if found else 0):
            time.sleep(_BEAT_SECONDS)
            if (now := self._owner.content()) not in (found, None):
                raise TakenError(
                    f"another run is saving to {self.name} ({_who(now)}): wait for it, end it, or give another --save"
                )
        self._write_beat()
        self._beating.start()

    def _write_beat(self) -> None:
        self._beats += 1
        self._owner.write(f"{self._me} beat {self._beats}\n".encode())

    def _beat(self) -> None:
        while not self._leaving.wait(_BEAT_SECONDS):
            with contextlib.suppress(ConfigError):
                self._require_owned()
                self._write_beat()

    def _require_owned(self) -> None:
        """Raise ConfigError if another run has claimed the address while this one could not reach it."""
        if not (now := self._owner.content() or self._me.encode()).startswith(self._me.encode()):
            raise ConfigError(f"another run has begun to save there ({_who(now)}); end one of the two")

    def leave(self) -> None:
        """Release the address."""
        if self._beating.is_alive():
            self._leaving.set()
            self._beating.join()
            with contextlib.suppress(ConfigError):
                self._require_owned()
                self._owner.remove()

    def probe(self, rank: int) -> None:
        """Raise ConfigError unless this rank can write to the address and remove from it."""
        probe = self._run.below(f".probe-{rank:05d}")
        try:
            probe.write(b"megalite", patient=False)
            probe.remove()
        except ConfigError as error:
            raise ConfigError(
                f"cannot save checkpoints to {self.name}: {error}; check that the store is reachable and that you may "
                "write and remove there, or give another --save"
            ) from None

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint there, or None."""
        return next(self._run.steps(), None)

    def is_start(self, load: str) -> bool:
        """Return whether the path contains a checkpoint fetched from this address."""
        return is_fetched(load, self._config)

    def remove_unfinished(self) -> None:
        """Remove what interrupted uploads and removals have left (rank 0)."""
        complete = set(self._run.steps())
        for step in {step for name in self._run.entries() if (step := step_of(name)) is not None} - complete:
            self._remove(step)

    def upload(self, path: Path, *, world: Group, log: Callable[[str], None]) -> str:
        """Upload the finished checkpoint in the folder `path`, each rank its own files, and remove the folder. Then
        remove old checkpoints as `keep_latest` says. Returns the checkpoint's address.

        Raises CheckpointError, the same on every rank, if the store fails repeatedly; then `path` remains.
        Collectives: two `gather_json` over `world`."""
        step = step_of(path.name)
        assert step is not None
        remote = self._run.below(path.name)

        def send() -> None:
            for file in sorted(path.glob(f"*-{world.rank:05d}-*.safetensors")):
                remote.below(file.name).write(file, beat=world.heartbeat.beat)

        def commit() -> None:
            text, sizes = read_text(path / MANIFEST_NAME), remote.entries()
            listed = listed_files(text)
            for name, entry in listed.items():
                if sizes.get(name) != entry.length:
                    raise ConfigError(
                        f"{self.name}/{path.name}/{name} has {sizes.get(name)} bytes there, not {entry.length}"
                    )
            if self._beats:
                self._require_owned()
            remote.below(MANIFEST_NAME).write(text.encode())
            try:
                for former in sizes.keys() - listed.keys() - {MANIFEST_NAME}:
                    remote.below(former).remove()
                self._run.below(LATEST_NAME).write(f"{path.name}\n".encode())
                self._prune(step)
            except ConfigError as error:
                log(f"warning: {self.name}/{path.name} is saved, but {error}")

        for work, takes_part in ((send, True), (commit, world.rank == 0)):
            with same_error_on_all_ranks(world):
                try:
                    if takes_part:
                        work()
                except ConfigError as error:
                    message = f"cannot save a checkpoint in {self.name}: {error}; it is kept in {path}"
                    raise CheckpointError(message) from None
        with contextlib.suppress(OSError):  # other ranks of this machine remove the same files
            for one in list(self.folder.iterdir()):
                if step_of(one.name) is not None:
                    shutil.rmtree(one, ignore_errors=True)
            (self.folder / LATEST_NAME).unlink()
        return f"{self.name}/{path.name}"

    def _prune(self, newest: int) -> None:
        c = self._config.checkpoint
        if c.keep_latest is not None:
            steps = self._run.steps()
            for step in steps_to_remove(steps, newest, keep_latest=c.keep_latest, keep_every=c.keep_every):
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Remove a checkpoint, its manifest first, so that a partly removed one is not complete."""
        checkpoint = self._run.below(step_name(step))
        checkpoint.below(MANIFEST_NAME).remove()
        checkpoint.remove()


def _who(owner: bytes | None) -> str:
    """Return the process and host in an owner object, for messages."""
    return (owner or b"").decode(errors="replace").partition(" ")[2].strip()[:100]


_PATIENCE = 5.0  # seconds that a run which ends early waits for the thread


def check_export(config: RunConfig) -> None:
    """Raise ConfigError if no Hugging Face family implements this model. `vocab_size` must be set."""
    choose_family = imported("megalite.conversion.huggingface.choose:choose_family")
    choose_family(config.model, config.training.seq_length, None)


class Exporter:
    """Exports the checkpoints of one start of a run; does nothing on ranks other than 0. `total`: the run's last step.

    Collectives: `Group.raise_on_all_ranks` in the constructor."""

    def __init__(
        self, replica: Replica, progress: Progress, *, total: int, stops: StopRequests, log: Callable[[str], None]
    ) -> None:
        c, topology = replica.config.checkpoint, replica.topology
        assert c.export_hf is not None and c.save is not None
        self._target, self._checkpoints, self._every = Path(c.export_hf), Path(c.save), c.save_hf_interval
        self._total, self._stops, self._log = total, stops, log
        self._ema = replica.config.optimizer.eval_ema
        self._is_rank_0 = topology.rank == 0
        self._running: tuple[int, float, Future[Path]] | None = None
        self._given_up = False
        self.held: set[int] = set()
        """Steps of checkpoints that an export is reading; they must not be removed."""
        with topology.world.errors_on_all_ranks():
            if self._is_rank_0 and progress.step < total:
                imported("megalite.conversion.output:check_target")(self._target)
        if progress.step > 0:
            self.saved(progress.step)  # the previous start may have been killed during this export

    def saved(self, step: int) -> None:
        """Start an export if the complete checkpoint of this step is due for one."""
        self.poll()
        if not self._is_rank_0 or not self._every or step % self._every or step >= self._total:
            return
        target = self._target.with_name(f"{self._target.name}-{step_name(step)}")
        if _is_taken(target):
            self._log(f"{target} exists already")
        elif self._running is not None:
            self._log(f"warning: step {self._running[0]} is still being exported; {self._by_hand(step, target)}")
        elif (self._checkpoints / step_name(step)).is_dir():
            self.held.add(step)
            work = run_in_daemon(lambda: self._write(step, target, self._advance), "export")
            self._running = step, time.monotonic(), work

    def poll(self) -> None:
        """Log the outcome of the export in the background once it has ended."""
        if self._running is not None and self._running[2].done():
            (step, started, work), self._running = self._running, None
            self.held.discard(step)
            try:
                self._log(f"exported {work.result()} in {time.monotonic() - started:.1f} s")
            except Exception as error:
                target = self._target.with_name(f"{self._target.name}-{step_name(step)}")
                self._log(f"warning: {_describe(error)}; training continues. {self._by_hand(step, target)}")

    def finish(self, ending: Ending) -> Ending:
        """Write the last folder if the run finished. Call it after the process groups are closed. Returns the ending;
        on rank 0 it contains the error of a failed export."""
        if not self._is_rank_0 or ending.status != "finished" or ending.step is None:
            self.give_up()
            return ending
        try:
            while self._running is not None:
                self._stop_if_asked(0)
                time.sleep(0.05)
                self.poll()
            if _is_taken(self._target):
                self._log(f"{self._target} exists already")
                return ending
            started = time.monotonic()
            path = self._write(ending.step, self._target, self._stop_if_asked)
            self._log(f"exported {path} in {time.monotonic() - started:.1f} s")
        except StopRun as stop:
            self._stops.leave()
            self.give_up()
            return stop.request.ending(ending.step, "the export is not complete: the same command continues it")
        except Exception as error:
            message = f"{_describe(error)}; {self._by_hand(ending.step, self._target)}"
            self._log(f"error: {message}")
            return dataclasses.replace(ending, reason=f"{ending.reason}; {message}", exit_code=NOT_SAVED)
        return ending

    def give_up(self) -> None:
        """Cancel the export in the background; a later export to the same folder reuses its finished files."""
        self._given_up, end = True, time.monotonic() + _PATIENCE
        while self._running is not None and not self._running[2].done() and time.monotonic() < end:
            time.sleep(0.01)

    def _write(self, step: int, target: Path, advance: Callable[[int], None]) -> Path:
        export = imported("megalite.conversion.huggingface.weights:export_checkpoint")
        return export(self._checkpoints, step, target, advance, self._log, self._ema)

    def _advance(self, count: int) -> None:
        if self._given_up:
            raise ConfigError("the run ends before it is written")

    def _stop_if_asked(self, count: int) -> None:
        if (request := self._stops.request) is not None:
            raise StopRun(request)

    def _by_hand(self, step: int, target: Path) -> str:
        weights = " --weights ema" if self._ema else ""
        return f"megalite convert {self._checkpoints} {target} --to huggingface --step {step}{weights} makes it"


def _is_taken(target: Path) -> bool:
    try:
        return target.exists() and not (target.is_dir() and not any(target.iterdir()))
    except OSError:  # writing there reports it
        return False


def _describe(error: Exception) -> str:
    return f"cannot export: {error}" if isinstance(error, (ConfigError, OSError)) else f"cannot export: {error!r}"
