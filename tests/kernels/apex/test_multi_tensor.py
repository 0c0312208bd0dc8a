"""apex's Adam and gradient norm: numbers, types, clipping, and the lists that it would not finish."""

import sys

import pytest
import torch

from megalite.kernels import adam as torch_adam
from megalite.kernels.implementations import IMPLEMENTATIONS, Use
from tests.kernels.apex.conftest import Adapter

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def state(n: int, grad: torch.dtype) -> list[torch.Tensor]:
    """param, grad, exp_avg, exp_avg_sq."""
    generator = torch.Generator().manual_seed(n)
    param, gradient = (torch.randn(n, generator=generator) for _ in range(2))
    return [param, gradient.to(grad), torch.zeros(n), torch.zeros(n)]


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy", [None, torch.bfloat16])
def test_three_updates(adapter: Adapter, grad: torch.dtype, copy: torch.dtype | None) -> None:
    n = 3 * (1 << 16) + 5
    found, wanted = ([tensor.clone() for tensor in state(n, grad)] for _ in range(2))
    halves = [None if copy is None else torch.empty(n, dtype=copy) for _ in range(2)]
    for step in (1, 2, 3):
        for tensors, half, kernel in (
            (found, halves[0], adapter("adam").adam),
            (wanted, halves[1], torch_adam.adam),
        ):
            factor = torch.full((), 0.5)
            gradient = tensors[1].clone() if kernel is adapter("adam").adam else tensors[1].float().clone()
            kernel(tensors[0], gradient, *tensors[2:], **SETTINGS, step=step, factor=factor, copy=half)
    # The betas are fp32 in apex: 1 - 0.999 is 1.3e-5 of itself off.
    for ours, right, limit in zip(found, wanted, (1e-6, 0, 1e-6, 2e-5), strict=True):
        assert (ours.double() - right.double()).norm() <= limit * right.double().norm()
    if halves[0] is not None:
        assert torch.equal(halves[0], found[0].to(torch.bfloat16))


def test_it_clips_once(adapter: Adapter) -> None:
    """The factor is all the clipping there is."""
    calls = []
    module = adapter("adam")
    real = module.amp_C.multi_tensor_adam
    module.amp_C.multi_tensor_adam = lambda *given: (calls.append(given[2][0][0].clone()), real(*given))
    param, grad, exp_avg, exp_avg_sq = state(8, torch.float32)
    before = grad.clone()
    module.adam(param, grad, exp_avg, exp_avg_sq, **SETTINGS, step=1, factor=torch.full((), 0.25), copy=None)
    assert torch.equal(calls[0], before * 0.25)
    assert [name for name in sys.modules if name.startswith("apex")] == []


def test_bf16_parameters_are_refused(installed: Adapter) -> None:
    """apex would update them in place of fp32 copies, whatever `master_weights` says."""
    use = Use("cpu", torch.bfloat16, 64)
    assert IMPLEMENTATIONS["adam"]["apex"].why_not(use) == "it takes float32, not bfloat16"
    param = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        installed("adam").adam(param, param, param, param, **SETTINGS, step=1, factor=None, copy=None)


def test_nothing_to_update(adapter: Adapter) -> None:
    empty = [torch.empty(0) for _ in range(4)]
    adapter("adam").adam(*empty, **SETTINGS, step=1, factor=torch.ones(()), copy=torch.empty(0))


@pytest.mark.parametrize(
    "sizes", [[70_000], [1000, 0, 3, 0], [0], [0, 0], [5] * 200], ids=lambda sizes: str(sizes)[:20]
)
def test_norm(adapter: Adapter, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty tensors, of which the last would keep apex from running what it has gathered."""
    module = adapter("l2norm")
    monkeypatch.setattr(module, "PIECE", 1 << 14)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    exact = torch.cat(tensors).double().norm()
    found = module.l2norm(tensors)
    assert found.dtype == torch.float64 and found.shape == ()
    assert abs(found - exact) <= 1e-7 * exact


def test_norm_of_several_types(adapter: Adapter) -> None:
    tensors = [torch.full((9,), 2.0), torch.full((16,), 3.0, dtype=torch.bfloat16), torch.full((7,), 1.0)]
    assert adapter("l2norm").l2norm(tensors).item() == pytest.approx((36 + 144 + 7) ** 0.5, rel=1e-7)


def test_the_stand_in_drops_what_apex_drops(adapter: Adapter) -> None:
    """The trap itself: lists that end on an empty tensor."""
    amp_C = adapter("l2norm").amp_C
    flag = torch.zeros(1, dtype=torch.int32)
    norm, _ = amp_C.multi_tensor_l2norm(1 << 16, flag, [[torch.ones(4), torch.empty(0)]], False)
    assert norm.item() == 0
    norm, _ = amp_C.multi_tensor_l2norm(1 << 16, flag, [[torch.empty(0), torch.ones(4)]], False)
    assert norm.item() == 2
