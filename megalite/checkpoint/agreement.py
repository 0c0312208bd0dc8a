"""One outcome on every rank: what fails on one is raised on all, as the same error."""

import torch

from megalite.checkpoint.manifest import CheckpointError
from megalite.topology.group import Group


def agree(error: CheckpointError | None, *, world: Group, device: torch.device) -> None:
    """Return on every rank if no rank has an error, else raise one with the same message on every rank.

    `Group.agree` raises each failing rank's own error; here a disk that is full for ten ranks is one error.

    Collectives: one `gather_json`.

    Raises:
        CheckpointError: the first failing rank's, with how many others there are.
    """
    reports = world.gather_json(None if error is None else str(error), device)
    failed = [rank for rank, report in enumerate(reports) if report is not None]
    if not failed:
        return
    message = reports[failed[0]]
    if world.size > 1:
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        message = f"{message} (rank {failed[0]}{others} of {world.size})"
    raise CheckpointError(message) from error
