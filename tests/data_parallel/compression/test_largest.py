"""Test the selection of the largest elements, independent of the sample."""

import pytest
import torch

from megalite.data_parallel.codec import SMALL, STRIDE, largest

SIZE = 3 * SMALL + 5


def sorted_out(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices by a stable sort; NaN first."""
    return torch.argsort(values, stable=True, descending=True)[:count].sort().values


def rows(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(SIZE, generator=generator).abs()
    if kind == "few values":
        return (values * 3).floor()
    if kind == "zeros":
        return values * 0.0
    if kind == "sparse":
        return values * (torch.rand(SIZE, generator=generator) < 0.005)
    if kind == "sample sees only large ones":
        values[::STRIDE] += 10.0
    if kind == "sample sees only small ones":
        values += 10.0
        values[::STRIDE] -= 10.0
    if kind == "infinities":
        values[5::1000] = torch.inf
    if kind == "nan":
        values[7::2000] = torch.nan
    return values


@pytest.mark.parametrize(
    "kind",
    [
        *("random", "few values", "zeros", "sparse", "infinities", "nan"),
        *("sample sees only large ones", "sample sees only small ones"),
    ],
)
@pytest.mark.parametrize("count", [1, 10, SIZE // 100, SIZE // 2, SIZE])
def test_selection_equals_a_stable_sort(kind: str, count: int) -> None:
    values = rows(kind)
    before = values.clone()
    assert torch.equal(largest(values, count), sorted_out(values, count))
    assert torch.equal(values.nan_to_num(-1.0), before.nan_to_num(-1.0))


@pytest.mark.parametrize("size", [1, 2, 100, SMALL - 1, SMALL])
def test_selection_of_other_sizes(size: int) -> None:
    values = torch.rand(size, generator=torch.Generator().manual_seed(2))
    for count in {1, (size + 1) // 2, size}:
        assert torch.equal(largest(values, count), sorted_out(values, count))


def test_more_nan_than_selected_elements() -> None:
    values = torch.full((100,), torch.nan)
    assert torch.equal(largest(values, 3), torch.arange(3))
