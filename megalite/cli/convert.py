"""`megalite convert`: convert weights between megalite's checkpoints, Hugging Face folders and Megatron-LM's checkpoints."""

from argparse import Namespace
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.files import free_bytes
from megalite.cli.command import fetch
from megalite.cli.display import ByteProgress, working
from megalite.cli.model_commands import VERIFIED_BELOW
from megalite.cli.output import notify, show
from megalite.config.errors import INTERRUPTED, ConfigError
from megalite.config.numbers import decimal_bytes
from megalite.conversion.huggingface.choose import family_named
from megalite.conversion.huggingface.weights import HuggingFaceWeights, write_huggingface
from megalite.conversion.megatron.write import write_megatron, written_bytes
from megalite.conversion.model_folder import has_tokenizer, named_tokenizer_files, tokenizer_folder_files, tokenizer_of
from megalite.conversion.native import DTYPES, PRECISIONS, NativeWeights, write_native
from megalite.conversion.open import open_weights
from megalite.conversion.output import DEFAULT_FILE_BYTES, check_target, workplace_of
from megalite.conversion.verify import verify
from megalite.conversion.weights import (
    TRANSFORMER_IMPLEMENTATIONS,
    ConversionError,
    Format,
    Repadded,
    Weights,
    WithTokenizer,
    innermost,
    parameter_shapes,
)
from megalite.models.shapes import VOCABULARY, parameter_count

_ONLY_FOR = {
    "tp": ("megatron",),
    "pp": ("megatron",),
    "transformer_impl": ("megatron",),
    "tokenizer_model": ("native", "huggingface"),
    "without_tokenizer": ("native", "huggingface"),
    "family": ("huggingface",),
    "max_shard_size": ("native", "huggingface"),
    "with_optimizer": ("native",),
    "make_vocab_size_divisible_by": ("native", "megatron"),
}


def run(flags: Namespace) -> int:
    """Convert. Return 0 on success, 1 if source and target differ, 2 on bad input or a full disk."""
    try:
        return _convert(flags)
    except OSError as error:
        if kept := kept_line(flags.target):
            error.add_note(kept)
        raise
    except KeyboardInterrupt:
        notify(f"\ninterrupted; {kept_line(flags.target) or 'nothing was written'}")
        return INTERRUPTED


def _convert(flags: Namespace) -> int:
    _check(flags)
    chosen = None if flags.source_format == "auto" else flags.source_format
    flags.source = fetch(flags.source, flags.step)
    show(f"opening {flags.source}")
    source = open_weights(
        flags.source, format=chosen, step=flags.step, with_optimizer=flags.with_optimizer, ema=flags.weights == "ema"
    )
    show(f"read     {described(source)}")
    if flags.with_optimizer:
        run = innermost(source).training  # type: ignore[attr-defined]
        show(f"         {', '.join(run.states)} of step {run.step}, {run.counters['consumed_samples']} samples")
    weights = _with_changes(source, flags)
    dtype = DTYPES.get(flags.dtype)
    _show_tokenizer(source, weights, flags)
    total = _bytes(weights, flags, dtype)
    _check_free_space(flags.target, total)
    with closing(ByteProgress(total)) as progress:
        path = _write(weights, flags, dtype, progress)
    files = [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    seconds = progress.seconds
    rate = f"{decimal_bytes(size / max(seconds, 1e-9))}/s"
    show(f"wrote    {path}: {len(files)} files, {decimal_bytes(size)} in {seconds:.1f} s ({rate})")
    verifies = flags.verify
    if verifies is None:
        verifies = parameter_count(weights.model) < VERIFIED_BELOW
        if not verifies:
            show(f"verify   not done: {parameter_count(weights.model):,} parameters; --verify does it")
    return _verify(source, path, flags.to) if verifies else 0


def _check(flags: Namespace) -> None:
    for name, formats in _ONLY_FOR.items():
        if getattr(flags, name) not in (None, False) and flags.to not in formats:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} has no effect with --to {flags.to}; remove it, or use --to {' or --to '.join(formats)}"
            )
    if flags.with_optimizer and flags.dtype:
        raise ConfigError(f"--with-optimizer keeps main parameters in fp32; leave out --dtype {flags.dtype}")
    if flags.family is not None:
        family_named(flags.family)
    check_target(flags.target)


def _with_changes(weights: Weights, flags: Namespace) -> Weights:
    if flags.tokenizer_model is not None:
        weights = WithTokenizer(weights, tokenizer_folder_files(flags.tokenizer_model))
    elif flags.without_tokenizer:
        weights = WithTokenizer(weights, ())
    elif flags.to == "megatron":  # the target stores only the tokenizer's name, so missing files are no error
        try:
            named_tokenizer_files(weights.tokenizer_files)
        except ConfigError:
            weights = WithTokenizer(weights, ())
    if flags.make_vocab_size_divisible_by is not None:
        weights = Repadded(weights, flags.make_vocab_size_divisible_by)
    return weights


def _show_tokenizer(source: Weights, weights: Weights, flags: Namespace) -> None:
    if flags.to == "megatron":
        show("         a megatron target contains no tokenizer: give its files to Megatron-LM")
        return
    show(f"         {tokenizer_line(source, weights, left_out=flags.without_tokenizer)}")
    warning = other_tokenizer(source, weights) if flags.tokenizer_model is not None else None
    if warning is not None:
        notify(f"warning: {warning}")


