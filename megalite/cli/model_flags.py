"""What `generate` and `evaluate` have in common: the layout and the model that the flags name."""

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from megalite.config.errors import ConfigError, RankError
from megalite.conversion.inference import InferenceModel, TokenizerChoice, load_model
from megalite.conversion.native import PRECISIONS
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, start_distributed, stop_distributed

DTYPES = {name: dtype for dtype, name in PRECISIONS.items()}


def refuse_given(flags: Namespace, names: Sequence[str], why: str) -> None:
    """Raise ConfigError if one of these flags is given, which has no effect: `why`."""
    for name in names:
        value = getattr(flags, name)
        if value is not None:
            raise ConfigError(f"--{name.replace('_', '-')} {value} has no effect {why}; leave it out")


def layout_of(flags: Namespace, world_size: int, *, data_parallel: bool) -> ParallelLayout:
    """The layout that the flags and the number of ranks make.

    Ranks that neither --tp nor --pp speaks of are one tp group, or with `data_parallel` replicas of the model.

    Raises:
        ConfigError: they do not fit.
    """
    for axis, instead in (("cp", "a sequence is not split"), ("ep", "experts are split by --tp")):
        if getattr(flags, axis) != 1:
            raise ConfigError(
                f"--{axis} {getattr(flags, axis)}: there is no {axis} here ({instead}); leave it out and use --tp and --pp"
            )
    pp = flags.pp or 1
    tp = flags.tp or (1 if data_parallel else max(1, world_size // pp))
    if world_size % (tp * pp) or (world_size != tp * pp and not data_parallel):
        works = (tp, world_size // tp) if world_size % tp == 0 else (world_size, 1)
        raise ConfigError(
            f"tp {tp} x pp {pp} = {tp * pp} does not fit the {world_size} rank{'s' if world_size > 1 else ''} that were "
            f"started; use --tp {works[0]} --pp {works[1]}, or start {tp * pp} (torchrun --nproc-per-node {tp * pp})"
        )
    return ParallelLayout(tp=tp, pp=pp, dp=world_size // (tp * pp))


def open_model(flags: Namespace, topology: Topology, *, needs_tokenizer: bool = True) -> InferenceModel:
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


def run_on_ranks(
    flags: Namespace,
    check: Callable[[Namespace], None],
    work: Callable[[Namespace, Topology], None],
    *,
    data_parallel: bool,
) -> int:
    """Join the other ranks and work; returns the exit status.

    Args:
        check: of the flags alone, before anything is started.
        data_parallel: see `layout_of`.

    Raises:
        ConfigError: bad input.
    """
    agreed = False
    try:
        launch = Launch.from_environment()
        TokenizerChoice(flags.tokenizer_model, flags.tiktoken_pattern)
        check(flags)
        layout = layout_of(flags, launch.world_size, data_parallel=data_parallel)
        device = launch.device(flags.device)
        start_distributed(launch, device, backend="auto", timeout_minutes=10.0)
        work(flags, Topology.create(layout, rank=launch.rank, device=device))
        agreed = True
    except ConfigError as error:
        agreed = not isinstance(error, RankError)
        raise
    finally:
        stop_distributed(agreed=agreed)
    return 0
