"""What `megalite profile` measured, as tables."""

from collections.abc import Sequence

from megalite.cli.display import duration, rate, table
from megalite.config.byte_size import format_bytes
from megalite.planner.hardware import Cluster, SoftwareStack
from megalite.profiling.files import Fitted
from megalite.profiling.operations import MemoryTime
from megalite.profiling.run import Measurements
from megalite.profiling.timing import Timing

NOISY = 0.25  # spread above which a row is marked


def format_profile(measured: Measurements, fitted: Fitted, stack: SoftwareStack, nominal: Cluster | None) -> str:
    """Tables of what was measured, then the constants that came of it. `nominal`: the cluster with the vendor's figures
    of this accelerator, if there is one."""
    parts = [
        _gemms(measured, nominal),
        _attention(measured),
        _memory(measured, nominal),
        _passes(measured),
        _collectives(measured),
        _constants(measured, fitted, stack),
    ]
    noisy = [timing for timing in _timings(measured) if timing.spread > NOISY]
    if noisy:
        parts.append(
            f"* {len(noisy)} of {len(_timings(measured))} measurements spread by more than {NOISY:.0%}: something else "
            "runs here, or --seconds is short"
        )
    return "\n\n".join(part for part in parts if part)


def _timings(measured: Measurements) -> list[Timing]:
    groups = (measured.gemms, measured.attention, measured.memory, measured.passes, measured.collectives)
    small = [measured.overheads.operation, measured.overheads.step]
    return [row.timing for rows in groups for row in rows] + small


def _table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, the others to the right."""
    return "\n".join([title, *table([header, *rows], right=range(1, len(header)), indent=2)])


def _time(timing: Timing) -> list[str]:
    mark = "*" if timing.spread > NOISY else ""
    return [duration(timing.seconds), f"{timing.spread:.0%}{mark}"]


def _gemms(measured: Measurements, nominal: Cluster | None) -> str:
    header = ["product", "m x n x k", "time", "spread", "FLOP/s", *(["of peak"] if nominal else [])]
    rows = []
    for time in measured.gemms:
        peak = nominal.accelerator.peak_flops.get(time.dtype) if nominal else None
        share = [f"{time.flops_per_second / peak:.0%}" if peak else "-"] if nominal else []
        sizes = f"{time.m} x {time.n} x {time.k}"
        speed = rate(time.flops_per_second, "F")
        rows.append([f"{time.dtype} {time.product}", sizes, *_time(time.timing), speed, *share])
    return _table("Matrix products", header, rows)


def _attention(measured: Measurements) -> str:
    rows = [
        [
            f"{time.dtype} {time.kind} {'backward' if time.backward else 'forward'}",
            f"{time.shape.b} x {time.shape.heads} x {time.shape.s} x {time.shape.d}",
            *_time(time.timing),
            rate(time.flops_per_second, "F"),
        ]
        for time in measured.attention
    ]
    header = ["attention", "b x heads x s x d", "time", "spread", "FLOP/s"]
    return _table("Attention, by the FLOPs of all scores", header, rows)


def _memory(measured: Measurements, nominal: Cluster | None) -> str:
    peak = nominal.accelerator.memory_bandwidth if nominal else None
    header = ["pass", "elements", "time", "spread", "bytes/s", *(["of peak"] if peak else [])]

    def of_peak(time: MemoryTime) -> list[str]:
        return [f"{time.bytes_per_second / peak:.0%}"] if peak else []

    rows = [
        [time.operation, f"{time.elements}", *_time(time.timing), rate(time.bytes_per_second, "B"), *of_peak(time)]
        for time in measured.memory
    ]
    return _table("Memory", header, rows)


def _passes(measured: Measurements) -> str:
    if not measured.passes:
        return "Passes of small stages are measured on CPUs alone"
    rows = [
        [
            f"{time.shape.family} {'forward and backward' if time.backward else 'forward'}",
            f"{time.shape.hidden}",
            f"{time.shape.sequence}",
            f"{time.shape.layers}",
            f"{time.shape.vocabulary or '-'}",
            *_time(time.timing),
        ]
        for time in measured.passes
    ]
    header = ["pass", "hidden", "sequence", "layers", "vocabulary", "time", "spread"]
    return _table("Passes of small stages, one sequence", header, rows)


def _collectives(measured: Measurements) -> str:
    rows = [
        [
            f"{time.operation} {time.place}",
            str(time.ranks),
            format_bytes(time.message_bytes),
            *_time(time.timing),
            rate(time.bytes_per_second, "B"),
        ]
        for time in sorted(measured.collectives, key=lambda time: (time.place, time.operation, time.ranks))
    ]
    if not rows:
        return "Between ranks nothing was measured: start several with torchrun"
    header = ["operation", "ranks", "tensor", "time", "spread", "sent/s"]
    return _table("Between ranks, all groups at once", header, rows)


def _constants(measured: Measurements, fitted: Fitted, stack: SoftwareStack) -> str:
    """What the files say, and how well the planner's formulas give the measured times with it."""
    cluster = fitted.cluster
    accelerator, node, network, share = cluster.accelerator, cluster.node, cluster.network, cluster.efficiency
    crowd = []
    if measured.turns is not None:
        crowd.append(
            f"  {measured.machine.ranks_per_core:g} ranks per core: with every second one waiting the others are "
            f"{measured.turns.speedup:.2f} times as fast, which makes {node.ranks_per_core:.2f}"
        )
    assumed = ", ".join(key for key, text in cluster.provenance.items() if text.startswith("assumed")) or "nothing"
    errors = ", ".join(f"{name} {error:.0%}" for name, error in fitted.errors.items())
    peaks = ", ".join(f"{name} {rate(peak, 'F')}" for name, peak in accelerator.peak_flops.items())
    lines = [
        f"Cluster {cluster.name}: {cluster.description}",
        f"  peak {peaks}; products reach {share.gemm:.0%}, an operation {duration(accelerator.kernel_seconds)} more",
        f"  memory {rate(accelerator.memory_bandwidth, 'B')}/s, operations reach {share.memory:.0%}",
        f"  in a node {node.accelerators} accelerators, link {rate(node.link_bandwidth, 'B')}/s, latency "
        f"{duration(node.link_latency)} a step of a collective and {duration(node.message_steps * node.link_latency)} a "
        f"message; collectives reach {share.link:.0%}, messages {share.p2p:.0%}",
        *crowd,
        f"  across nodes {network.nics} x {rate(network.nic_bandwidth, 'B')}/s, latency {duration(network.latency)}; "
        f"collectives reach {share.network:.0%}",
        f"  the host: {duration(stack.operation_seconds)} an operation, {duration(stack.microbatch_seconds)} a pass of a "
        f"stage, {duration(stack.step_seconds)} a step; fused attention at {stack.attention_efficiency:.0%} of products",
        f"  operations between products take {stack.elementwise_slowdown:.1f} times as long as their bytes",
        f"  not measured: {assumed}",
        f"  formulas beside measured times, mean error: {errors}",
    ]
    return "\n".join(lines)
