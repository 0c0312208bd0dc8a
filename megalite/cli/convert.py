"""`megalite convert`: weights from and to megalite's checkpoints, Hugging Face folders and Megatron-LM's checkpoints."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from megalite.checkpoint.files import free_bytes
from megalite.cli.byte_progress import ByteProgress
from megalite.cli.convert_report import (
    described,
    kept_line,
    other_tokenizer,
    show_written,
    system_error,
    tokenizer_line,
)
from megalite.cli.failures import command
from megalite.cli.output import show
from megalite.cli.parser import Parser
from megalite.config.byte_size import parse_byte_size
from megalite.config.errors import ConfigError
from megalite.conversion.huggingface.families import family_named
from megalite.conversion.huggingface.write import write_huggingface
from megalite.conversion.megatron.write import IMPLEMENTATIONS, write_megatron, written_bytes
from megalite.conversion.native import PRECISIONS, write_native
from megalite.conversion.open import FORMATS, Format, open_weights
from megalite.conversion.output import check_target, workplace_of
from megalite.conversion.tokenizer_files import named_tokenizer_files, tokenizer_folder_files
from megalite.conversion.verify import verify
from megalite.conversion.weights import ConversionError, Weights, parameter_shapes
from megalite.conversion.wrapped import Repadded, WithTokenizer
from megalite.models.shapes import parameter_count

DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}
DEFAULT_SHARD = "5GB"
VERIFIED_BELOW = 200_000_000
"""Parameters of a model that is verified unless --no-verify says otherwise."""
INTERRUPTED = 130
"""Exit status of Ctrl-C, as shells have it."""

_ONLY_FOR = {
    "tp": ("megatron",),
    "pp": ("megatron",),
    "transformer_impl": ("megatron",),
    "tokenizer_model": ("native", "huggingface"),
    "without_tokenizer": ("native", "huggingface"),
    "family": ("huggingface",),
    "max_shard_size": ("native", "huggingface"),
    "make_vocab_size_divisible_by": ("native", "megatron"),
}


@command("megalite convert")
def main(argv: Sequence[str]) -> int:
    """Convert; 0 if all went well, 1 if source and target differ, 2 on bad input or a disk that is full."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except BrokenPipeError:
        raise  # the reader of stdout
    except OSError as error:
        raise ConfigError(system_error(error, arguments.source, arguments.target)) from error
    except KeyboardInterrupt:
        kept = kept_line(arguments.target) or "nothing was written"
        print(f"\ninterrupted; {kept}", file=sys.stderr)
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "megalite convert",
        "Convert weights from and to megalite's checkpoints, Hugging Face folders and Megatron-LM's checkpoints. On the "
        "CPU, a tensor at a time; interrupted, the same command goes on.",
        examples=(
            "megalite convert models/llama checkpoints --to native",
            "megalite convert runs/first/checkpoints out --to huggingface --dtype bf16",
        ),
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="folder to read")
    parser.add_argument("target", type=Path, metavar="TARGET", help="folder to write; must not exist yet")
    parser.add_argument("--to", choices=FORMATS, required=True, help="format of TARGET")
    parser.add_argument(
        "--from",
        dest="source_format",
        choices=("auto", *FORMATS),
        default="auto",
        help="format of SOURCE (auto)",
    )
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint of this step; default the newest")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of every tensor; default: as stored")
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help=f"largest file, such as 2GB ({DEFAULT_SHARD}); not for megatron",
    )
    parser.add_argument(
        "--family", metavar="NAME", help="huggingface: model type; default: the one that fits"
    )
    parser.add_argument("--tp", type=int, metavar="N", help="megatron: tensor-parallel files (1)")
    parser.add_argument("--pp", type=int, metavar="N", help="megatron: pipeline-parallel files (1)")
    parser.add_argument(
        "--transformer-impl",
        choices=IMPLEMENTATIONS,
        help=f"megatron: of the run that will load it, which decides some names ({IMPLEMENTATIONS[0]})",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        metavar="N",
        help="native, megatron: multiple that the vocabulary is padded to; default: as in SOURCE",
    )
    tokenizer = parser.add_mutually_exclusive_group()
    tokenizer.add_argument(
        "--tokenizer-model", type=Path, metavar="PATH", help="tokenizer to add: a file or folder"
    )
    tokenizer.add_argument("--without-tokenizer", action="store_true", help="leave the tokenizer's files out")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help=f"compare weights and logits afterwards; default below {VERIFIED_BELOW // 10**6} million parameters",
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    chosen = None if arguments.source_format == "auto" else arguments.source_format
    show(f"opening {arguments.source}")
    source = open_weights(arguments.source, format=chosen, step=arguments.step)
    show(f"read     {described(source)}")
    weights = _with_changes(source, arguments)
    dtype = DTYPES.get(arguments.dtype)
    _show_tokenizer(source, weights, arguments)
    total = _bytes(weights, arguments, dtype)
    _need_room(arguments.target, total)
    progress = ByteProgress(total)
    try:
        path = _write(weights, arguments, dtype, progress)
    finally:
        progress.end()
    show_written(path, progress.seconds)
    wanted = arguments.verify
    if wanted is None:
        wanted = parameter_count(weights.model) < VERIFIED_BELOW
        if not wanted:
            show(f"verify   not done: {parameter_count(weights.model):,} parameters; --verify does it")
    return _verified(source, path, arguments.to) if wanted else 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags without effect and values out of range, before anything is read."""
    for name, formats in _ONLY_FOR.items():
        if getattr(arguments, name) not in (None, False) and arguments.to not in formats:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"{flag} has no effect with --to {arguments.to}; remove it, or use --to {' or --to '.join(formats)}"
            )
    for name in ("tp", "pp", "make_vocab_size_divisible_by"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    if arguments.step is not None and arguments.step < 0:
        raise ConfigError(f"--step is {arguments.step}; it must be at least 0")
    if parse_byte_size(arguments.max_shard_size or DEFAULT_SHARD) is None:
        raise ConfigError(
            f"--max-shard-size {arguments.max_shard_size} is no size; write it as 500MB, 2GB or 4GiB"
        )
    if arguments.family is not None:
        family_named(arguments.family)
    check_target(arguments.target)


def _with_changes(source: Weights, arguments: argparse.Namespace) -> Weights:
    weights = source
    if arguments.tokenizer_model is not None:
        weights = WithTokenizer(weights, tokenizer_folder_files(arguments.tokenizer_model))
    elif arguments.without_tokenizer:
        weights = WithTokenizer(weights, ())
    elif arguments.to == "megatron":
        weights = _for_megatron(weights)
    if arguments.make_vocab_size_divisible_by is not None:
        weights = Repadded(weights, arguments.make_vocab_size_divisible_by)
    return weights


def _for_megatron(weights: Weights) -> Weights:
    """Its tokenizer only gives a name there, so one that cannot be had is no obstacle."""
    try:
        named_tokenizer_files(weights.tokenizer_files)
    except ConfigError:
        return WithTokenizer(weights, ())
    return weights


def _show_tokenizer(source: Weights, weights: Weights, arguments: argparse.Namespace) -> None:
    if arguments.to == "megatron":
        show("         no tokenizer goes along with a megatron target: give Megatron-LM its files yourself")
        return
    show(f"         {tokenizer_line(source, weights, left_out=arguments.without_tokenizer)}")
    warning = other_tokenizer(source, weights) if arguments.tokenizer_model is not None else None
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)


def _bytes(weights: Weights, arguments: argparse.Namespace, dtype: torch.dtype | None) -> int:
    """What the tensors will take."""
    if arguments.to == "megatron":
        return written_bytes(weights, dtype=dtype, tp=arguments.tp or 1, pp=arguments.pp or 1)
    model, total = weights.model, 0
    for name, shape in parameter_shapes(model).items():
        size = shape.size
        if arguments.to == "huggingface" and name in ("embedding.word.weight", "head.weight"):
            size = size // model.padded_vocab_size * (model.vocab_size or 0)  # it leaves out the padding
        total += size * (dtype or weights.dtype(name)).itemsize
    return total


def _need_room(target: Path, total: int) -> None:
    """Refuse to start what cannot be finished."""
    workplace = workplace_of(target)
    there = [path for path in workplace.rglob("*") if path.is_file()] if workplace.is_dir() else []
    free = free_bytes(target)
    missing = total - sum(path.stat().st_size for path in there)
    if free is not None and free < missing:
        raise ConversionError(
            f"{target} needs {missing:,} more bytes, free there: {free:,}; make room, or give another"
        )


def _write(
    weights: Weights, arguments: argparse.Namespace, dtype: torch.dtype | None, progress: ByteProgress
) -> Path:
    target, advance = arguments.target, progress.advance

    def log(line: str) -> None:
        show(f"         {line}")

    if arguments.to == "megatron":
        return write_megatron(
            weights,
            target,
            dtype=dtype,
            tp=arguments.tp or 1,
            pp=arguments.pp or 1,
            advance=advance,
            implementation=arguments.transformer_impl or IMPLEMENTATIONS[0],
            log=log,
        )
    size = parse_byte_size(arguments.max_shard_size or DEFAULT_SHARD)
    assert size is not None
    largest = int(size)
    if arguments.to == "native":
        return write_native(weights, target, dtype=dtype, max_file_bytes=largest, advance=advance, log=log)
    family = arguments.family
    return write_huggingface(
        weights, target, dtype=dtype, family=family, max_file_bytes=largest, advance=advance, log=log
    )


def _verified(source: Weights, path: Path, format: Format) -> int:
    columns = shutil.get_terminal_size().columns

    def log(line: str) -> None:
        if sys.stderr.isatty():
            print(
                f"\r{f'verify   {line} ...'[: columns - 1]:<{columns - 1}}",
                end="",
                file=sys.stderr,
                flush=True,
            )

    left = f"the target was written and is left at {path}; do not use it"
    try:
        found = verify(source, open_weights(path, format=format), log=log)
    except ConfigError as error:
        print(f"error: verification failed: {error}; {left}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted while comparing; {path} is complete but was not compared", file=sys.stderr)
        return INTERRUPTED
    if sys.stderr.isatty():
        print(f"\r{'':<{columns - 1}}\r", end="", file=sys.stderr, flush=True)
    for line in found.lines():
        show(f"verify   {line}")
    if not found.passed:
        print(f"error: {path} is not what {source.path} is; {left}", file=sys.stderr)
    return 0 if found.passed else 1
