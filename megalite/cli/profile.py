"""`megalite profile`: measures this machine and writes a cluster file for the planner."""

import dataclasses
import datetime
import shlex
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from megalite.cli.output import show
from megalite.cli.profile_text import format_profile
from megalite.cli.tool_commands import PROFILE
from megalite.config.errors import ConfigError
from megalite.config.values import nearest
from megalite.planner.hardware import Cluster, SoftwareStack, load_stack, save_cluster, save_stack
from megalite.profiling.collectives import Machine, describe_machine
from megalite.profiling.files import describe, fit_cluster, fit_stack, stand_in
from megalite.profiling.passes import with_passes
from megalite.profiling.run import DTYPES, Measurements, check_dtypes, default_dtypes, measure
from megalite.profiling.timing import Timer
from megalite.topology.group import Group
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, ProcessGroups, Topology, start_distributed, stop_distributed

LEAST_SECONDS = 1.0

_BASE_STACK = "fused"  # what megalite itself runs: flash attention, gradients summed during the last backward


main = PROFILE


def run(flags: Namespace, *, launch: Launch | None = None, made: ProcessGroups | None = None) -> int:
    """Measure and write. Every rank calls it at the same time; rank 0 prints and writes. `launch`: of a job that has
    been joined already; default: what torchrun says. `made`: process groups to re-use, as for `Topology.create`."""
    joined = launch is not None
    launch = launch or Launch.from_environment()
    device = launch.device(flags.device)
    dtypes = _dtypes(flags, device)
    agreed = False
    try:
        if not joined:
            start_distributed(launch, device, backend="auto", timeout_minutes=10.0)
        layout = ParallelLayout(dp=launch.world_size)
        world = Topology.create(layout, rank=launch.rank, device=device, made=made).world
        machine, base, nominal, stack = _prepare(flags, world, device, dtypes)
        timer = Timer(device, world, crowded=machine.crowded)

        def say(line: str) -> None:
            if launch.rank == 0:
                show(line)

        say(f"measuring {describe(machine)}; about {flags.seconds:g} s")
        started = time.monotonic()
        measured = measure(
            machine,
            timer,
            dtypes=dtypes,
            seconds=flags.seconds,
            made=made,
            progress=lambda line: say(f"{time.monotonic() - started:5.0f} s  {line}"),
        )
        error: ConfigError | None = None
        if launch.rank == 0:
            try:
                _write(flags, measured, base, nominal=nominal, stack=stack)
            except ConfigError as found:
                error = found
        world.agree(error, device)
        agreed = True
    except ConfigError:
        agreed = True
        raise
    finally:
        if not joined:
            stop_distributed(agreed=agreed)
    return 0


def _dtypes(flags: Namespace, device: torch.device) -> tuple[str, ...]:
    """What to measure, and the other numbers of the command line; needs no other rank."""
    if not LEAST_SECONDS <= flags.seconds < float("inf"):
        raise ConfigError(
            f"--seconds is {flags.seconds:g}; measuring takes at least {LEAST_SECONDS:g} s, and 60 are good"
        )
    names = [name for word in flags.dtype or () for name in word.split(",")]
    for name in names:
        if name not in DTYPES:
            raise ConfigError(f"--dtype cannot be {name}{nearest(name, DTYPES)} (one or more of {', '.join(DTYPES)})")
    return tuple(dict.fromkeys(names)) or default_dtypes(device)


def _prepare(
    flags: Namespace, world: Group, device: torch.device, dtypes: Sequence[str]
) -> tuple[Machine, Cluster, bool, SoftwareStack]:
    """All that can be wrong is found here, on every rank, before anything is measured."""
    machine = describe_machine(world, device)
    error: ConfigError | None = None
    prepared = None
    try:
        base, nominal = stand_in(machine, flags.like)
        prepared = base, nominal, load_stack(_BASE_STACK)
        if world.rank == 0:
            for path in (flags.output, flags.output_stack):
                _check_writable(path)
            if flags.output == flags.output_stack:
                raise ConfigError(
                    f"--output and --output-stack are both {flags.output}; they are two files, e.g. --output-stack "
                    f"{flags.output.with_name(flags.output.stem + '-stack.yaml')}"
                )
    except ConfigError as found:
        error = found
    world.agree(error, device)
    assert prepared is not None
    check_dtypes(dtypes, world, device)
    return machine, *prepared


def _check_writable(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give the name of a file, e.g. {path / 'my-cluster.yaml'}")
    if path.suffix not in (".yaml", ".yml"):
        raise ConfigError(f"cluster and stack files end in .yaml, got {path}; e.g. {path.with_suffix('.yaml')}")
    try:
        if path.exists():
            with path.open("a"):
                pass
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; give a file in a folder that exists and can be written"
        ) from None


def _write(flags: Namespace, measured: Measurements, base: Cluster, *, nominal: bool, stack: SoftwareStack) -> None:
    machine, today = measured.machine, datetime.date.today().isoformat()
    command = shlex.join(["megalite", "profile", *flags.words])
    source = f"measured on {today} on {machine.device_name}, torch {machine.torch_version}, by {command}"
    if machine.ranks > 1:
        source += f" on {machine.ranks} ranks"
    name = flags.name or flags.output.stem
    fitted = fit_cluster(measured, base, nominal=nominal, name=name, source=source)
    own = fit_stack(measured, fitted.cluster, stack, name=name, source=source)
    if measured.passes:
        least = measured.overheads.operation.seconds
        own, error = with_passes(measured.passes, fitted.cluster, own, source=source, least_operation=least)
        fitted = dataclasses.replace(fitted, errors={**fitted.errors, "passes": error})
    save_cluster(fitted.cluster, flags.output)
    if flags.output_stack is not None:
        save_stack(own, flags.output_stack)
    show(format_profile(measured, fitted, own, base if nominal else None))
    show(f"wrote {flags.output}" + (f" and {flags.output_stack}" if flags.output_stack else ""))


if __name__ == "__main__":
    sys.exit(main())
