"""Removing checkpoints that are no longer wanted, never the last sound one."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.commit import discard
from megalite.checkpoint.files import read_text
from megalite.checkpoint.folders import candidates, step_name
from megalite.checkpoint.load import verify_files
from megalite.checkpoint.manifest import MANIFEST_NAME, FileEntry, listed_files
from megalite.checkpoint.save import agree
from megalite.config.errors import CheckpointError
from megalite.topology.group import Group


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What to keep of a run's checkpoints.

    Args:
        keep_latest: that many of the newest; None: all.
        keep_every: and forever those of steps that are multiples of this.
        held: steps that are being read: they stay until a later save. Rank 0's count.
    """

    keep_latest: int | None = None
    keep_every: int | None = None
    held: Collection[int] = ()

    def superfluous(self, steps: Iterable[int], newest: int) -> list[int]:
        """The steps to be removed once `newest` is there and known to be sound, oldest first.

        Steps beyond `newest` are damaged leftovers of the run before it was resumed, or another run's: they do not
        count, and stay.
        """
        if self.keep_latest is None:
            return []
        passing = sorted(step for step in set(steps) if step <= newest)
        old = [step for step in passing[: -self.keep_latest] if step not in self.held]
        return [step for step in old if self.keep_every is None or step % self.keep_every]


def prune(
    folder: Path, retention: Retention, *, newest: int, world: Group, device: torch.device, log: Callable[[str], None]
) -> None:
    """Remove what `retention` does not keep, after the newest checkpoint has been read back from the disk and verifies.

    A checkpoint first gets a name that loading does not know: a kill half-way leaves no damaged one. What cannot be
    removed is reported to `log` and stays: nothing is lost by it.

    Collectives: if `retention` removes anything, a few `gather_json` and broadcasts over `world`.
    """
    if retention.keep_latest is None:
        return
    path = folder / step_name(newest)
    plan: dict[str, Any] = {}
    failure: CheckpointError | None = None
    if world.rank == 0:
        try:
            superfluous = retention.superfluous([found.step for found in candidates(folder)], newest)
            listed = listed_files(read_text(path / MANIFEST_NAME)) if superfluous else {}
            plan = {"steps": superfluous, "files": {name: asdict(entry) for name, entry in listed.items()}}
        except CheckpointError as error:
            failure = CheckpointError(f"{path} was written but then not found to be there: {error}")
    agree(failure, world=world, device=device)
    plan = world.broadcast_json(plan, device)
    if not plan["steps"]:
        return
    # Each rank gets the list of files alone: a manifest of many ranks takes long to read.
    files = {name: FileEntry(**entry) for name, entry in plan["files"].items()}
    fault = verify_files(path, files, world=world, device=device, from_disk=True)
    if fault:
        raise CheckpointError(
            f"{path} was written but does not verify when it is read back ({fault}): the older checkpoints are kept"
        )
    if world.rank == 0:
        for step in plan["steps"]:
            try:
                discard(folder / step_name(step))
            except OSError as error:
                log(f"warning: cannot remove the old checkpoint {folder / step_name(step)}: {error.strerror}")
