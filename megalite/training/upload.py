"""Checkpoints at an address (s3://bucket/run): each is finished in a folder of this machine and uploaded, its manifest last.

So a checkpoint is there from the moment its manifest is, and a run killed at any instant resumes from the newest such one. What
a killed upload leaves has no manifest; the next start of the run removes it.
"""

import contextlib
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import LATEST_NAME, step_name, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, listed_files
from megalite.checkpoint.save import agree, superfluous
from megalite.config.errors import CheckpointError, ConfigError
from megalite.config.run import RunConfig
from megalite.data.remote import is_fetched, waiting_folder
from megalite.data.stores import StoreObject, shown
from megalite.topology.group import Group


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

    def upload(self, path: Path, *, world: Group, device: torch.device, log: Callable[[str], None]) -> str:
        """Bring the finished checkpoint in the folder `path` to the address, each rank its own files, and remove it here;
        there, what keep_latest does not keep. Returns its address.

        Raises CheckpointError, the same on every rank: the store has failed again and again; `path` is kept. Collectives:
        three `gather_json` over `world`."""
        step = step_of(path.name)
        assert step is not None
        there = self._run.below(path.name)

        def send() -> None:
            for file in sorted(path.glob(f"*-{world.rank:05d}.safetensors")):
                there.below(file.name).write(file, beat=world.heartbeat.beat)

        def commit() -> None:
            text, sizes = read_text(path / MANIFEST_NAME), there.entries()
            for name, entry in listed_files(text).items():
                if sizes.get(name) != entry.length:
                    raise ConfigError(
                        f"{self.name}/{path.name}/{name} has {sizes.get(name)} bytes there, not {entry.length}"
                    )
            there.below(MANIFEST_NAME).write(text.encode())
            try:
                self._run.below(LATEST_NAME).write(f"{path.name}\n".encode())
                self._prune(step)
            except ConfigError as error:
                log(f"warning: {self.name}/{path.name} is saved, but {error}")

        for work, takes_part in (
            (lambda: self._remove(step), world.rank == 0),
            (send, True),
            (commit, world.rank == 0),
        ):
            failure = None
            try:
                if takes_part:
                    work()
            except ConfigError as error:
                failure = CheckpointError(f"cannot save a checkpoint in {self.name}: {error}; it is kept in {path}")
            agree(failure, world=world, device=device)
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
