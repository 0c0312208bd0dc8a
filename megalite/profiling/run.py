"""Runs all measurements within a time budget, and fits a cluster file and a stack file to them."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from megalite.config.describe import replace
from megalite.config.errors import ConfigError, plural
from megalite.partition.activations import ELEMENT_BYTES
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import gemm_seconds, workload_of
from megalite.planner.cost.stage import layer_parts
from megalite.planner.hardware import Accelerator, Cluster, Network, SoftwareStack, cluster_names, load_cluster
from megalite.profiling import collectives as between
from megalite.profiling import operations as pieces
from megalite.profiling import passes as stages
from megalite.profiling.timing import Timer, fit_times
from megalite.topology.group import Group, ProcessGroups

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_WEIGHTS = {"gemm": 0.2, "attention": 0.1, "memory": 0.1, "overheads": 0.05, "passes": 0.25, "collectives": 0.3}
"""Shares of the time. Parts that are not measured (with one rank, or on a GPU) leave their share to the others."""

_TURNS = 0.15  # share of the time for collectives that `measure_turns` takes, if ranks outnumber the cores

_PLACES = {"inside": "inside a node", "memory": "through memory that ranks share", "across": "across nodes"}
_SAMPLES = 6
"""Fewest runs of an operation, including warm-up: sizes that take more than a sixth of their time are not chosen."""


@dataclass(kw_only=True)
class Measurements:
    machine: between.Machine
    dtypes: Sequence[str]
    overheads: stages.Overheads
    gemms: list[pieces.GemmTime] = field(default_factory=list)
    attention: list[pieces.AttentionTime] = field(default_factory=list)
    memory: list[pieces.MemoryTime] = field(default_factory=list)
    passes: list[stages.PassTime] = field(default_factory=list)  # only on a CPU
    collectives: list[between.CollectiveTime] = field(default_factory=list)
    turns: between.TurnTime | None = None  # only if ranks outnumber cores


def check_dtypes(names: Sequence[str], world: Group) -> None:
    """Try a product of each dtype. Raises ConfigError on every rank if some rank's device does not support one.

    Collectives: a gather over the world."""
    with world.errors_on_all_ranks():
        for name in names:
            try:
                x = torch.ones(16, 16, device=world.device).to(DTYPES[name])
                x @ x
                if name == "bf16" and world.device.type == "cuda" and not torch.cuda.is_bf16_supported(False):
                    raise RuntimeError("only in emulation")
            except RuntimeError as error:
                works, reason = "fp16" if name == "fp32" else "fp32", str(error).splitlines()[0]
                raise ConfigError(
                    f"--dtype {name} is not supported on {world.device.type} here ({reason}); use --dtype {works}"
                ) from None


def measure(
    machine: between.Machine,
    timer: Timer,
    *,
    dtypes: Sequence[str],
    seconds: float,
    reuse: ProcessGroups | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Measurements:
    """Measure for about `seconds`. Every rank calls it at the same time; `reuse` is as for `Topology.create`.

    Collectives: the measured ones, and barriers and gathers over the timer's world."""
    left_out = set() if machine.ranks > 1 else {"collectives"}
    if machine.device_type != "cpu":
        left_out.add("passes")
    weights = {name: weight for name, weight in _WEIGHTS.items() if name not in left_out}
    share = {name: seconds * weight / sum(weights.values()) for name, weight in weights.items()}
    most_bytes = machine.memory_bytes / 8
    progress("small operations")
    overheads = stages.measure_overheads(timer, dtype=DTYPES[dtypes[0]], seconds=share["overheads"])
    found = Measurements(machine=machine, dtypes=dtypes, overheads=overheads)
    for name in dtypes:
        dtype = DTYPES[name]
        progress(f"matrix products in {name}")
        rate = pieces.first_rate(timer, dtype)
        budget = share["gemm"] / len(dtypes)
        # 0.1 s for each of three products per shape, but at least four shapes.
        count = max(4, min(16, int(budget / 0.3)))
        most = rate * budget / (3 * count * _SAMPLES)
        shapes = pieces.chosen_shapes(count=count, most_flops=most, most_bytes=most_bytes, itemsize=dtype.itemsize)
        found.gemms += pieces.measure_gemms(timer, dtype=dtype, name=name, shapes=shapes, seconds=budget)
        progress(f"attention in {name}")
        budget = share["attention"] / len(dtypes)
        # Attention reaches a fraction of the rate of plain products.
        most = rate * budget / (2 * 8 * _SAMPLES) / 2
        heads = pieces.attention_shapes(most_flops=most, most_bytes=most_bytes)
        found.attention += pieces.measure_attention(timer, dtype=dtype, name=name, shapes=heads, seconds=budget)
    progress("memory")
    # Four tensors of the largest size; at most 15 measurements.
    most = pieces.first_bandwidth(timer) * share["memory"] / (15 * _SAMPLES * pieces.ADAM_BYTES)
    sizes = pieces.tensor_sizes(most_elements=min(most, most_bytes / 16))
    found.memory += pieces.measure_memory(timer, sizes=sizes, seconds=share["memory"])
    if "passes" in share:
        progress("passes of small stages")
        name, dtype, seconds = dtypes[0], DTYPES[dtypes[0]], share["passes"]
        most = pieces.first_rate(timer, dtype) * seconds / (2 * len(stages.SHAPES) * _SAMPLES)
        found.passes += stages.measure_passes(timer, dtype=dtype, name=name, most_flops=most, seconds=seconds)
    if machine.ranks > 1:
        places = between.make_groups(machine, timer.world.rank, timer.device, reuse=reuse)
        seconds = share["collectives"]
        if machine.crowded and places[0].place == "inside":
            progress("speed of ranks while others wait")
            found.turns = between.measure_turns(timer, places[0], seconds=_TURNS * seconds)
            seconds *= 1.0 - _TURNS
        for measured in places:
            progress(f"collectives {_PLACES[measured.place]}")
            budget = seconds / len(places)
            kinds = 1 + 4 * len(measured.groups)
            count = max(3, min(7, int(budget / kinds / 0.1)))
            largest = _largest_message(timer, measured, budget / kinds / count)
            sizes = between.message_sizes(largest=min(largest, int(most_bytes / 4), 1 << 28), count=count)
            found.collectives += between.measure_collectives(timer, measured, sizes=sizes, seconds=budget)
    return found


