"""Where the files of a Megatron-LM checkpoint are."""

import re
from dataclasses import dataclass
from pathlib import Path

from megalite.conversion.weights import ConversionError

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
_STEP = re.compile(r"iter_(\d{7,})$")
_RANK = re.compile(r"mp_rank_(\d{2,})((?:_\d{3,})*)$")


@dataclass(frozen=True)
class Grid:
    """The files of a `torch` checkpoint by (tensor-, pipeline-, expert-parallel rank)."""

    tp: int
    pp: int
    ep: int
    files: dict[tuple[int, int, int], Path]


def is_step(folder: Path) -> bool:
    """It is the folder of one iteration: files of ranks, or one `torch_dist` checkpoint."""
    return folder.is_dir() and (is_dist(folder) or any(folder.glob("mp_rank_*")))


def is_dist(step: Path) -> bool:
    """The step is in the `torch_dist` format."""
    return (step / ".metadata").is_file()


def step_folder(folder: Path, iteration: int | None = None) -> Path:
    """The folder of one iteration: `folder` itself, or the one in it that the tracker file or `iteration` names.

    Raises:
        ConversionError: there is none; those that are there are named.
    """
    if iteration is None and is_step(folder):
        return folder
    if iteration is not None:
        found = folder / f"iter_{iteration:07d}"
        if folder.name == found.name and is_step(folder):
            return folder
        if not is_step(found):
            raise ConversionError(f"{folder} has no iteration {iteration}; it has {_known(folder)}")
        return found
    tracker = folder / TRACKER
    if not tracker.is_file():
        raise ConversionError(
            f"{folder} is no Megatron-LM checkpoint: it has neither {TRACKER} nor mp_rank_* folders; it has {_known(folder)}"
        )
    text = tracker.read_text(errors="replace")[:100].strip()
    if text != RELEASE and not re.fullmatch(r"\d{1,18}", text):
        raise ConversionError(
            f"{tracker} holds {text!r}; it must be a number or {RELEASE}. {folder} has {_known(folder)}"
        )
    found = folder / (RELEASE if text == RELEASE else f"iter_{int(text):07d}")
    if not is_step(found):
        raise ConversionError(
            f"{tracker} names {found.name}, which is not there; {folder} has {_known(folder)}"
        )
    return found


def _known(folder: Path) -> str:
    """The iterations in a folder, for a message."""
    names = sorted(path.name for path in folder.glob("*") if path.name == RELEASE or _STEP.match(path.name))
    return ", ".join(names[:10]) + (" ..." if len(names) > 10 else "") if names else "no iteration"


def rank_files(step: Path, *, expert_parallel: int = 1) -> Grid:
    """The model files of a `torch` step; every rank of the grid must have one.

    `mp_rank_TT_NNN` is a pipeline rank, or with one pipeline stage an expert-parallel rank: only the arguments tell.

    Args:
        expert_parallel: the size that they tell.

    Raises:
        ConversionError: there are none, or one is missing; it is named.
    """
    found: dict[tuple[int, int, int], Path] = {}
    for path in sorted(step.glob("mp_rank_*")):
        match = _RANK.fullmatch(path.name)
        if not match or not path.is_dir():
            continue
        others = [int(part) for part in match[2].split("_")[1:]]
        if len(others) > 2:
            raise ConversionError(f"{path}: the name has more ranks than tensor, pipeline and expert")
        if len(others) == 1 and expert_parallel > 1:
            others = [0, *others]
        pipeline, expert = (*others, 0, 0)[:2]
        file = next((path / name for name in MODEL_FILES if (path / name).is_file()), None)
        if file is None:
            raise ConversionError(f"{path / MODEL_FILES[0]} is missing: the folder has no file of weights")
        found[int(match[1]), pipeline, expert] = file
    if not found:
        raise ConversionError(f"{step} has no mp_rank_*/{MODEL_FILES[0]}")
    tp, pp, ep = (max(place[axis] for place in found) + 1 for axis in range(3))
    for tensor in range(tp):
        for pipeline in range(pp):
            for expert in range(ep):
                if (tensor, pipeline, expert) not in found:
                    name = rank_folder(tensor, pipeline, expert, pp=pp, ep=ep)
                    raise ConversionError(
                        f"{step / name / MODEL_FILES[0]} is missing; the other files are of tensor {tp} x pipeline {pp} x "
                        f"expert {ep} ranks"
                    )
    return Grid(tp, pp, ep, found)


def rank_folder(tensor: int, pipeline: int, expert: int = 0, *, pp: int, ep: int = 1) -> str:
    """The folder's name for a rank: the pipeline and the expert rank are in it where there are several."""
    name = f"mp_rank_{tensor:02d}"
    name += f"_{pipeline:03d}" if pp > 1 else ""
    return name + (f"_{expert:03d}" if ep > 1 else "")
