"""Open a model on disk in any supported format."""

from pathlib import Path

from megalite.checkpoint.folders import candidates, step_of
from megalite.checkpoint.manifest import MANIFEST_NAME, CheckpointMissing
from megalite.config.errors import CheckpointError
from megalite.conversion.huggingface.weights import HuggingFaceWeights
from megalite.conversion.megatron.dist import MegatronDistWeights
from megalite.conversion.megatron.read import TRACKER, MegatronWeights, is_dist, step_folder
from megalite.conversion.megatron.run import MegatronRun
from megalite.conversion.native import NativeWeights
from megalite.conversion.weights import ConversionError, Format, Weights


def open_weights(
    path: Path,
    *,
    format: Format | None = None,
    step: int | None = None,
    with_optimizer: bool = False,
    ema: bool = False,
) -> Weights:
    """Open the model at `path`. `with_optimizer`: also its training state. `ema`: the moving average of the weights."""
    format = format or detect_format(path)
    if ema and format != "native":
        raise ConversionError(f"--weights ema has no effect on {path}, a {format} folder, which has one set of weights")
    if with_optimizer:
        folder = step_folder(path, step) if format == "megatron" else None
        if folder is None or not is_dist(folder):
            what = "in the torch format" if folder else f"a {format} folder"
            raise ConversionError(
                f"--with-optimizer reads Megatron-LM's torch_dist format, and {folder or path} is {what}; leave it out, or "
                "save with --ckpt-format torch_dist"
            )
        return MegatronRun(folder)
    if format == "native":
        return NativeWeights(path, step=step, ema=ema)
    if format == "megatron":
        return open_megatron(path, iteration=step)
    if step is not None:
        raise ConversionError(f"--step {step} has no effect on {path}: a Hugging Face folder contains one model")
    return HuggingFaceWeights(path)


def open_megatron(folder: Path, *, iteration: int | None = None) -> Weights:
    step = step_folder(folder, iteration)
    return MegatronDistWeights(step) if is_dist(step) else MegatronWeights(step)


def detect_format(path: Path) -> Format:
    if not path.is_dir():
        what = "is a file; give its folder" if path.exists() else "does not exist"
        raise ConversionError(f"{path} {what}")
    names = {entry.name for entry in path.iterdir()}
    fitting: list[Format] = []
    if MANIFEST_NAME in names or any(step_of(name) is not None for name in names):
        fitting.append("native")
    # A native folder may contain tokenizer files, but not these.
    if "config.json" in names or any(name.endswith(".safetensors.index.json") for name in names):
        fitting.append("huggingface")
    if names & {TRACKER, ".metadata", "common.pt"} or any(n.startswith(("iter_", "mp_rank_")) for n in names):
        fitting.append("megatron")
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConversionError(f"{path} could be of {' or '.join(fitting)}; choose one with --from {fitting[0]}")
    try:
        candidates(path)
    except CheckpointMissing:
        pass
    except CheckpointError as error:  # for example: the checkpoints are one level below
        raise ConversionError(str(error)) from None
    shown = ", ".join(sorted(names)[:5]) or "nothing"
    raise ConversionError(
        f"{path} is no model of a known format: there is no step-* folder or {MANIFEST_NAME} (native), no config.json "
        f"(huggingface), no {TRACKER}, iter_* or mp_rank_* (megatron); it contains {shown}"
    )
