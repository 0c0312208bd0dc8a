"""The gradient norm by Triton and by torch against float64."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels import optimizer_ops as by_torch
from megalite.kernels.triton import optimizer_ops as by_triton

Norm = Callable[[list[Tensor]], Tensor]
BLOCK, PIECE = by_triton.NORM_BLOCK, by_torch.PIECES["cpu"]


@pytest.fixture(params=[by_triton, by_torch], ids=["triton", "torch"])
def l2norm(request: pytest.FixtureRequest) -> Norm:
    return request.param.l2norm


def draw(n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device, dtype)


def exact_norm(*tensors: Tensor) -> Tensor:
    """Return the norm by an exact sum: torch's sum of many squares is less exact than the kernel's."""
    squares = torch.cat([x.double().flatten() for x in tensors]).square()
    return torch.tensor(math.sqrt(math.fsum(squares.tolist())), dtype=torch.float64, device=tensors[0].device)


@pytest.mark.parametrize(
    "sizes",
    [[1], [BLOCK], [BLOCK + 1], [10 * BLOCK - 3], [7, 0, 2 * BLOCK, 5000], [0, 0], [PIECE - 1, PIECE, 3 * PIECE + 7]],
    ids=str,
)
def test_norm_of_many_sizes_equals_float64(sizes: list[int], l2norm: Norm, device: torch.device) -> None:
    """More blocks than programs, a partial last block, or no elements."""
    tensors = [draw(n, device) for n in sizes]
    found = l2norm(tensors)
    assert found.shape == ()
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, exact_norm(*tensors), rtol=1e-14, atol=0.0)


def test_norm_of_mixed_types_equals_float64(l2norm: Norm, device: torch.device) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = [draw(300 + i, device, dtype) for i, dtype in enumerate(dtypes)]
    torch.testing.assert_close(l2norm(tensors), exact_norm(*tensors), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("kind", ["large", "small", "many small beside a large", "inf", "nan", "a piece"])
def test_norm_of_values_that_fp32_cannot_sum(kind: str, l2norm: Norm, device: torch.device) -> None:
    """Squares beyond fp32's range, small ones next to large ones, NaN and infinity, and a part of a buffer."""
    x = draw(BLOCK + 9, device)
    if kind in ("large", "small"):
        x *= 1e30 if kind == "large" else 1e-30
    elif kind == "many small beside a large":
        x.fill_(1e-5)[0] = 1.0
    elif kind == "a piece":
        x = x[17:2000]
    else:
        x[-1] = float(kind)
    torch.testing.assert_close(l2norm([x]), exact_norm(x), rtol=1e-12, atol=0.0, equal_nan=True)


def test_two_runs_are_bitwise_equal(l2norm: Norm, device: torch.device) -> None:
    tensors = [draw(n, device) for n in (9 * BLOCK + 11, 301)]
    assert torch.equal(l2norm(tensors), l2norm(tensors))


@pytest.mark.parametrize("shards", [3, 64])
def test_norm_in_fp32_does_not_depend_on_the_shards(shards: int, l2norm: Norm, device: torch.device) -> None:
    """Elements of many magnitudes, split like data-parallel shards and summed over their ranks."""
    grad = draw(64 * 1000, device) * torch.logspace(-6, 2, 64 * 1000, device=device)
    total = l2norm([grad]).square()
    parts = torch.stack([l2norm([part]).square() for part in grad.chunk(shards)]).sum()
    torch.testing.assert_close(parts, total, rtol=1e-14, atol=0.0)
    assert torch.equal(parts.sqrt().float(), total.sqrt().float())


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.zeros(2**31 + 9, dtype=torch.bfloat16, device="cuda")
    x[-3:] = 2.0
    x[:1] = 2.0
    torch.full((4096,), float("nan"), dtype=torch.float64, device="cuda")  # freed; partial sums reuse this memory
    assert float(by_triton.l2norm([x])) == 4.0
