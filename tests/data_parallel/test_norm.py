"""The squared norm of a flat gradient, in rows and what is left over."""

import pytest
import torch

from megalite.data_parallel.norm import NORM_ROW, norm_squared


@pytest.mark.parametrize("size", [0, 1, NORM_ROW - 1, NORM_ROW, 3 * NORM_ROW + 7])
def test_norm_over_rows_and_the_rest(size: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(norm_squared(grad), grad.double().square().sum(), rtol=1e-6, atol=0.0)
