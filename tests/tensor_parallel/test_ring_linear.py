"""Layers with overlapped communication against the same layers that gather first and scatter after."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.overlapped_linear import Ring, receive_parts, sum_of_parts
from megalite.tensor_parallel.parameter import DeferredWeightGradients, ParameterFactory
from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks
from tests.tensor_parallel.spies import EVENTS, SpyGroup

S, B, WIDTH, F = 16, 2, 40, 48
START = 0.5

Layer = ColumnParallelLinear | RowParallelLinear
Numbers = dict[str, Tensor]


def drawn(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)


def layers(tp: Group, dtype: torch.dtype, *, bias: bool) -> list[Layer]:
    factory = ParameterFactory(tp=tp, seed=1, dtype=dtype, device=torch.device("cpu"), sequence_parallel=True)
    return [
        ColumnParallelLinear("a", (F, WIDTH), std=1.0, bias=bias, factory=factory),
        ColumnParallelLinear("b", (2, F, WIDTH), std=1.0, bias=bias, factory=factory, shard_dim=1),
        RowParallelLinear("c", (WIDTH, F), std=1.0, bias=bias, factory=factory),
    ]


def run(layer: Layer, tp: Group, *, overlap: Any, into_main_grad: bool, split: bool) -> Numbers:
    """Run forward and backward of this rank's part; return also bias gradients and the number of reports."""
    layer.overlap_by = overlap
    dtype, deferred, reports = layer.weight.dtype, DeferredWeightGradients(), []
    layer.weight.deferred = deferred
    for parameter in (layer.weight, layer.bias):
        if parameter is not None:
            parameter.grad = None
            parameter.data.copy_(drawn(3, *parameter.shape, dtype=dtype))
    layer.weight.main_grad = torch.full_like(layer.weight, START) if into_main_grad else None
    layer.weight.grad_ready = lambda: reports.append(1)
    column = isinstance(layer, ColumnParallelLinear)
    shape = (S // tp.size, B, WIDTH) if column else (S, B, F // tp.size)
    x = drawn(10 + tp.rank, *shape, dtype=dtype).requires_grad_()
    y = layer(x)
    grad = drawn(20 + tp.rank, *y.shape, dtype=dtype)
    if split:
        with deferred.deferring(0):
            y.backward(grad)
        assert layer.weight.grad is None and not reports
        deferred.run(0)
    else:
        y.backward(grad)
    assert len(reports) == int(into_main_grad)
    weight_grad = layer.weight.main_grad if into_main_grad else layer.weight.grad
    found = {"output": y.detach(), "input gradient": x.grad, "weight gradient": weight_grad}
    if layer.bias is not None and layer.bias.grad is not None:
        found["bias gradient"] = layer.bias.grad
    stale = layer(x)  # in the backward another weight would be in its place
    with torch.no_grad():
        layer.weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward(grad)
    return found


def same_numbers(tp: Group, overlap: Any, dtype: torch.dtype, bound: float) -> None:
    for bias, into_main_grad, split in ((True, True, False), (False, False, True), (False, True, True)):
        for layer in layers(tp, dtype, bias=bias):
            how = {"into_main_grad": into_main_grad, "split": split}
            whole = run(layer, tp, overlap=None, **how)
            pieces = run(layer, tp, overlap=overlap, **how)
            assert pieces.keys() == whole.keys()
            for name, expected in whole.items():
                error = (pieces[name].double() - expected.double()).norm() / expected.double().norm()
                assert error <= bound, (type(layer).__name__, dtype, name, float(error))
            if overlap is Ring and isinstance(layer, ColumnParallelLinear) and dtype == torch.float32:
                # Rows are independent.
                assert torch.equal(pieces["output"], whole["output"])


def by_ring(context: RankContext, size: int) -> None:
    tp = context.topology(tp=size).tp
    for dtype, bound in ((torch.float64, 1e-13), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        same_numbers(tp, Ring, dtype, bound)


@pytest.mark.parametrize("tp", [2, 4])
def test_ring_layers_equal_plain_layers(tp: int) -> None:
    run_ranks(tp, by_ring, tp)


def parts_and_sums(context: RankContext, size: int) -> None:
    tp = context.topology(tp=size).tp
    order, total = [], {}
    for rank, part in receive_parts(torch.full((2, 3), float(tp.rank)), tp):
        order.append(rank)
        total[rank] = part.clone()
    assert order == [(tp.rank - step) % size for step in range(size)]
    assert all(torch.equal(part, torch.full((2, 3), float(rank))) for rank, part in total.items())

    asked: list[int] = []

    def make(rank: int) -> Tensor:
        asked.append(rank)
        return torch.full((2,), 10.0 * rank + tp.rank)

    own, summing = sum_of_parts(make, tp)
    assert asked == [(tp.rank - 1 - step) % size for step in range(size)]  # its own part last: it need not be sent
    summing.wait()
    assert torch.equal(own, torch.full((2,), 10.0 * tp.rank * size + sum(range(size))))


@pytest.mark.parametrize("size", [1, 3])
def test_ring_gathers_and_sums_all_parts(size: int) -> None:
    run_ranks(size, parts_and_sums, size)


def test_each_piece_is_sent_during_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def spied(*args: Tensor, out: Tensor) -> Tensor:
        EVENTS.append("product")
        return out.zero_()

    monkeypatch.setattr(torch, "mm", spied)
    group = SpyGroup("tp", (0, 1, 2), 0)
    layer = layers(group, torch.float64, bias=False)[0]
    layer.overlap_by = Ring
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    layer.weight.accumulate_product = lambda *_: EVENTS.append("weight gradient")
    EVENTS.clear()
    y = layer(torch.zeros(2, B, WIDTH, dtype=torch.float64, requires_grad=True))
    there = ["start rotate", "product", "wait rotate"]
    assert [*there, *there, "product"] == EVENTS
    EVENTS.clear()
    y.sum().backward()
    assert [
        *("start all_gather", "start rotate", "wait rotate", "start rotate"),
        *("wait all_gather", "weight gradient", "wait rotate"),
    ] == EVENTS
