"""Each autograd pair against its definition, forward and backward."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.tensor_parallel.mappings import (
    gather_from_tensor_parallel_region,
    reduce_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    replicate_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from tests.support.ranks import RankContext, run_ranks

S, REST = 8, (2, 3)  # whole sequence and the other dimensions

MAPPINGS = {
    "reduce_from": reduce_from_tensor_parallel_region,
    "scatter": scatter_to_sequence_parallel_region,
    "reduce_scatter": reduce_scatter_to_sequence_parallel_region,
    "replicate": replicate_from_sequence_parallel_region,
}
SPLIT_INPUT = {"replicate"}
SPLIT_OUTPUT = {"scatter", "reduce_scatter"}

Lists = list[Tensor]


def drawn(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, *REST, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tensors_of(name: str, rank: int, tp: int) -> tuple[Tensor, Tensor]:
    """Return a rank's input and output gradient, which differ between ranks."""
    rows_in = S // tp if name in SPLIT_INPUT else S
    rows_out = S // tp if name in SPLIT_OUTPUT else S
    return drawn(rank, rows_in), drawn(100 + rank, rows_out)


def apply_all(context: RankContext, tp: int) -> dict[str, tuple[Tensor, Tensor]]:
    group = context.topology(tp=tp).tp
    found = {}
    for name, mapping in MAPPINGS.items():
        x, grad = tensors_of(name, group.rank, tp)
        x.requires_grad_()
        # Mappings may work in place on what they are given, as on the fresh result of an operation.
        y = mapping(x * 1.0, tp=group)
        y.backward(grad)
        found[name] = (y.detach(), x.grad)
    return found


def same(values: Lists) -> Lists:
    return values


def summed(values: Lists) -> Lists:
    return [torch.stack(values).sum(0)] * len(values)


def own_part(values: Lists) -> Lists:
    return [value.chunk(len(values))[rank] for rank, value in enumerate(values)]


def joined(values: Lists) -> Lists:
    return [torch.cat(values)] * len(values)


def summed_part(values: Lists) -> Lists:
    return own_part(summed(values))


DEFINITIONS: dict[str, tuple[Callable[[Lists], Lists], Callable[[Lists], Lists]]] = {
    "reduce_from": (summed, same),
    "scatter": (own_part, joined),
    "reduce_scatter": (summed_part, joined),
    "replicate": (joined, own_part),
}


@pytest.mark.parametrize("tp", [2, 4])
def test_autograd_pairs(tp: int) -> None:
    found = run_ranks(tp, apply_all, tp)
    for name, (forward, backward) in DEFINITIONS.items():
        given = [tensors_of(name, rank, tp) for rank in range(tp)]
        outputs, grads = forward([x for x, _ in given]), backward([grad for _, grad in given])
        for rank in range(tp):
            what = f"{name} on rank {rank} of {tp}: "
            for ours, expected in zip(found[rank][name], (outputs[rank], grads[rank]), strict=True):
                torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-14, msg=what.__add__)


def gathered_columns(context: RankContext, tp: int) -> tuple[Tensor, Tensor]:
    group = context.topology(tp=tp).tp
    x = drawn(group.rank, S).requires_grad_()
    y = gather_from_tensor_parallel_region(x, size=5, tp=group)
    y.backward(torch.ones(S, 2, 1) * torch.arange(1.0, 6.0, dtype=torch.float64))
    return y.detach(), x.grad


@pytest.mark.parametrize("tp", [2, 4])
def test_gather_of_columns_omits_padding(tp: int) -> None:
    """Four ranks have 3 columns each, of which the last two ranks have only padding."""
    found = run_ranks(tp, gathered_columns, tp)
    joint = torch.cat([drawn(rank, S) for rank in range(tp)], dim=-1)[..., :5]
    for rank, (y, grad) in enumerate(found):
        assert torch.equal(y, joint) and y.is_contiguous()
        expected = [float(column + 1) * (column < 5) for column in range(3 * rank, 3 * rank + 3)]
        assert torch.equal(grad, torch.tensor(expected, dtype=torch.float64).expand_as(grad))
