"""The norm of flat gradients, in rows and what is left over."""

import pytest
import torch

from megalite.kernels.l2norm import ROW, l2norm


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, 3 * ROW + 7])
def test_norm_over_rows_and_the_rest(size: int) -> None:
    grad = torch.randn(size, generator=torch.Generator().manual_seed(size))
    torch.testing.assert_close(l2norm([grad]), grad.double().square().sum().sqrt(), rtol=1e-6, atol=0.0)


def test_norm_of_several_is_that_of_all_together() -> None:
    parts = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3, ROW + 1, 0)]
    torch.testing.assert_close(l2norm(parts), torch.cat(parts).double().norm(), rtol=1e-6, atol=0.0)
