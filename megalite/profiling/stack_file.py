"""From measured times to a `SoftwareStack`: what the host takes to start things."""

import dataclasses
import statistics
from collections.abc import Sequence

from megalite.config.describe import replace
from megalite.config.run import RunConfig
from megalite.config.validate import validate
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.stage import layer_parts
from megalite.planner.cost.workload import workload_of
from megalite.planner.hardware.cluster import Cluster
from megalite.planner.hardware.stack import SoftwareStack
from megalite.profiling.attention import AttentionTime
from megalite.profiling.overheads import TINY_MODEL, TINY_TOKENS, Overheads
from megalite.profiling.run import Measurements


def fit_stack(
    measured: Measurements, cluster: Cluster, base: SoftwareStack, *, name: str, source: str
) -> SoftwareStack:
    """The base, with the constants that were measured.

    Args:
        cluster: of the same measurements.
        source: when, with what and how it was measured, for the provenance.
    """
    overheads, synchronous = measured.overheads, not cluster.accelerator.asynchronous
    if measured.machine.crowded:
        # What is exchanged beside computation takes a core from it: it costs as much as after it.
        base = dataclasses.replace(
            base,
            overlap_tensor_parallel=False,
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
        operation_seconds=operation_seconds(overheads, cluster, base, measured.dtypes[0]),
        product_rate=1.0,
        collective_seconds=0.0 if synchronous else base.collective_seconds,
        microbatch_seconds=(overheads.pass_forward + overheads.pass_backward) / 2,
        step_seconds=overheads.step.seconds,
        provenance={
            "attention_efficiency": f"median over fused attention, forward and backward, {source}",
            "elementwise_slowdown": assumed,
            "operation_seconds": f"a tiny layer over its operations, {source}",
            "collective_seconds": "in the latencies of the cluster file" if synchronous else assumed,
            "microbatch_seconds": f"what a stage takes beside its layers, without messages, {source}",
            "step_seconds": f"norm, update and clearing of one bucket, without data and logging, {source}",
        },
    )


def operation_seconds(overheads: Overheads, cluster: Cluster, stack: SoftwareStack, dtype: str) -> float:
    """The host's time for one operation: a tiny layer's forward and backward over the operations that the planner counts.

    On a synchronous device the little that the device itself takes is left out.
    """
    config = replace(
        dataclasses.replace(RunConfig(), model=TINY_MODEL),
        seq_length=TINY_TOKENS,
        precision=dtype,
        micro_batch_size=1,
        global_batch_size=1,
        train_iters=1,
    )
    config = validate(config, world_size=1)
    piece = layer_parts(Pricing.of(workload_of(config), cluster, stack)).piece
    whole = piece.forward + piece.input_gradient + piece.weight_gradient
    seconds = overheads.layer_forward + overheads.layer_backward
    if not cluster.accelerator.asynchronous:
        seconds -= float(whole.device_seconds(cluster, stack))
    return max(0.0, seconds / float(whole.operations))


def attention_efficiency(times: Sequence[AttentionTime], cluster: Cluster, dtype: str) -> float:
    """Of the rate of products, what fused attention reaches: FLOPs of the half that the causal mask leaves, and two and a
    half times as many backward (the scores are computed again)."""
    rate = cluster.peak(dtype) * cluster.efficiency.gemm
    shares = []
    for time in times:
        if time.kind == "fused" and time.dtype == dtype:
            flops = time.shape.flops / 2 * (2.5 if time.backward else 1.0)
            seconds = time.timing.seconds - cluster.accelerator.kernel_seconds
            if seconds > 0:
                shares.append(flops / seconds / rate)
    return min(1.0, statistics.median(shares)) if shares else 1.0
