"""Saves checkpoints to an address (s3://bucket/run): writes each to a local folder, and uploads it, manifest last.

A checkpoint is complete once its manifest exists, so a run killed at any instant resumes from the newest complete one.
A killed upload leaves files without a manifest, which the next start removes. Each save has different file names, so a
step that is saved again remains the old one until the new manifest replaces the old.

Object stores have no locks. The run that saves there rewrites an owner object every few seconds, and another run is
refused while that object changes."""

import contextlib
import os
import platform
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import LATEST_NAME, step_name, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, listed_files
from megalite.checkpoint.save import same_error_on_all_ranks, steps_to_remove
from megalite.config.errors import CheckpointError, ConfigError, TakenError
from megalite.config.run import RunConfig
from megalite.data.remote import is_fetched, waiting_folder
from megalite.data.stores import StoreObject, redacted
from megalite.topology.group import Group

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