def _largest_message(timer: Timer, measured: between.MeasuredGroups, seconds: float) -> int:
    """Return the bytes that an all-reduce over the largest group moves in a sixth of `seconds`, at least 1 MiB."""
    group, trial = measured.groups[-1], 1 << 20
    tensor = torch.zeros(trial // 4, device=timer.device)
    once = timer.over_ranks(timer.together(lambda: group.all_reduce(tensor), seconds=0.0)).seconds
    return max(trial, int(trial * seconds / (_SAMPLES * once)))


def stand_in(machine: between.Machine, like: str | None) -> tuple[Cluster, bool]:
    """Return the cluster (name or file `like`) with figures for what is not measured, and whether it has the same
    accelerator. Raises ConfigError if `like` is None and no cluster file has this accelerator."""
    if like is not None:
        base = load_cluster(like)
        return base, _same_accelerator(machine, base)
    if machine.device_type == "cpu":
        return load_cluster("cpu-box"), False
    for name in cluster_names():
        base = load_cluster(name)
        if _same_accelerator(machine, base):
            return base, True
    raise ConfigError(f"{machine.device_name} is in no cluster file; give --like {', '.join(cluster_names())}")


def _same_accelerator(machine: between.Machine, base: Cluster) -> bool:
    """Return whether names and memory match. PCIe cards do not match, because their clocks are lower."""
    model = base.accelerator.name.split("-")[0]
    words = machine.device_name.replace("-", " ").split()
    close = abs(machine.memory_bytes / base.accelerator.memory_bytes - 1) < 0.1
    return machine.device_type == "cuda" and model in words and close and "PCI" not in machine.device_name.upper()


Fitted = tuple[Cluster, dict[str, float]]  # a cluster, and for each part the mean of |formula / measured - 1|


def fit_cluster(measured: Measurements, base: Cluster, *, nominal: bool, name: str, source: str) -> Fitted:
    """Fit a cluster to measurements. `base`: cluster with figures for what was not measured. `nominal`: the base has
    the same accelerator, so peaks are the vendor's and efficiencies are shares of them. Otherwise peaks are the highest
    measured rates. `source`: date, software and method of the measurement, for the provenance."""
    machine = measured.machine
    provenance = {key: f"assumed, from cluster {base.name}" for key in base.provenance}
    accelerator, gemm, memory, errors = _fit_accelerator(measured, base, nominal=nominal)
    vendor = f"vendor, from cluster {base.name}"
    rates = f"{vendor}; kernel_seconds {source}" if nominal else f"highest rates {source}"
    provenance["accelerator"] = f"{rates}; host_bandwidth assumed"
    provenance["efficiency.gemm"] = f"fitted on {measured.dtypes[0]} products {source}"
    provenance["efficiency.memory"] = source
    crowd = machine.ranks_per_core
    if measured.turns is not None:
        # Multiply by the part of the possible speedup that was reached while every second rank waited.
        crowd = max(1.0, crowd * min(1.0, measured.turns.speedup / min(2.0, crowd)))
    node = dataclasses.replace(base.node, accelerators=machine.accelerators_per_node, ranks_per_core=crowd)
    network, shares = base.network, dataclasses.replace(base.efficiency, gemm=gemm, memory=memory)
    at = {place: [time for time in measured.collectives if time.place == place] for place in _PLACES}
    if inside := at["inside"]:
        steps, messages, errors["inside"] = fit_links(inside)
        peak = node.link_bandwidth if nominal else max(steps.rate, messages.rate)
        latency = max(steps.latency, 1e-9)  # unit of `message_steps`
        node = dataclasses.replace(
            node, link_bandwidth=peak, link_latency=latency, message_steps=messages.latency / latency
        )
        shares = dataclasses.replace(
            shares, link=min(1.0, steps.rate / peak), p2p=min(1.0, messages.rate / peak), small_groups=1.0
        )
        provenance["efficiency.small_groups"] = f"one rate for groups of two and of all, {source}"
        provenance["node"] = f"{vendor}; latency {source}" if nominal else source
        provenance["efficiency.link"] = provenance["efficiency.p2p"] = f"inside a node, {source}"
    if through := at["memory"]:
        line, errors["memory of ranks"] = _fit_line(through)
        node = dataclasses.replace(node, shared_memory_bandwidth=line.rate, shared_memory_latency=line.latency)
    if across := at["across"]:
        steps, messages, errors["across"] = fit_links(across)
        rate, nics = max(steps.rate, messages.rate), base.network.nics if nominal else 1
        share = nics * base.network.nic_bandwidth / node.accelerators if nominal else rate
        network = Network(nics=nics, nic_bandwidth=share * node.accelerators / nics, latency=steps.latency)
        shares = dataclasses.replace(shares, network=min(1.0, steps.rate / share), p2p=min(1.0, messages.rate / share))
        provenance["network"] = f"{vendor}; latency {source}" if nominal else source
        provenance["efficiency.network"] = provenance["efficiency.p2p"] = f"across nodes, {source}"
    cluster = Cluster(
        name=name,
        description=describe(machine),
        accelerator=accelerator,
        node=node,
        network=network,
        efficiency=shares,
        provenance=provenance,
    )
    return cluster, errors


def describe(machine: between.Machine) -> str:
    ranks = f"{plural(machine.ranks, 'rank')} on {plural(machine.nodes, 'node')}"
    threads = f", {plural(machine.threads, 'thread')} per rank" if machine.device_type == "cpu" else ""
    shared = (
        f"; all ranks of a node measured at once on {machine.cores} shared cores: rates are per rank under this load"
        if machine.shares_cores
        else ""
    )
    return f"{machine.device_name}, {ranks}{threads}{shared}"


def _fit_accelerator(
    measured: Measurements, base: Cluster, *, nominal: bool
) -> tuple[Accelerator, float, float, dict[str, float]]:
    """Return (accelerator, efficiency of products, efficiency of memory, errors)."""
    machine = measured.machine
    reached = {
        name: max(time.flops_per_second for time in measured.gemms if time.dtype == name) for name in measured.dtypes
    }
    start = measured.overheads.operation.seconds
    highest, rate, memory_error = fit_memory(measured.memory, start)
    bandwidth = base.accelerator.memory_bandwidth if nominal else highest
    memory = min(1.0, rate / bandwidth)
    accelerator = Accelerator(
        name=machine.device_name,
        memory_bytes=float(machine.memory_bytes),
        memory_bandwidth=bandwidth,
        peak_flops={**reached, **base.accelerator.peak_flops} if nominal else reached,
        multiprocessors=machine.multiprocessors,
        kernel_seconds=0.0,
        asynchronous=machine.device_type != "cpu",
        host_bandwidth=base.accelerator.host_bandwidth,
    )
    first, *others = measured.dtypes
    trial = dataclasses.replace(
        base, accelerator=accelerator, efficiency=dataclasses.replace(base.efficiency, memory=memory)
    )
    gemm, kernel, error = fit_gemm([time for time in measured.gemms if time.dtype == first], trial)
    errors = {f"gemm {first}": error, "memory": memory_error}
    peaks = dict(accelerator.peak_flops)
    for name in others:
        share, _, errors[f"gemm {name}"] = fit_gemm([time for time in measured.gemms if time.dtype == name], trial)
        if not nominal:
            peaks[name] *= share / gemm  # so that the one efficiency gives the rate of each dtype
    return dataclasses.replace(accelerator, kernel_seconds=kernel, peak_flops=peaks), gemm, memory, errors


def fit_memory(times: Sequence[pieces.MemoryTime], start: float) -> tuple[float, float, float]:
    """Return (highest rate, rate of operations, mean relative error). The second is the median over all operations and
    sizes, because on a CPU caches contain a part of the tensors. `start`: seconds per operation beside its bytes."""
    rates = [time.bytes_moved / max(time.timing.seconds - start, time.timing.seconds / 10) for time in times]
    rate = statistics.median(rates)
    errors = [abs((start + time.bytes_moved / rate) / time.timing.seconds - 1) for time in times]
    highest = max(time.bytes_per_second for time in times)
    return max(highest, rate), rate, statistics.fmean(errors)


def fit_gemm(times: Sequence[pieces.GemmTime], cluster: Cluster) -> tuple[float, float, float]:
    """Fit `gemm_seconds`: return (efficiency, seconds per operation beside its product, mean relative error). A grid
    search minimizes the sum of absolute relative errors, on which disturbed measurements have little effect. All
    `times` have one dtype; `cluster` is complete except its product efficiency."""
    dtype, seconds = times[0].dtype, np.array([time.timing.seconds for time in times])
    m, n, k = (np.array([float(getattr(time, letter)) for time in times]) for letter in "mnk")
    # A weight gradient is accumulated: 4 bytes read and 4 written per element.
    rate = cluster.accelerator.memory_bandwidth * cluster.efficiency.memory
    added = np.array([8.0 * time.m * time.n * (time.product == "weight-gradient") for time in times]) / rate
    kernels = np.concatenate([[0.0], np.geomspace(1e-7, 1e-4, 31)])
    best = (np.inf, 0.0, 0.0)
    for share in np.geomspace(0.01, 1.0, 400):
        trial = dataclasses.replace(cluster, efficiency=dataclasses.replace(cluster.efficiency, gemm=float(share)))
        work = gemm_seconds(m, n, k, element=ELEMENT_BYTES[dtype], peak=cluster.peak(dtype), cluster=trial)
        errors = np.abs((work + added + kernels[:, None]) / seconds - 1).mean(axis=1)
        index = int(errors.argmin())
        best = min(best, (float(errors[index]), float(share), float(kernels[index])))
    error, share, kernel = best
    return share, kernel, error


class Line(NamedTuple):
    """seconds = latency · steps + bytes sent / rate."""

    latency: float
    rate: float


def fit_links(times: Sequence[between.CollectiveTime]) -> tuple[Line, Line, float]:
    """Fit the times of one place: return (collectives, messages, mean relative error)."""
    messages = [time for time in times if time.operation == "p2p"]
    others = [time for time in times if time.operation != "p2p"]
    (line, error), (p2p, p2p_error) = _fit_line(others), _fit_line(messages)
    return line, p2p, (error * len(others) + p2p_error * len(messages)) / len(times)


def _fit_line(times: Sequence[between.CollectiveTime]) -> tuple[Line, float]:
    columns = [[time.latencies for time in times], [time.wire_bytes for time in times]]
    (latency, slope), error = fit_times(columns, [time.timing.seconds for time in times])
    # If times do not grow with the bytes, use the highest measured rate.
    grows = slope > 0 and math.isfinite(1.0 / slope)
    return Line(latency, 1.0 / slope if grows else max(time.bytes_per_second for time in times)), error


def fit_stack(
    measured: Measurements, cluster: Cluster, base: SoftwareStack, *, name: str, source: str
) -> SoftwareStack:
    """Return the base with the constants measured together with `cluster`; `source` as for `fit_cluster`."""
    overheads, synchronous = measured.overheads, not cluster.accelerator.asynchronous
    if measured.machine.crowded:
        # Overlapped communication takes a core from the computation, so overlap saves nothing.
        base = dataclasses.replace(
            base,
            overlap_tensor_parallel=0.0,
            overlap_tensor_gradients=False,
            overlap_gathers=False,
            overlap_gradients=False,
        )
    assumed = f"assumed, from stack {base.name}"
    return dataclasses.replace(
        base,
        name=name,
        description=f"{base.description}; constants of {cluster.description}",
        attention_efficiency=attention_efficiency(measured.attention, cluster, measured.dtypes[0]),
        attention_backward=1.0,
        overlap_cost=0.0 if synchronous else base.overlap_cost,
        operation_seconds=operation_seconds(overheads, cluster, base, measured.dtypes[0]),
        product_rate=1.0,
        collective_seconds=0.0 if synchronous else base.collective_seconds,
        microbatch_seconds=overheads.stage / 2,
        step_seconds=overheads.step.seconds,
        provenance={
            "attention_efficiency": f"median over fused attention, forward and backward, {source}",
            "elementwise_slowdown": assumed,
            **({} if synchronous or not base.overlap_cost else {"overlap_cost": assumed}),
            "spread": assumed,
            "operation_seconds": f"a tiny layer over its operations, {source}",
            "collective_seconds": "in the latencies of the cluster file" if synchronous else assumed,
            "microbatch_seconds": f"a stage without its layers and messages, {source}",
            "step_seconds": f"norm, update and clearing of one bucket, without data and logging, {source}",
        },
    )


def operation_seconds(overheads: stages.Overheads, cluster: Cluster, stack: SoftwareStack, dtype: str) -> float:
    """Return the host's time per operation: a tiny layer's forward and backward over the operations that the planner
    counts. On a synchronous device the small device time is subtracted."""
    config = replace(stages.config_of(stages.TINY_MODEL, stages.TINY_TOKENS), precision=dtype)
    piece, _ = layer_parts(Pricing.of(workload_of(config), cluster, stack))
    whole = piece.forward + piece.input_gradient + piece.weight_gradient
    seconds = overheads.layer
    if not cluster.accelerator.asynchronous:
        seconds -= float(whole.device_seconds(cluster, stack))
    return max(0.0, seconds / float(whole.operations))


def attention_efficiency(times: Sequence[pieces.AttentionTime], cluster: Cluster, dtype: str) -> float:
    """Return the rate of fused attention as a share of the rate of products. The forward counts the FLOPs of the causal
    half; the backward counts 2.5 times as many, because it recomputes the scores."""
    rate = cluster.peak(dtype) * cluster.efficiency.gemm
    shares = []
    for time in times:
        if time.dtype == dtype:
            flops = time.shape.flops / 2 * (2.5 if time.backward else 1.0)
            seconds = time.timing.seconds - cluster.accelerator.kernel_seconds
            if seconds > 0:
                shares.append(flops / seconds / rate)
    return min(1.0, statistics.median(shares)) if shares else 1.0
