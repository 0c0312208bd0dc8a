"""`megalite profile`: measure this machine and write a cluster file for the planner."""

import datetime
import shlex
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megalite.cli.display import table
from megalite.cli.output import show
from megalite.config.errors import ConfigError, nearest
from megalite.config.numbers import duration, format_bytes, rate
from megalite.planner.hardware import Cluster, SoftwareStack, assumed_figures, load_stack, save_cluster, save_stack
from megalite.profiling.collectives import Machine, describe_machine
from megalite.profiling.passes import with_passes
from megalite.profiling.run import (
    DTYPES,
    Fitted,
    Measurements,
    check_dtypes,
    describe,
    fit_cluster,
    fit_stack,
    measure,
    stand_in,
)
from megalite.profiling.timing import Timer, Timing
from megalite.topology.group import Group, ProcessGroups
from megalite.topology.layout import ParallelLayout
from megalite.topology.topology import Launch, Topology, joined

LEAST_SECONDS = 1.0

_BASE_STACK = "fused"  # as megalite: flash attention, gradients reduced during the last backward


def run(flags: Namespace) -> int:
    """Measure and write. All ranks must call it together."""
    launch = Launch.from_environment()
    device = launch.device(flags.device)
    dtypes = _dtypes(flags, device)
    with joined(launch, device):
        profile(flags, launch, device, dtypes)
    return 0


def profile(
    flags: Namespace, launch: Launch, device: torch.device, dtypes: Sequence[str], *, reuse: ProcessGroups | None = None
) -> None:
    """Measure on ranks that have joined. Rank 0 prints and writes. `reuse`: see `Topology.create`."""
    layout = ParallelLayout(dp=launch.world_size)
    world = Topology.create(layout, rank=launch.rank, device=device, reuse=reuse).world
    machine, base, nominal, stack = _prepare(flags, world, dtypes)

    def say(line: str) -> None:
        if launch.rank == 0:
            show(line)

    say(f"measuring {describe(machine)}; about {flags.seconds:g} s")
    started = time.monotonic()
    measured = measure(
        machine,
        Timer(device, world, crowded=machine.crowded),
        dtypes=dtypes,
        seconds=flags.seconds,
        reuse=reuse,
        progress=lambda line: say(f"{time.monotonic() - started:5.0f} s  {line}"),
    )
    with world.errors_on_all_ranks():
        if launch.rank == 0:
            _write(flags, measured, base, nominal=nominal, stack=stack)


def _dtypes(flags: Namespace, device: torch.device) -> tuple[str, ...]:
    """Check --seconds and return the dtypes to measure. Needs no other rank."""
    if not LEAST_SECONDS <= flags.seconds < float("inf"):
        raise ConfigError(
            f"--seconds is {flags.seconds:g}; measuring takes at least {LEAST_SECONDS:g} s, 60 s are recommended"
        )
    names = [name for word in flags.dtype or () for name in word.split(",")]
    for name in names:
        if name not in DTYPES:
            raise ConfigError(f"--dtype cannot be {name}{nearest(name, DTYPES)} (one or more of {', '.join(DTYPES)})")
    return tuple(dict.fromkeys(names)) or ("bf16" if device.type == "cuda" else "fp32",)


def _prepare(flags: Namespace, world: Group, dtypes: Sequence[str]) -> tuple[Machine, Cluster, bool, SoftwareStack]:
    """Check all inputs on all ranks before measuring. Return machine, base cluster, whether that is nominal, stack."""
    machine = describe_machine(world)
    with world.errors_on_all_ranks():
        base, nominal = stand_in(machine, flags.like)
        stack = load_stack(_BASE_STACK)
        if world.rank == 0:
            for path in (flags.output, flags.output_stack):
                _check_writable(path)
            if flags.output == flags.output_stack:
                other = flags.output.with_name(flags.output.stem + "-stack.yaml")
                raise ConfigError(f"--output and --output-stack are both {flags.output}; give two files, e.g. {other}")
    check_dtypes(dtypes, world)
    return machine, base, nominal, stack


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
    cluster, errors = fitted
    own = fit_stack(measured, cluster, stack, name=name, source=source)
    if measured.passes:
        least = measured.overheads.operation.seconds
        own, errors["passes"] = with_passes(measured.passes, cluster, own, source=source, least_operation=least)
    save_cluster(cluster, flags.output)
    if flags.output_stack is not None:
        save_stack(own, flags.output_stack)
    show(format_profile(measured, fitted, own, base if nominal else None))
    show(f"wrote {flags.output}" + (f" and {flags.output_stack}" if flags.output_stack else ""))


NOISY = 0.25  # rows with a larger spread are marked

_Row = tuple[list[str], Timing, float, float | None]  # cells, time, speed per second, peak speed


def format_profile(measured: Measurements, fitted: Fitted, stack: SoftwareStack, nominal: Cluster | None) -> str:
    """Return tables of the measurements and the fitted constants. `nominal`: cluster with the vendor's figures of this
    accelerator, if known."""
    shown = [*_tables(measured, nominal), _constants(measured, fitted, stack)]
    groups = (measured.gemms, measured.attention, measured.memory, measured.passes, measured.collectives)
    timings = [row.timing for rows in groups for row in rows]
    timings += [measured.overheads.operation, measured.overheads.step]
    noisy = sum(timing.spread > NOISY for timing in timings)
    if noisy:
        shown.append(
            f"* {noisy} of {len(timings)} measurements spread by more than {NOISY:.0%}: other programs run on this machine, or "
            "--seconds is too short"
        )
    return "\n\n".join(shown)