def _bytes(weights: Weights, flags: Namespace, dtype: torch.dtype | None) -> int:
    if flags.to == "megatron":
        return written_bytes(weights, dtype=dtype, tp=flags.tp or 1, pp=flags.pp or 1)
    model, total = weights.model, 0
    for name, shape in parameter_shapes(model).items():
        size = shape.size
        if flags.to == "huggingface" and name in VOCABULARY:
            size = size // model.padded_vocab_size * (model.vocab_size or 0)  # without the padding
        total += size * (dtype or weights.dtype(name)).itemsize
        if flags.with_optimizer:
            total += size * torch.float32.itemsize * len(innermost(weights).training.states)  # type: ignore[attr-defined]
    return total


def _check_free_space(target: Path, total: int) -> None:
    """Raise ConversionError if the disk has no room for the rest of the target."""
    workplace = workplace_of(target)
    written = [path for path in workplace.rglob("*") if path.is_file()] if workplace.is_dir() else []
    free, missing = free_bytes(target), total - sum(path.stat().st_size for path in written)
    if free < missing:
        raise ConversionError(
            f"{target} needs {missing:,} more bytes, but {free:,} are free; make room, or give another folder"
        )


def _write(weights: Weights, flags: Namespace, dtype: torch.dtype | None, progress: ByteProgress) -> Path:
    def log(line: str) -> None:
        show(f"         {line}")

    options: dict[str, Any] = {"dtype": dtype, "advance": progress.advance, "log": log}
    if flags.to == "megatron":
        implementation = flags.transformer_impl or TRANSFORMER_IMPLEMENTATIONS[0]
        options |= {"tp": flags.tp or 1, "pp": flags.pp or 1}
        return write_megatron(weights, flags.target, implementation=implementation, **options)
    options["max_file_bytes"] = int(flags.max_shard_size or DEFAULT_FILE_BYTES)
    if flags.to == "native":
        return write_native(weights, flags.target, **options)
    return write_huggingface(weights, flags.target, family=flags.family, **options)


def _verify(source: Weights, path: Path, format: Format) -> int:
    remedy = f"the target remains at {path}; do not use it"
    try:
        with working("verify  ") as update:
            found = verify(source, open_weights(path, format=format), log=lambda line: update(f"verify   {line} ..."))
    except ConfigError as error:
        notify(f"error: verification failed: {error}; {remedy}")
        return 1
    except KeyboardInterrupt:
        notify(f"\ninterrupted during verification; {path} is complete but not verified")
        return INTERRUPTED
    for line in found.lines():
        show(f"verify   {line}")
    if not found.passed:
        notify(f"error: {path} differs from {source.path}; {remedy}")
    return 0 if found.passed else 1


def described(weights: Weights) -> str:
    model, shapes = weights.model, parameter_shapes(weights.model)
    dtypes = sorted({PRECISIONS.get(weights.dtype(name), str(weights.dtype(name))) for name in shapes})
    experts = f", {model.num_experts} experts" if model.num_experts else ""
    written = ""
    if isinstance(weights, NativeWeights):
        sizes = {axis: weights.layout.get(axis, 1) for axis in ("tp", "pp", "dp", "cp", "ep")}
        layout = [f"{axis} {size}" for axis, size in sizes.items() if size != 1]
        written = f", written by {', '.join(layout) or 'one rank'}"
    elif isinstance(weights, HuggingFaceWeights):
        written = weights.remarks
    if model.mtp_num_layers:
        written += f"; MTP layers: {model.mtp_num_layers}"
    return (
        f"{weights.path} ({weights.format}): {model.num_layers} layers of width {model.hidden_size}{experts}, "
        f"{model.normalization}, {model.activation}, {model.position_embedding_type}, vocabulary {model.vocab_size}; "
        f"{parameter_count(model):,} parameters in {len(shapes)} tensors, {' and '.join(dtypes)}{written}"
    )


def tokenizer_line(source: Weights, weights: Weights, *, left_out: bool) -> str:
    """Return the tokenizer files of the target, or the reason why it has none."""
    if not has_tokenizer(weights.tokenizer_files):
        if left_out:
            return "without tokenizer (--without-tokenizer)"
        if isinstance(source, NativeWeights) and source.missing_tokenizer is not None:
            return f"without tokenizer: the checkpoint's tokenizer {source.missing_tokenizer}; --tokenizer-model PATH adds it"
        without_files = tokenizer_of(weights)
        if without_files is not None:
            name = without_files.name
            ids = "are the bytes of the text in UTF-8" if name == "ByteLevelTokenizer" else "represent no text"
            return f"without tokenizer file: {name} has none; ids {ids}, and {without_files.eod} ends a document"
        return "without tokenizer; --tokenizer-model PATH adds one"
    return f"tokenizer: {', '.join(path.name for path in weights.tokenizer_files)}"


def other_tokenizer(source: Weights, weights: Weights) -> str | None:
    """Return a warning if the tokenizer of the target differs from the one that the checkpoint was trained with."""
    if not isinstance(source, NativeWeights) or source.recorded_tokenizer is None:
        return None
    recorded, file = source.recorded_tokenizer, weights.tokenizer_files[0]
    original = f"sha256 {recorded[:12]}..., vocabulary {source.model.vocab_size}"
    try:
        tokenizer = tokenizer_of(weights)
    except ConfigError as error:
        return f"{file} was not compared with the checkpoint's tokenizer ({original}): {error}"
    if tokenizer is None or tokenizer.fingerprint() == recorded:
        return None
    return (
        f"{file} (sha256 {tokenizer.fingerprint()[:12]}..., vocabulary {tokenizer.vocab_size}) is not the tokenizer that "
        f"{source.path} was trained with ({original})"
    )


def kept_line(target: Path) -> str:
    """Return where the files of an unfinished conversion are; empty if there are none."""
    try:
        workplace = workplace_of(target)
        if not workplace.is_dir():
            return ""
    except (OSError, ConfigError):  # must not hide the error that is being reported
        return ""
    return f"finished files are in {workplace}: run the same command to continue, or remove the folder"
