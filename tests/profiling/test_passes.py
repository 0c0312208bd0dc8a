"""The fit recovers the constants of small stages from times computed by the planner's formulas."""

import dataclasses

import pytest

from megalite.config.describe import replace
from megalite.planner.cost.operations import Pricing
from megalite.planner.cost.rates import workload_of
from megalite.planner.cost.stage import stage_cost
from megalite.planner.hardware import SoftwareStack, load_cluster, load_stack
from megalite.profiling.passes import SHAPES, PassTime, StageShape, with_passes
from tests.profiling.made_up import cpu_cluster, took

CLUSTER = cpu_cluster(load_cluster("cpu-box"))
# Attention is so slow that reading its operands never limits it.
STACK = dataclasses.replace(
    load_stack("fused"),
    attention_efficiency=0.01,
    elementwise_slowdown=5.0,
    operation_seconds=3e-5,
    microbatch_seconds=4e-4,
)


def made_up(shape: StageShape, backward: bool, stack: SoftwareStack) -> PassTime:
    price = Pricing.of(workload_of(replace(shape.config, precision="fp32")), CLUSTER, stack)
    cost = stage_cost(price, dense=float(shape.layers), has_head=float(shape.vocabulary > 0))
    parts = cost.forward_parts + cost.backward_parts if backward else cost.forward_parts
    seconds = parts.gemm + parts.memory + parts.operations * stack.operation_seconds
    seconds += stack.microbatch_seconds * (1 + backward)
    return PassTime(shape=shape, backward=backward, dtype="fp32", timing=took(float(seconds)))


def test_constants_are_recovered() -> None:
    times = [made_up(shape, backward, STACK) for shape in SHAPES for backward in (False, True)]
    other = dataclasses.replace(STACK, elementwise_slowdown=1.0, operation_seconds=1.0, microbatch_seconds=1.0)
    stack, error = with_passes(times, CLUSTER, other, source="measured")
    assert error < 1e-6
    assert stack.elementwise_slowdown == pytest.approx(5.0, rel=1e-4)
    assert stack.operation_seconds == pytest.approx(3e-5, rel=1e-4)
    assert stack.microbatch_seconds == pytest.approx(4e-4, rel=1e-4)
    for name in ("elementwise_slowdown", "operation_seconds", "microbatch_seconds"):
        assert "measured" in stack.provenance[name]


def test_time_of_products_is_not_overhead() -> None:
    """Times that consist of products and bytes leave no time for operations and passes."""
    free = dataclasses.replace(STACK, elementwise_slowdown=1.0, operation_seconds=0.0, microbatch_seconds=0.0)
    times = [made_up(shape, True, free) for shape in SHAPES]
    stack, error = with_passes(times, CLUSTER, STACK, source="measured")
    assert error < 1e-6
    assert stack.elementwise_slowdown == pytest.approx(1.0, rel=1e-4)
    assert stack.operation_seconds < 1e-10 and stack.microbatch_seconds < 1e-10


def test_operations_have_a_minimum_time() -> None:
    """If the fit finds no operation time, an operation takes `least_operation`."""
    free = dataclasses.replace(STACK, operation_seconds=0.0)
    times = [made_up(shape, True, free) for shape in SHAPES]
    stack, _ = with_passes(times, CLUSTER, STACK, source="measured", least_operation=1e-6)
    assert stack.operation_seconds == pytest.approx(1e-6)
    times = [made_up(shape, backward, STACK) for shape in SHAPES for backward in (False, True)]
    stack, error = with_passes(times, CLUSTER, STACK, source="measured", least_operation=1e-6)
    assert error < 1e-6 and stack.operation_seconds == pytest.approx(3e-5, rel=1e-4)
