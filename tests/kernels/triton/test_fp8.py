"""Triton's fp8 scaling and rounding have the same bits as torch's."""

import pytest
import torch
from torch import Tensor

from megalite.kernels import quantization as by_torch
from megalite.kernels.triton import fp8 as by_triton
from tests.kernels.triton.exact import draw

SHAPES = [
    *((shape, False) for shape in ((1, 1), (70, 130), (2, 9000))),
    *((shape, True) for shape in ((3, 40), (70, 130))),
]
"""Shape, and whether it is transposed. The interpreter runs one program per row, or per column if transposed."""


def draw_magnitudes(shape: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Draw elements of many magnitudes, some too small for fp8 next to the largest."""
    x = draw(*shape, seed=shape[1])
    return (x * torch.logspace(-6, 1, shape[0], dtype=x.dtype)[:, None]).to(device, dtype)


def assert_bitwise_equal(ours: by_torch.Rounded, exact: by_torch.Rounded) -> None:
    assert torch.equal(ours.undo, exact.undo) and ours.undo.shape == exact.undo.shape
    assert ours.data.is_contiguous()
    assert torch.equal(ours.data.view(torch.uint8), exact.data.view(torch.uint8))


@pytest.mark.parametrize("shape, transposed", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [by_torch.E4M3, by_torch.E5M2], ids=["e4m3", "e5m2"])
def test_values_equal_torch(dtype: torch.dtype, shape: tuple[int, int], transposed: bool, device: torch.device) -> None:
    x = draw_magnitudes(shape, device).t() if transposed else draw_magnitudes(shape, device)
    found = by_triton.largest(x)
    assert torch.equal(found, by_torch.largest(x))
    assert_bitwise_equal(by_triton.cast(x, found, dtype), by_torch.cast(x, found, dtype))
    assert_bitwise_equal(by_triton.cast_rows(x, dtype), by_torch.cast_rows(x, dtype))


def test_values_of_fp32_equal_torch(device: torch.device) -> None:
    x = draw_magnitudes((9, 50), device, torch.float32)
    assert torch.equal(by_triton.largest(x), by_torch.largest(x))
    assert_bitwise_equal(by_triton.cast_rows(x, by_torch.E4M3), by_torch.cast_rows(x, by_torch.E4M3))


@pytest.mark.parametrize("largest", [448.0, 449.0, 447.0, 1.75, 1.7578125, 57344.0, 1e-37, 3e38, 0.0])
@pytest.mark.parametrize("dtype", [by_torch.E4M3, by_torch.E5M2], ids=["e4m3", "e5m2"])
def test_scale_is_the_largest_that_fits(dtype: torch.dtype, largest: float, device: torch.device) -> None:
    x = torch.tensor([[largest, -largest, largest / 3]], device=device).bfloat16()
    assert_bitwise_equal(by_triton.cast_rows(x, dtype), by_torch.cast_rows(x, dtype))


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan"), -float("nan")])
def test_non_finite_value_makes_its_tensor_or_row_nan(bad: float, device: torch.device) -> None:
    x = draw_magnitudes((3, 20), device)
    x[1, 7] = bad
    for dtype in (by_torch.E4M3, by_torch.E5M2):
        whole, rows = by_triton.cast(x, by_triton.largest(x), dtype), by_triton.cast_rows(x, dtype)
        assert whole.undo.isnan() and whole.data.float().isnan().all()
        assert rows.undo.isnan().flatten().tolist() == [False, True, False]
        assert rows.data.float().isnan().all(dim=1).tolist() == [False, True, False]
