"""Name the checkpoints in a folder and list them. Imports no torch.

step-0000100            a committed checkpoint
step-0000100.replaced   the previous checkpoint of the same step, while a new one replaces it
.tmp-step-100           an unfinished save, in progress or left by a crash
latest                  text: the name of the last committed checkpoint, for people and scripts
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing
from megalite.config.errors import CheckpointError

LATEST_NAME = "latest"
REPLACED_SUFFIX = ".replaced"
STAGING_PREFIX = ".tmp-step-"
_STEP_NAME = re.compile(r"step-([0-9]{7,19})(\.replaced)?")


def step_name(step: int) -> str:
    """Return the folder name of a step's checkpoint. Names of up to 7 digits sort like their steps."""
    return f"step-{step:07d}"


def staging_name(step: int) -> str:
    return f"{STAGING_PREFIX}{step}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name, or None for any other name."""
    match = _STEP_NAME.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if name.removesuffix(REPLACED_SUFFIX) == step_name(step) else None


@dataclass(frozen=True)
class Candidate:
    """A folder with a checkpoint's name. Its content is not verified."""

    step: int
    name: str


def candidates(folder: Path, step: int | None = None) -> list[Candidate]:
    """List the entries of `folder` with a checkpoint's name (of `step`, if given), newest first.

    `step-N.replaced` follows `step-N`: a crash while step N is saved again may leave only the former.

    Raises:
        CheckpointMissing: there are none; the message lists what the folder contains.
        CheckpointError: the folder is itself a checkpoint, has checkpoints one level below, or has other steps only.
    """
    names = _names(folder)
    found = [Candidate(number, name) for name in names if (number := step_of(name)) is not None]
    if not found:
        raise _nothing_found(folder, names)
    chosen = [candidate for candidate in found if step is None or candidate.step == step]
    if not chosen:
        steps = ", ".join(str(number) for number in sorted({candidate.step for candidate in found}))
        raise CheckpointError(f"{folder} has no checkpoint of step {step}; it has steps {steps}")
    return sorted(chosen, key=lambda candidate: (-candidate.step, candidate.name))


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        parent = folder.absolute().parent
        near = difflib.get_close_matches(folder.name, _subfolders(parent), n=1, cutoff=0.7)
        hint = f"; there is {parent / near[0]}" if near else ""
        raise CheckpointMissing(f"no checkpoint: {folder} does not exist{hint}") from None
    except NotADirectoryError:
        raise CheckpointError(f"{folder} is a file; give the folder that contains the checkpoints") from None
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot look for checkpoints: {error.strerror}") from None


def _nothing_found(folder: Path, names: list[str]) -> CheckpointError:
    if MANIFEST_NAME in names:
        here = folder.resolve()
        step = step_of(here.name)
        which = "" if step is None else f" --ckpt-step {step}"
        return CheckpointError(f"{folder} is itself a checkpoint; load it with --load {here.parent}{which}")
    foreign = ""
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        foreign = "a Hugging Face folder"
    elif "latest_checkpointed_iteration.txt" in names or any(re.fullmatch(r"iter_\d{7}", name) for name in names):
        foreign = "a folder of Megatron-LM's checkpoints"
    if foreign:
        works = f"--load hf:{folder} starts from it, and " if "Hugging Face" in foreign else ""
        return CheckpointError(
            f"{folder} is {foreign}; {works}megalite convert {folder} imported --to native makes a checkpoint of it"
        )
    for name in sorted(_subfolders(folder)):
        if any(step_of(inner) is not None for inner in _subfolders(folder / name)):
            return CheckpointError(f"no checkpoint directly in {folder}, but in {folder / name}: give that folder")
    unfinished = sorted(name for name in names if name.startswith(STAGING_PREFIX))
    if unfinished:
        what = f"only unfinished saves ({', '.join(unfinished)})"
    elif names:
        shown = sorted(names)[:5]
        what = f"{len(names)} other entries ({', '.join(shown)}{', ...' if len(names) > len(shown) else ''})"
    else:
        what = "the folder is empty"
    return CheckpointMissing(f"no checkpoint in {folder}: no step-* folder, {what}")


def _subfolders(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir() if path.is_dir()]
    except OSError:
        return []
