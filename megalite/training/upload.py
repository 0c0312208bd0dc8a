"""Checkpoints at an address (s3://bucket/run): each is finished in a folder of this machine and uploaded, its manifest last.

So a checkpoint is there from the moment its manifest is, and a run killed at any instant resumes from the newest such one. What
a killed upload leaves has no manifest; the next start of the run removes it. Files of each save have other names: a step that is
saved again is the old one until the new manifest replaces the old.

A store locks nothing. The run that saves there keeps an object that says so, and writes it again every few seconds; a start
that sees it change is refused.
"""

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
from megalite.checkpoint.save import errors_as_one, superfluous
from megalite.config.errors import CheckpointError, ConfigError, TakenError
from megalite.config.run import RunConfig
from megalite.data.remote import is_fetched, waiting_folder
from megalite.data.stores import StoreObject, shown
from megalite.topology.group import Group

_OWNER = ".owner"
_BEAT_SECONDS = 5.0  # between two writes of the object of that name
_LOOKS = 4  # so many times as far apart without a change: its run is gone


class Destination:
    """The address that a run saves to; each rank has one."""

    def __init__(self, config: RunConfig) -> None:
        assert config.checkpoint.save is not None
        self._config = config
        self._run = StoreObject(config.checkpoint.save.rstrip("/"))
        self.name = shown(config.checkpoint.save.rstrip("/"))
        self.folder = waiting_folder(config)
        """On this machine, where checkpoints are written and wait."""
        self.host = platform.node()
        self._owner, self._beats = self._run.below(_OWNER), 0
        self._me = f"{secrets.token_hex(8)} process {os.getpid()} on {self.host}"
        self._leaving, self._beating = threading.Event(), threading.Thread(target=self._beat, daemon=True)

    def take(self, log: Callable[[str], None]) -> None:
        """Be the run that saves there, until `leave` (rank 0). Raises TakenError: another one lives."""
        if found := self._owner.content():
            seconds = _LOOKS * _BEAT_SECONDS
            log(
                f"the last run that saved to {self.name} has not left it: watching for {seconds:.0f} s whether it lives"
            )
        for _ in range(_LOOKS if found else 0):
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
        """Raise ConfigError: another run has taken the address, as may be where this one has not reached it for a while."""
        if not (now := self._owner.content() or self._me.encode()).startswith(self._me.encode()):
            raise ConfigError(f"another run has begun to save there ({_who(now)}); end one of the two")

    def leave(self) -> None:
        """Another run may have the address."""
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
                f"cannot save checkpoints to {self.name}: {error}; see that the store answers and that you may write and remove "
                "there, or give another --save"
            ) from None

    def newest(self) -> int | None:
        """The step of the newest complete checkpoint there."""
        return next(self._run.steps(), None)

    def is_start(self, load: str) -> bool:
        """The path holds what was fetched from the address."""
        return is_fetched(load, self._config)

    def remove_unfinished(self) -> None:
        """Give back the room that uploads and removals cut short have taken (rank 0)."""
        complete = set(self._run.steps())
        for step in {step for name in self._run.entries() if (step := step_of(name)) is not None} - complete:
            self._remove(step)

    def upload(self, path: Path, *, world: Group, log: Callable[[str], None]) -> str:
        """Bring the finished checkpoint in the folder `path` to the address, each rank its own files, and remove it here;
        there, what keep_latest does not keep. Returns its address.

        Raises CheckpointError, the same on every rank: the store has failed again and again; `path` is kept. Collectives:
        two `gather_json` over `world`."""
        step = step_of(path.name)
        assert step is not None
        there = self._run.below(path.name)

        def send() -> None:
            for file in sorted(path.glob(f"*-{world.rank:05d}-*.safetensors")):
                there.below(file.name).write(file, beat=world.heartbeat.beat)

        def commit() -> None:
            text, sizes = read_text(path / MANIFEST_NAME), there.entries()
            listed = listed_files(text)
            for name, entry in listed.items():
                if sizes.get(name) != entry.length:
                    raise ConfigError(
                        f"{self.name}/{path.name}/{name} has {sizes.get(name)} bytes there, not {entry.length}"
                    )
            if self._beats:
                self._require_owned()
            there.below(MANIFEST_NAME).write(text.encode())
            try:
                for former in sizes.keys() - listed.keys() - {MANIFEST_NAME}:
                    there.below(former).remove()
                self._run.below(LATEST_NAME).write(f"{path.name}\n".encode())
                self._prune(step)
            except ConfigError as error:
                log(f"warning: {self.name}/{path.name} is saved, but {error}")

        for work, takes_part in ((send, True), (commit, world.rank == 0)):
            with errors_as_one(world):
                try:
                    if takes_part:
                        work()
                except ConfigError as error:
                    message = f"cannot save a checkpoint in {self.name}: {error}; it is kept in {path}"
                    raise CheckpointError(message) from None
        with contextlib.suppress(OSError):  # other ranks of the machine remove the same
            for one in list(self.folder.iterdir()):
                if step_of(one.name) is not None:
                    shutil.rmtree(one, ignore_errors=True)
            (self.folder / LATEST_NAME).unlink()
        return f"{self.name}/{path.name}"

    def _prune(self, newest: int) -> None:
        c = self._config.checkpoint
        if c.keep_latest is not None:
            steps = self._run.steps()
            for step in superfluous(steps, newest, keep_latest=c.keep_latest, keep_every=c.keep_every):
                self._remove(step)

    def _remove(self, step: int) -> None:
        """The manifest first: what is half removed is not complete."""
        there = self._run.below(step_name(step))
        there.below(MANIFEST_NAME).remove()
        there.remove()


def _who(owner: bytes | None) -> str:
    """The process and the host that the object names, for messages."""
    return (owner or b"").decode(errors="replace").partition(" ")[2].strip()[:100]
