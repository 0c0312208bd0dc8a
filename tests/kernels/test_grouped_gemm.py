"""Grouped products against one einsum per group."""

import pytest
import torch
from torch import Tensor

from megalite.kernels.matmul import GroupSizes, accumulate_grouped_weight_grad, grouped_matmul, grouped_matmul_fused

COUNTS = [[3, 0, 5, 1], [0, 0, 0, 9], [9, 0, 0, 0], [0, 0, 0, 0], [2, 2, 2, 3]]
IN, OUT = 16, 24


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sizes(counts: list[int]) -> GroupSizes:
    return GroupSizes(torch.tensor(counts), lambda: counts)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_each_group_is_multiplied_by_its_matrix(counts: list[int], transposed: bool) -> None:
    x, weight = draw(1, sum(counts), IN), draw(2, 4, IN, OUT)
    given = weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weight
    expected = torch.einsum("ni,nio->no", x, weight[sizes(counts).owners(sum(counts))])
    torch.testing.assert_close(grouped_matmul(x, given, sizes(counts)), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_weight_gradients_accumulate(counts: list[int]) -> None:
    x, grad_y = draw(1, sum(counts), IN), draw(3, sum(counts), OUT)
    main_grad = draw(4, 4, OUT, IN)
    expected = main_grad.clone().index_add_(0, sizes(counts).owners(sum(counts)), torch.einsum("no,ni->noi", grad_y, x))
    accumulate_grouped_weight_grad(main_grad, grad_y, x, sizes(counts))
    torch.testing.assert_close(main_grad, expected, rtol=1e-13, atol=1e-13)


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has no grouped_mm")
@pytest.mark.parametrize("counts", [counts for counts in COUNTS if sum(counts)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_fused_kernel_equals_the_loop_in_bf16(counts: list[int], transposed: bool) -> None:
    """torch has the fused function on CPU too, so its arguments are checked here."""
    x = draw(1, sum(counts), IN, dtype=torch.bfloat16)
    weight = draw(2, 4, OUT, IN, dtype=torch.bfloat16).transpose(1, 2)
    if not transposed:
        weight = weight.contiguous()
    fused = grouped_matmul_fused(x, weight, GroupSizes(torch.tensor(counts), pytest.fail))
    torch.testing.assert_close(fused, grouped_matmul(x, weight, sizes(counts)), rtol=1e-2, atol=1e-2)
