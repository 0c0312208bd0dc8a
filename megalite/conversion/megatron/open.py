"""A Megatron-LM checkpoint, whichever of its formats it is in."""

from pathlib import Path

from megalite.conversion.megatron.dist import MegatronDistWeights
from megalite.conversion.megatron.folders import is_dist, step_folder
from megalite.conversion.megatron.read import MegatronWeights
from megalite.conversion.weights import Weights


def open_megatron(folder: Path, *, iteration: int | None = None) -> Weights:
    """Open the checkpoint in a folder that Megatron-LM saved to, or in the folder of one iteration.

    Args:
        iteration: which one; default the newest.

    Raises:
        ConversionError: there is none, or none that can be read.
    """
    step = step_folder(folder, iteration)
    return MegatronDistWeights(step) if is_dist(step) else MegatronWeights(step)
