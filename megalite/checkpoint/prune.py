"""Removing checkpoints that are no longer wanted, never the last sound one."""

from collections.abc import Callable
from pathlib import Path

import torch

from megalite.checkpoint.commit import discard
from megalite.checkpoint.folders import candidates, step_name
from megalite.checkpoint.load import verify_checkpoint
from megalite.checkpoint.manifest import CheckpointError
from megalite.checkpoint.retention import Retention
from megalite.topology.group import Group


def prune(
    folder: Path,
    retention: Retention,
    *,
    newest: int,
    world: Group,
    device: torch.device,
    log: Callable[[str], None],
) -> None:
    """Remove what `retention` does not keep, after the newest checkpoint has been read back from the disk and verifies.

    A checkpoint first gets a name that loading does not know: a kill half-way leaves no damaged one. What cannot be
    removed is reported to `log` and stays: nothing is lost by it.

    Collectives: as `verify_checkpoint`, if there is anything to remove.

    Raises:
        CheckpointError: the newest does not verify; the same on every rank. Nothing has been removed.
    """
    superfluous: list[int] = []
    if world.rank == 0:
        steps = [found.step for found in candidates(folder)]
        superfluous = retention.superfluous(steps, newest)
    superfluous = world.gather_json(superfluous, device)[0]
    if not superfluous:
        return
    path = folder / step_name(newest)
    _, fault = verify_checkpoint(path, newest, world=world, device=device, from_disk=True)
    if fault:
        raise CheckpointError(
            f"{path} was written but does not verify when it is read back ({fault}): the older checkpoints are kept"
        )
    if world.rank == 0:
        for step in superfluous:
            try:
                discard(folder / step_name(step))
            except OSError as error:
                log(f"cannot remove the old checkpoint {folder / step_name(step)}: {error.strerror}")
