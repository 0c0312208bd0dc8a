"""What `generate` and `evaluate` have in common: flags that name a model and its layout, and the model itself."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megalite.cli.parser import Parser
from megalite.config.errors import ConfigError, RankError
from megalite.conversion.inference import InferenceModel, TokenizerChoice, load_model
from megalite.conversion.native import PRECISIONS
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed

DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


def refuse_given(flags: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if one of these flags is given, which has no effect: `why`."""
    for name in names:
        value = getattr(flags, name)
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {value} has no effect {why}; leave it out")


def check_positive(flags: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ConfigError if one of these flags is given and below 1."""
    for name in names:
        value = getattr(flags, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")


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
    check_positive(flags, ("tp", "pp"))
    pp = flags.pp or 1
    tp = flags.tp or (1 if data_parallel else max(1, world_size // pp))
    if world_size % (tp * pp) or (world_size != tp * pp and not data_parallel):
        works = (tp, world_size // tp) if world_size % tp == 0 else (world_size, 1)
        raise ConfigError(
            f"tp {tp} x pp {pp} = {tp * pp} does not fit the {world_size} rank{'s' if world_size > 1 else ''} that were "
            f"started; use --tp {works[0]} --pp {works[1]}, or start {tp * pp} (torchrun --nproc-per-node {tp * pp})"
        )
    return ParallelLayout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def open_model(flags: argparse.Namespace, topology: Topology, *, needs_tokenizer: bool = True) -> InferenceModel:
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