def _tables(measured: Measurements, nominal: Cluster | None) -> Iterator[str]:
    peaks = {} if nominal is None else nominal.accelerator.peak_flops
    bandwidth, shares = None if nominal is None else nominal.accelerator.memory_bandwidth, nominal is not None
    rows: list[_Row] = [
        (
            [f"{gemm.dtype} {gemm.product}", f"{gemm.m} x {gemm.n} x {gemm.k}"],
            gemm.timing,
            gemm.flops_per_second,
            peaks.get(gemm.dtype),
        )
        for gemm in measured.gemms
    ]
    yield _table("Matrix products", ["product", "m x n x k"], rows, "FLOP/s", "F", shares=shares)
    rows = []
    for each in measured.attention:
        kind = f"{each.dtype} {'backward' if each.backward else 'forward'}"
        sizes = f"{each.shape.b} x {each.shape.heads} x {each.shape.s} x {each.shape.d}"
        rows.append(([kind, sizes], each.timing, each.flops_per_second, None))
    title = "Attention, by the FLOPs of all scores"
    yield _table(title, ["attention", "b x heads x s x d"], rows, "FLOP/s", "F")
    rows = [
        ([time.operation, f"{time.elements}"], time.timing, time.bytes_per_second, bandwidth)
        for time in measured.memory
    ]
    yield _table("Memory", ["pass", "elements"], rows, "bytes/s", "B", shares=shares)
    if not measured.passes:
        yield "Passes of small stages are measured only on CPUs"
    else:
        rows = []
        for one_pass in measured.passes:
            shape = one_pass.shape
            name = f"{shape.family} {'forward and backward' if one_pass.backward else 'forward'}"
            sizes_of = [shape.hidden, shape.sequence, shape.layers, shape.vocabulary or "-"]
            rows.append(([name, *map(str, sizes_of)], one_pass.timing, 0.0, None))
        head = ["pass", "hidden", "sequence", "layers", "vocabulary"]
        yield _table("Passes of small stages, one sequence", head, rows)
    if not measured.collectives:
        yield "Communication was not measured: start several ranks with torchrun"
        return
    rows = [
        (
            [f"{sent.operation} {sent.place}", str(sent.ranks), format_bytes(sent.message_bytes)],
            sent.timing,
            sent.bytes_per_second,
            None,
        )
        for sent in sorted(measured.collectives, key=lambda sent: (sent.place, sent.operation, sent.ranks))
    ]
    yield _table("Between ranks, all groups at once", ["operation", "ranks", "tensor"], rows, "sent/s", "B")


def _table(
    title: str, head: list[str], rows: Sequence[_Row], speed: str = "", unit: str = "", *, shares: bool = False
) -> str:
    """Return a table with a left-aligned first column. `speed`: heading of the speed column; empty: no such column."""
    lines = [[*head, "time", "spread", *([speed] if speed else []), *(["of peak"] if shares else [])]]
    for cells, timing, per_second, peak in rows:
        spread = f"{timing.spread:.0%}{'*' if timing.spread > NOISY else ''}"
        share = [f"{per_second / peak:.0%}" if peak else "-"] if shares else []
        lines.append([*cells, duration(timing.seconds), spread, *([rate(per_second, unit)] if speed else []), *share])
    return "\n".join([title, *table(lines, right=range(1, len(lines[0])), indent=2)])


def _constants(measured: Measurements, fitted: Fitted, stack: SoftwareStack) -> str:
    """Return the fitted constants, and the mean error of the planner's formulas with them."""
    cluster, mean_errors = fitted
    accelerator, node, network, share = cluster.accelerator, cluster.node, cluster.network, cluster.efficiency
    crowd = []
    if measured.turns is not None:
        crowd.append(
            f"  {measured.machine.ranks_per_core:g} ranks per core: if every second one waits, the others are "
            f"{measured.turns.speedup:.2f} times as fast; effectively {node.ranks_per_core:.2f} ranks per core"
        )
    errors = ", ".join(f"{name} {error:.0%}" for name, error in mean_errors.items())
    peaks = ", ".join(f"{name} {rate(peak, 'F')}" for name, peak in accelerator.peak_flops.items())
    lines = [
        f"Cluster {cluster.name}: {cluster.description}",
        f"  peak {peaks}; products reach {share.gemm:.0%}, each operation adds {duration(accelerator.kernel_seconds)}",
        f"  memory {rate(accelerator.memory_bandwidth, 'B')}/s, operations reach {share.memory:.0%}",
        f"  node: {node.accelerators} accelerators, link {rate(node.link_bandwidth, 'B')}/s, latency "
        f"{duration(node.link_latency)} per step of a collective and "
        f"{duration(node.message_steps * node.link_latency)} per message; collectives reach {share.link:.0%}, messages "
        f"{share.p2p:.0%}",
        *crowd,
        f"  network: {network.nics} x {rate(network.nic_bandwidth, 'B')}/s, latency {duration(network.latency)}; "
        f"collectives reach {share.network:.0%}",
        f"  host: {duration(stack.operation_seconds)} per operation, {duration(stack.microbatch_seconds)} per pass of a "
        f"stage, {duration(stack.step_seconds)} per step; fused attention at {stack.attention_efficiency:.0%} of products",
        f"  operations between products take {stack.elementwise_slowdown:.1f} times as long as their memory traffic",
        f"  not measured: {', '.join(assumed_figures(cluster.provenance))}",
        f"  mean error of the planner's formulas: {errors}",
    ]
    return "\n".join(lines)
