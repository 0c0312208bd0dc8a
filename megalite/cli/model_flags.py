"""What `generate` and `evaluate` have in common: flags that name a model and its layout, and the model itself."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from megalite.cli.parser import Parser
from megalite.config.errors import ConfigError, RankError
from megalite.conversion.inference import InferenceModel, load_model
from megalite.conversion.inference_tokenizer import TokenizerChoice
from megalite.conversion.native import PRECISIONS
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed

DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


def add_model_flags(parser: argparse.ArgumentParser, *, tp_default: str) -> None:
    """--load and what goes with it; `tp_default` is what the help says of --tp."""
    parser.add_argument(
        "--load",
        required=True,
        type=Path,
        metavar="FOLDER",
        help="checkpoints (the newest that verifies is used), one checkpoint, or a Hugging Face model",
    )
    parser.add_argument("--ckpt-step", type=int, metavar="N", help="use the checkpoint of this step instead")
    parser.add_argument("--tp", type=int, metavar="N", help=f"tensor parallel ranks ({tp_default})")
    parser.add_argument("--pp", type=int, metavar="N", help="pipeline parallel ranks (1)")
    for axis in ("cp", "ep"):
        parser.add_argument(f"--{axis}", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="to compute in; default: as stored")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(auto)")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="default: the model's own")
    parser.add_argument(
        "--tiktoken-pattern", metavar="NAME", help="with --tokenizer-model: how its words are cut"
    )


def layout_of(flags: argparse.Namespace, world_size: int, *, data_parallel: bool) -> ParallelLayout:
    """The layout that the flags and the number of ranks make.

    Ranks that neither --tp nor --pp speaks of are one tp group, or with `data_parallel` replicas of the model.

    Args:
        data_parallel: ranks beyond tp x pp share out the work; else there must be none.

    Raises:
        ConfigError: they do not fit.
    """
    for axis, instead in (("cp", "a sequence is not split"), ("ep", "experts are split by --tp")):
        if getattr(flags, axis) != 1:
            raise ConfigError(
                f"--{axis} {getattr(flags, axis)}: there is no {axis} here ({instead}); leave it out and use --tp and --pp"
            )
    for name in ("tp", "pp"):
        if getattr(flags, name) is not None and getattr(flags, name) < 1:
            raise ConfigError(f"--{name} is {getattr(flags, name)}; it must be at least 1")
    pp = flags.pp or 1
    tp = flags.tp or (1 if data_parallel else max(1, world_size // pp))
    if world_size % (tp * pp) or (world_size != tp * pp and not data_parallel):
        works = (tp, world_size // tp) if world_size % tp == 0 else (world_size, 1)
        raise ConfigError(
            f"tp {tp} x pp {pp} = {tp * pp} does not fit the {world_size} rank{'s' if world_size > 1 else ''} that were "
            f"started; use --tp {works[0]} --pp {works[1]}, or start {tp * pp} (torchrun --nproc-per-node {tp * pp})"
        )
    return ParallelLayout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def open_model(
    flags: argparse.Namespace, topology: Topology, *, needs_tokenizer: bool = True
) -> InferenceModel:
    """The model that the flags name, on the ranks of the topology.

    Raises:
        ConfigError: see `load_model`.
    """

    def log(line: str) -> None:
        if topology.rank == 0:
            print(line, file=sys.stderr)

    return load_model(
        flags.load,
        topology,
        step=flags.ckpt_step,
        dtype=DTYPES.get(flags.dtype),
        tokenizer=TokenizerChoice(flags.tokenizer_model, flags.tiktoken_pattern),
        needs_tokenizer=needs_tokenizer,
        log=log,
    )


class Ranks(NamedTuple):
    """Where this process stands."""

    flags: argparse.Namespace
    topology: Topology


def run_on_ranks(
    parser: Parser,
    argv: Sequence[str],
    check: Callable[[argparse.Namespace], object],
    run: Callable[[Ranks], None],
    *,
    data_parallel: bool,
) -> int:
    """Read the flags, join the other ranks and run; returns the exit status.

    Args:
        check: of the flags alone, before anything is started.
        data_parallel: see `layout_of`.

    Raises:
        ConfigError: bad input.
    """
    agreed = False
    try:
        launch = Launch.from_environment()
        flags = parser.parse_args(argv)
        TokenizerChoice(flags.tokenizer_model, flags.tiktoken_pattern)
        check(flags)
        layout = layout_of(flags, launch.world_size, data_parallel=data_parallel)
        device = launch.device(flags.device)
        start_distributed(launch, device, backend="auto", timeout_minutes=10.0)
        run(Ranks(flags, Topology.create(layout, rank=launch.rank, device=device)))
        agreed = True
    except ConfigError as error:
        agreed = not isinstance(error, RankError)
        raise
    finally:
        stop_distributed(agreed=agreed)
    return 0
