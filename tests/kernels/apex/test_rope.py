"""apex's rotary embedding against float64: layouts, tables, and what is refused."""

import pytest
import torch

from megalite.config.errors import ConfigError
from megalite.kernels.rope import apply_rope
from tests.kernels.apex.conftest import Adapter

LIMITS = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def tables(s: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.randn(s, 1, 1, d // 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("dtype", LIMITS)
def test_values_and_gradients(adapter: Adapter, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(7, 2, 3, 24, generator=generator).to(dtype)
    x = qkv[..., 8:16]  # a part of a wider row, as queries are
    grad = torch.randn(7, 3, 2, 8, generator=generator).to(dtype).transpose(1, 2)
    cos, sin = tables(7, 8)
    found, exact = [], []
    for results, function, wide in ((found, adapter("rope").rope, dtype), (exact, apply_rope, torch.float64)):
        leaf = x.to(wide).requires_grad_()
        parts = (cos, sin) if wide == torch.float64 else (cos.float(), sin.float())
        y = function(leaf, *parts)
        results += [y.detach(), *torch.autograd.grad(y, leaf, grad.to(wide))]
    for ours, right in zip(found, exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - right).norm() <= LIMITS[dtype] * right.norm()


def test_tables_are_doubled_once(adapter: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    module = adapter("rope")
    seen: list[int] = []
    forward = module.kernels.forward_cached
    monkeypatch.setattr(
        module.kernels,
        "forward_cached",
        lambda *given: (seen.append(given[1].data_ptr()), forward(*given))[1],
    )
    cos, sin = (table.float() for table in tables(4, 8))
    for _ in range(3):
        module.rope(torch.randn(4, 1, 2, 8), cos, sin)
    assert len(seen) == 3 and len(set(seen)) == 1
    assert len(module._whole_tables) == 2
    del cos, sin
    assert len(module._whole_tables) == 0


def test_positions_of_each_sequence_are_refused(adapter: Adapter) -> None:
    cos = torch.ones(4, 3, 1, 4)
    with pytest.raises(ConfigError, match=r"rope=apex takes one table for all sequences.*use rope=torch"):
        adapter("rope").rope(torch.ones(4, 3, 2, 8), cos, cos)


def test_no_rows(adapter: Adapter) -> None:
    cos, sin = (table.float() for table in tables(0, 8))
    x = torch.empty(0, 2, 2, 8, requires_grad=True)
    y = adapter("rope").rope(x, cos, sin)
    assert y.shape == x.shape
    y.sum().backward()
