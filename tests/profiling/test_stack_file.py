"""Stack files: what the host takes."""

import dataclasses
from pathlib import Path

import pytest

from megalite.planner.hardware import load_cluster, load_stack, save_stack
from megalite.profiling.run import fit_stack, operation_seconds
from tests.profiling.made_up import CPU, cpu_cluster, measurements

BASE = load_stack("fused")
CLUSTER = cpu_cluster(load_cluster("cpu-box"))
MEASURED = measurements(CLUSTER, CPU)


def test_constants_are_those_measured(tmp_path: Path) -> None:
    stack = fit_stack(MEASURED, CLUSTER, BASE, name="mine", source="measured")
    assert stack.attention_efficiency == pytest.approx(0.5, rel=1e-6)
    assert stack.microbatch_seconds == pytest.approx(2e-5)
    assert stack.step_seconds == 5e-5
    assert stack.collective_seconds == 0.0
    assert stack.fused_attention == BASE.fused_attention
    save_stack(stack, tmp_path / "stack.yaml")
    assert load_stack(str(tmp_path / "stack.yaml")) == stack


def test_nothing_hides_beside_computation_where_ranks_share_cores() -> None:
    crowded = dataclasses.replace(MEASURED, machine=dataclasses.replace(CPU, cores=2))
    stack = fit_stack(crowded, CLUSTER, BASE, name="mine", source="measured")
    assert not (stack.overlap_gradients or stack.overlap_tensor_gradients or stack.overlap_gathers)
    free = fit_stack(MEASURED, CLUSTER, BASE, name="mine", source="measured")
    assert free.overlap_gradients and free.overlap_tensor_gradients and free.overlap_gathers


def test_an_operation_is_its_share_of_a_tiny_layer() -> None:
    """0.6 ms over the operations of a layer: the same whole, whoever is said to take it."""
    asynchronous = dataclasses.replace(CLUSTER, accelerator=dataclasses.replace(CLUSTER.accelerator, asynchronous=True))
    hosts = operation_seconds(MEASURED.overheads, asynchronous, BASE, "fp32")
    count = 6e-4 / hosts
    assert count == pytest.approx(round(count))
    assert 20 < count < 60
    # On a CPU the device's own 3 µs an operation, and what little it computes, come off.
    host = operation_seconds(MEASURED.overheads, CLUSTER, BASE, "fp32")
    assert host == pytest.approx(hosts - 3e-6, abs=1e-6)
    assert host < hosts - 3e-6
    faster = dataclasses.replace(MEASURED.overheads, layer_forward=0.0, layer_backward=1e-9)
    assert operation_seconds(faster, CLUSTER, BASE, "fp32") == 0.0
