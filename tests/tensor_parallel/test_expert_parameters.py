"""Experts' parameters: rectangles of the whole, the same in every layout, each expert drawn on its own."""

import hashlib

import pytest
import torch

from megalite.tensor_parallel.parameter import ParameterFactory, ShardedParameter
from megalite.tensor_parallel.random import fill_normal
from megalite.topology.group import Group
from megalite.topology.layout import ShardSpec

CPU = torch.device("cpu")
GATED, DOWN = (4, 2, 192, 6), (4, 6, 192)


def made(
    shape: tuple[int, ...], dim: int, ep: tuple[int, int] = (0, 1), etp: tuple[int, int] = (0, 1)
) -> ShardedParameter:
    """As made on rank `ep[0]` of `ep[1]` and `etp[0]` of `etp[1]`."""
    factory = ParameterFactory(
        tp=Group("tp", (0, 1), 1),
        ep=Group("ep", tuple(range(ep[1])), ep[0]),
        expert_tp=Group("expert-tp", tuple(range(etp[1])), etp[0]),
        seed=7,
        dtype=torch.float64,
        device=CPU,
    )
    return factory.parameter("experts", shape, shard_dim=dim, std=0.5, expert=True)


@pytest.mark.parametrize(("shape", "dim"), [(GATED, 2), (DOWN, 2), ((4, 192, 6), 1)])
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (1, 2), (1, 3), (2, 2), (4, 6)])
def test_the_rectangles_of_every_split_are_the_whole(shape: tuple[int, ...], dim: int, ep: int, etp: int) -> None:
    rows = []
    for i in range(ep):
        parts = [made(shape, dim, (i, ep), (j, etp)) for j in range(etp)]
        for j, part in enumerate(parts):
            info, width, experts = part.info, shape[dim] // etp, 4 // ep
            assert info.expert and info.shard_dim == dim and not info.partial_over_tp
            assert info.spec.global_shape == shape
            assert info.spec.slice[0] == (i * experts, (i + 1) * experts)
            assert info.spec.slice[dim] == (j * width, (j + 1) * width)
        rows.append(torch.cat([part.detach() for part in parts], dim))
    assert torch.equal(torch.cat(rows), made(shape, dim).detach())


def test_experts_are_independent_draws_of_the_right_size() -> None:
    whole = made(GATED, 2).detach()
    n = whole[0].numel()
    dense = torch.empty(GATED[1:], dtype=torch.float64)
    fill_normal(dense, ShardSpec.whole("experts", GATED[1:]), dim=1, std=0.5, seed=7)
    drawn = [*whole, dense]
    for i, one in enumerate(drawn):
        assert one.std().item() == pytest.approx(0.5, rel=5 / (2 * n) ** 0.5)
        for other in drawn[:i]:
            assert abs((one * other).mean().item()) < 5 * 0.25 / n**0.5


def test_the_definition_has_not_changed() -> None:
    values = made((2, 70, 3), 1).detach().float()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == "9d341039e00943b5"


def test_partial_gradients() -> None:
    """A norm is in parts with sequence parallelism alone, a router whenever there is tp."""
    for tp_size, sequence_parallel in ((1, False), (2, False), (2, True)):
        factory = ParameterFactory(
            tp=Group("tp", tuple(range(tp_size)), 0),
            seed=7,
            dtype=torch.float64,
            device=CPU,
            sequence_parallel=sequence_parallel,
        )
        norm = factory.parameter("norm", (4,), in_sequence_region=True)
        router = factory.parameter("router", (4, 4), always_partial=True)
        assert norm.info.partial_over_tp == sequence_parallel
        assert router.info.partial_over_tp == (tp_size > 1)
        assert not router.info.expert
