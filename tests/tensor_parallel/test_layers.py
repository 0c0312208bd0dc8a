"""Split linear layers and embeddings against torch's on the assembled weights, in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks
from tests.tensor_parallel.spies import EVENTS, SpyGroup

S, B, K, V, H = 8, 2, 12, 24, 6
START = 0.5  # initial main_grad: gradients are added, not written


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def factory(tp: Group, sequence_parallel: bool) -> ParameterFactory:
    return ParameterFactory(
        tp=tp, seed=1, dtype=torch.float64, device=torch.device("cpu"), sequence_parallel=sequence_parallel
    )


def local(parameter: ShardedParameter, full: Tensor) -> Tensor:
    return full[tuple(slice(start, stop) for start, stop in parameter.info.spec.slice)]


def prepare(parameter: ShardedParameter | None, full: Tensor, main_grad: bool) -> list[int]:
    """Give a parameter its slice of `full`; return a list that grows with each call of grad_ready."""
    calls: list[int] = []
    if parameter is not None:
        parameter.data.copy_(local(parameter, full))
        if main_grad:
            parameter.main_grad = torch.full_like(parameter.data, START)
            parameter.grad_ready = lambda: calls.append(1)
    return calls


def part(x: Tensor, tp: Group, dim: int) -> Tensor:
    return x.chunk(tp.size, dim)[tp.rank]


def close(ours: Tensor | None, expected: Tensor, what: str) -> None:
    assert ours is not None, what
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12, msg=lambda text: f"{what}: {text}")


def check_weight_grad(weight: ShardedParameter, calls: list[int], full: Tensor, main_grad: bool) -> None:
    expected = local(weight, full)
    if main_grad:
        assert weight.grad is None
        close(weight.main_grad - START, expected, "main_grad")
        assert calls == [1]
    else:
        close(weight.grad, expected, "weight gradient")


def check_column(tp: Group, shape: tuple[int, ...], bias: bool, sp: bool, main_grad: bool) -> None:
    dim = len(shape) - 2
    layer = ColumnParallelLinear("layer", shape, std=1.0, bias=bias, factory=factory(tp, sp), shard_dim=dim)
    x, w, b = (
        drawn(1, S, B, K).requires_grad_(),
        drawn(2, *shape).requires_grad_(),
        drawn(3, *shape[:-1]).requires_grad_(),
    )
    calls = prepare(layer.weight, w.detach(), main_grad)
    prepare(layer.bias, b.detach(), False)
    y = F.linear(x, w.flatten(0, -2), b.flatten() if bias else None)
    grad_y = drawn(4, *y.shape)
    y.backward(grad_y)

    ours_x = (part(x.detach(), tp, 0) if sp else x.detach()).clone().requires_grad_()
    ours = layer(ours_x)
    with torch.no_grad():
        assert torch.equal(layer(ours_x), ours)

    def columns(full: Tensor) -> Tensor:
        return part(full.view(S, B, *shape[:-1]), tp, 1 + len(shape) - 1).flatten(2)

    close(ours, columns(y), "output")
    ours.backward(columns(grad_y))
    close(ours_x.grad, part(x.grad, tp, 0) if sp else x.grad, "input gradient")
    check_weight_grad(layer.weight, calls, w.grad, main_grad)
    if layer.bias is not None:
        close(layer.bias.grad, local(layer.bias, b.grad), "bias gradient")


def check_row(tp: Group, bias: bool, sp: bool, main_grad: bool) -> None:
    layer = RowParallelLinear("layer", (H, K), std=1.0, bias=bias, factory=factory(tp, sp))
    x, w, b = (drawn(1, S, B, K).requires_grad_(), drawn(2, H, K).requires_grad_(), drawn(3, H).requires_grad_())
    calls = prepare(layer.weight, w.detach(), main_grad)
    prepare(layer.bias, b.detach(), False)
    y = F.linear(x, w, b if bias else None)
    grad_y = drawn(4, *y.shape)
    y.backward(grad_y)

    ours_x = part(x.detach(), tp, 2).clone().requires_grad_()
    ours = layer(ours_x)
    with torch.no_grad():
        assert torch.equal(layer(ours_x), ours)
    close(ours, part(y, tp, 0) if sp else y, "output")
    ours.backward(part(grad_y, tp, 0) if sp else grad_y)
    close(ours_x.grad, part(x.grad, tp, 2), "input gradient")
    check_weight_grad(layer.weight, calls, w.grad, main_grad)
    if layer.bias is not None:
        assert layer.bias.info.partial_over_tp == sp
        total = layer.bias.grad.clone()
        if sp:
            tp.all_reduce(total)
        close(total, b.grad, "bias gradient")


def check_embedding(tp: Group, sp: bool, main_grad: bool) -> None:
    layer = VocabParallelEmbedding("table", (V, H), std=1.0, factory=factory(tp, sp))
    table = drawn(1, V, H).requires_grad_()
    calls = prepare(layer.weight, table.detach(), main_grad)
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(2))
    tokens[0, :3] = tokens[1, 4]  # gradients of repeated tokens add up
    rows = F.embedding(tokens, table).transpose(0, 1)
    grad = drawn(3, S, B, H)
    rows.backward(grad)
    ours = layer(tokens)
    close(ours, part(rows, tp, 0) if sp else rows, "rows")
    ours.backward(part(grad, tp, 0) if sp else grad)
    check_weight_grad(layer.weight, calls, table.grad, main_grad)


SHAPES = ((2 * K, K), (2, K, K))


def check_all(tp: Group) -> None:
    for sp, main_grad in itertools.product((False, True), (False, True)):
        if sp and tp.size == 1:
            continue
        for bias in (False, True):
            for shape in SHAPES:
                check_column(tp, shape, bias, sp, main_grad)
            check_row(tp, bias, sp, main_grad)
        check_embedding(tp, sp, main_grad)


def check_all_on_ranks(context: RankContext, tp: int) -> None:
    check_all(context.topology(tp=tp).tp)


@pytest.mark.parametrize("tp", [2, 4])
def test_split_layers_equal_whole_ones(tp: int) -> None:
    run_ranks(tp, check_all_on_ranks, tp)


def test_layers_on_one_rank() -> None:
    check_all(Group.solo("tp"))


@pytest.mark.parametrize("sp", [False, True])
def test_input_gradient_is_sent_during_the_weight_gradient(sp: bool) -> None:
    group = SpyGroup("tp", (0, 1), 0)
    layer = ColumnParallelLinear("layer", (H, K), std=1.0, bias=True, factory=factory(group, sp))
    layer.weight.main_grad = torch.zeros_like(layer.weight)

    def weight_gradient(*_: Tensor) -> None:
        EVENTS.append("weight gradient")

    layer.weight.accumulate_product = weight_gradient
    y = layer(drawn(0, S, B, K).requires_grad_())
    EVENTS.clear()
    y.sum().backward()
    if sp:
        # The gather of the input overlaps with the input gradient's GEMM; its result is sent during the other GEMM.
        assert [
            *("start all_gather", "start reduce_scatter", "wait all_gather"),
            *("weight gradient", "wait reduce_scatter"),
        ] == EVENTS
    else:
        assert EVENTS == ["start all_reduce", "weight gradient", "wait all_reduce"]


def test_infos_describe_parameters_for_the_optimizer() -> None:
    group = SpyGroup("tp", (0, 1), 1)
    column = ColumnParallelLinear("a", (2, K, H), std=1.0, bias=True, factory=factory(group, True), shard_dim=1)
    row = RowParallelLinear("b", (H, K), std=1.0, bias=True, factory=factory(group, True))
    infos = [p.info for p in (column.weight, column.bias, row.weight, row.bias)]
    assert [info.shard_dim for info in infos] == [1, 1, 1, None]
    assert [info.decay for info in infos] == [True, False, True, False]
    assert [info.partial_over_tp for info in infos] == [False, False, False, True]
    assert column.weight.info.spec.slice == ((0, 2), (K // 2, K), (0, H))
    assert row.weight.info.spec.slice == ((0, H), (K // 2, K))
