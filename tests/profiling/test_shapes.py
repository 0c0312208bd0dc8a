"""Measured shapes with their FLOPs and bytes, and message sizes."""

from itertools import pairwise

import pytest
import torch

from megalite.profiling.collectives import CollectiveTime, message_sizes
from megalite.profiling.operations import (
    PRODUCTS,
    AttentionShape,
    LinearShape,
    _attention_passes,
    _products,
    attention_shapes,
    chosen_shapes,
    layer_shapes,
    tensor_sizes,
)
from tests.profiling.made_up import took


def test_shapes_include_those_of_a_layer() -> None:
    """QKV, output, up and down projections of GPT-3 175B on one microbatch, whole and split over 8."""
    h, s = 12288, 2048
    shapes = set(layer_shapes())
    for tp in (1, 8):
        assert {
            LinearShape(s, 3 * h // tp, h),
            LinearShape(s, h, h // tp),
            LinearShape(s, 4 * h // tp, h),
            LinearShape(s, h, 4 * h // tp),
        } <= shapes


def test_chosen_shapes_are_spread_and_within_limits() -> None:
    chosen = chosen_shapes(count=12, most_flops=1e11, most_bytes=1e8, itemsize=4)
    assert len(chosen) == 12
    assert all(shape.flops <= 1e11 and shape.bytes(4) <= 1e8 for shape in chosen)
    flops = [shape.flops for shape in chosen]
    assert flops[0] == min(shape.flops for shape in layer_shapes())
    assert flops[-1] > 1e10
    assert max(later / earlier for earlier, later in pairwise(flops)) < 6
    assert len(chosen_shapes(count=4, most_flops=1.0, most_bytes=1.0, itemsize=4)) >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flops_of_products_are_correct(dtype: torch.dtype) -> None:
    shape = LinearShape(8, 6, 4)
    runs = dict(_products(shape, dtype, torch.device("cpu")))
    assert tuple(runs) == PRODUCTS
    for name, (m, n, k) in ((name, shape.product(name)) for name in PRODUCTS):
        assert 2 * m * n * k == shape.flops == 2 * 8 * 6 * 4
        result = runs[name]()
        if name != "weight-gradient":  # it accumulates into a buffer
            assert isinstance(result, torch.Tensor)
            assert result.shape == (m, n)


def test_attention_runs_forward_and_backward() -> None:
    shape = AttentionShape(b=2, heads=3, s=16, d=8)
    (_, forward), (_, backward) = _attention_passes(shape, torch.float64, torch.device("cpu"))
    grads, out = backward(), forward()
    assert isinstance(grads, tuple) and isinstance(out, torch.Tensor)
    assert [tensor.shape for tensor in (*grads, out)] == [(2, 3, 16, 8)] * 4


def test_shapes_grow_with_the_available_time() -> None:
    assert {shape.s for shape in attention_shapes(most_flops=0, most_bytes=0)} == {128}
    assert {shape.s for shape in attention_shapes(most_flops=1e13, most_bytes=1e12)} == {128, 512, 2048, 4096}
    assert tensor_sizes(most_elements=0) == [2**16, 2**20]
    assert tensor_sizes(most_elements=2**23) == [2**16, 2**20, 2**22]
    assert message_sizes(largest=1 << 22, count=4) == [1 << 10, 1 << 14, 1 << 18, 1 << 22]
    assert message_sizes(largest=1 << 12, count=7) == [1 << 10, 1 << 11, 1 << 12]


@pytest.mark.parametrize(
    ("operation", "place", "ranks", "latencies", "wire"),
    [
        ("all-reduce", "inside", 4, 6.0, 1536.0),
        ("all-gather", "inside", 4, 3.0, 768.0),
        ("all-to-all", "across", 8, 3.0, 896.0),
        ("all-reduce", "across", 5, 6.0, 1638.4),
        ("p2p", "across", 2, 1.0, 1024.0),
    ],
)
def test_bytes_of_collectives(operation: str, place: str, ranks: int, latencies: float, wire: float) -> None:
    time = CollectiveTime(operation=operation, place=place, ranks=ranks, message_bytes=1024, timing=took(1.0))
    assert (time.latencies, time.wire_bytes) == (latencies, pytest.approx(wire))
