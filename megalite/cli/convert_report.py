"""What `megalite convert` says of the source, the tokenizer, the result, and errors of the system."""

import errno
from pathlib import Path

from megalite.cli.byte_progress import decimal_bytes
from megalite.cli.output import show
from megalite.config.errors import ConfigError
from megalite.conversion.native import PRECISIONS, NativeWeights
from megalite.conversion.output import workplace_of
from megalite.conversion.tokenizer_files import has_tokenizer, tokenizer_of
from megalite.conversion.weights import Weights, parameter_shapes
from megalite.data.tokenizers.base import Tokenizer
from megalite.models.shapes import parameter_count

_REMEDIES = {
    errno.ENOSPC: "make room, or give another target",
    errno.EDQUOT: "make room, or give another target",
    errno.EROFS: "give a target in a folder that can be written to",
    errno.EACCES: "give a target in a folder that can be written to",
    errno.EPERM: "give a target in a folder that can be written to",
}


def described(weights: Weights) -> str:
    """The model in a line."""
    model, shapes = weights.model, parameter_shapes(weights.model)
    dtypes = sorted({PRECISIONS.get(weights.dtype(name), str(weights.dtype(name))) for name in shapes})
    experts = f", {model.num_experts} experts" if model.num_experts else ""
    written = ""
    if isinstance(weights, NativeWeights):
        sizes = {axis: weights.layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp", "ep")}
        by = [f"{axis} {size}" for axis, size in sizes.items() if size != 1]
        written = f", written by {', '.join(by) or 'one rank'}"
    return (
        f"{weights.path} ({weights.format}): {model.num_layers} layers of width {model.hidden_size}{experts}, "
        f"{model.normalization}, {model.activation}, {model.position_embedding_type}, vocabulary {model.vocab_size}; "
        f"{parameter_count(model):,} parameters in {len(shapes)} tensors, {' and '.join(dtypes)}{written}"
    )


def tokenizer_line(source: Weights, weights: Weights, *, left_out: bool) -> str:
    """Which tokenizer goes along, and if none does, why.

    Args:
        source: as it was opened.
        weights: as they will be written.
        left_out: as the user wants it.
    """
    if not has_tokenizer(weights.tokenizer_files):
        if left_out:
            return "no tokenizer goes along (--without-tokenizer)"
        if isinstance(source, NativeWeights) and source.missing_tokenizer is not None:
            gone = source.missing_tokenizer
            return f"the checkpoint's tokenizer {gone}: none goes along; --tokenizer-model PATH adds it"
        without_files = tokenizer_of(weights)
        if without_files is not None:
            return f"no tokenizer file goes along: {_about(without_files)}"
        return "no tokenizer goes along; --tokenizer-model PATH adds one"
    return f"tokenizer: {', '.join(path.name for path in weights.tokenizer_files)}"


def _about(tokenizer: Tokenizer) -> str:
    """What to know of a tokenizer that has no files."""
    ids = (
        "are the bytes of the text in UTF-8"
        if tokenizer.name == "ByteLevelTokenizer"
        else "stand for no text"
    )
    return f"{tokenizer.name} has none; ids {ids}, and {tokenizer.eod} ends a document"


def other_tokenizer(source: Weights, weights: Weights) -> str | None:
    """A warning, if the tokenizer to be written is not the one that a checkpoint was trained with."""
    if not isinstance(source, NativeWeights) or source.recorded_tokenizer is None:
        return None
    recorded, file = source.recorded_tokenizer, weights.tokenizer_files[0]
    theirs = f"sha256 {recorded[:12]}..., vocabulary {source.model.vocab_size}"
    try:
        given = tokenizer_of(weights)
    except ConfigError as error:
        return f"{file} was not compared with the checkpoint's tokenizer ({theirs}): {error}"
    if given is None or given.fingerprint() == recorded:
        return None
    return (
        f"{file} (sha256 {given.fingerprint()[:12]}..., vocabulary {given.vocab_size}) is not the tokenizer that "
        f"{source.path} was trained with ({theirs})"
    )


def show_written(path: Path, seconds: float) -> None:
    """Files, bytes and rate of the result."""
    files = [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    rate = f"{size / max(seconds, 1e-9) / 1e6:,.0f} MB/s"
    show(f"wrote    {path}: {len(files)} files, {decimal_bytes(size)} in {seconds:.1f} s ({rate})")


def kept_line(target: Path) -> str:
    """Where the files of an unfinished conversion are kept, if there are any."""
    try:
        workplace = workplace_of(target)
        if not workplace.is_dir():
            return ""
    except (OSError, ConfigError):  # this is asked while another error is told
        return ""
    return f"what is done is kept in {workplace}: run the same command to go on, or remove it"


def system_error(error: OSError, source: Path, target: Path) -> str:
    """An error of the system in a line: what could not be done, why, and what helps."""
    file = None if error.filename is None else str(error.filename)
    is_source = file is not None and Path(file).absolute().is_relative_to(source.absolute())
    what = f"cannot read {source}" if is_source else f"cannot write {target}"
    where = f" ({file})" if file is not None and Path(file) not in (source, target) else ""
    remedy = None if is_source else _REMEDIES.get(error.errno or 0)
    hints = [hint for hint in (remedy, kept_line(target)) if hint]
    return "; ".join([f"{what}: {error.strerror or error}{where}", *hints])
