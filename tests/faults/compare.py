"""Compare a killed run with an uninterrupted one: the losses of its steps, and its final state."""

import json
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.folders import candidates
from megalite.checkpoint.load import Checkpoint, find_checkpoint
from megalite.checkpoint.manifest import CheckpointMissing
from megalite.topology.group import Group

CPU = torch.device("cpu")
SOLO = Group("world", (0,), 0)
FIELDS = ("step", "loss", "grad_norm", "lr", "consumed_samples")


def records(metrics: Path) -> list[dict[str, Any]]:
    """`FIELDS` of the training steps in metrics.jsonl, without incomplete lines."""
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{name: row[name] for name in FIELDS} for row in found if row["kind"] == "train"]


def check_records(ours: list[dict[str, Any]], reference: list[dict[str, Any]], tolerance: float) -> None:
    """Check that the steps equal the reference's, without gaps; with `tolerance` 0 bit for bit.

    Raises:
        AssertionError: naming the step."""
    for row, other in zip(ours, reference):
        for name in FIELDS:
            apart = abs(row[name] - other[name])
            assert apart <= tolerance * abs(other[name]), (
                f"step {row['step']}: {name} is {row[name]!r}, uninterrupted {other[name]!r}"
            )
    assert len(ours) <= len(reference), f"{len(ours)} steps, uninterrupted {len(reference)}"


def steps_in(folder: Path) -> list[int]:
    try:
        return sorted(candidate.step for candidate in candidates(folder))
    except CheckpointMissing:
        return []


def open_sound(folder: Path, step: int) -> Checkpoint:
    """Open the checkpoint of a step after checking the sha256 of every file.

    Raises:
        CheckpointError: it is damaged."""
    return find_checkpoint(folder, step=step, world=SOLO, log=_refuse)


def _refuse(line: str) -> None:
    raise AssertionError(line)


def check_state(ours: Checkpoint, reference: Checkpoint, tolerance: float) -> int:
    """Check that weights, main parameters, Adam's moments and counters are equal. Returns the number of tensors.

    With a tolerance (for another layout: relative to the largest element) dtypes must also be equal.

    Raises:
        AssertionError: naming the tensor."""
    assert ours.keys() == reference.keys(), set(ours.keys()) ^ set(reference.keys())
    for key in reference.keys():  # noqa: SIM118
        mine, theirs = (checkpoint.read(key, device=CPU) for checkpoint in (ours, reference))
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), key
        if tolerance:
            apart = float((mine - theirs).abs().max())
            assert apart <= tolerance * max(float(theirs.abs().max()), 1e-3), f"{key}: {apart} apart"
        else:
            same = torch.equal(mine.flatten().view(torch.uint8), theirs.flatten().view(torch.uint8))
            assert same, f"{key} differs from the uninterrupted run's"
    assert ours.manifest.counters == reference.manifest.counters
    return len(reference.keys())
