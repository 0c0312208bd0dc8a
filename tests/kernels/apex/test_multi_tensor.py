"""apex's Adam: numbers, types, clipping, and empty tensors."""

import sys
from types import ModuleType

import pytest
import torch

from megalite.kernels import optimizer_ops as torch_ops
from megalite.kernels.probes import extension
from megalite.kernels.registry import IMPLEMENTATIONS, KernelUse

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def draw_state(n: int, grad: torch.dtype) -> list[torch.Tensor]:
    """Draw param, grad, exp_avg and exp_avg_sq."""
    generator = torch.Generator().manual_seed(n)
    param, gradient = (torch.randn(n, generator=generator) for _ in range(2))
    return [param, gradient.to(grad), torch.zeros(n), torch.zeros(n)]


@pytest.mark.parametrize("grad", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("copy", [None, torch.bfloat16])
def test_three_updates_equal_torch(apex: ModuleType, grad: torch.dtype, copy: torch.dtype | None) -> None:
    n = 3 * (1 << 16) + 5
    found, wanted = ([tensor.clone() for tensor in draw_state(n, grad)] for _ in range(2))
    halves = [None if copy is None else torch.empty(n, dtype=copy) for _ in range(2)]
    for step in (1, 2, 3):
        for tensors, half, kernel in ((found, halves[0], apex.adam), (wanted, halves[1], torch_ops.adam)):
            factor = torch.full((), 0.5)
            gradient = tensors[1].clone() if kernel is apex.adam else tensors[1].float().clone()
            kernel(tensors[0], gradient, *tensors[2:], **SETTINGS, step=step, factor=factor, copy=half)
    # The betas are fp32 in apex: 1 - 0.999 has a relative error of 1.3e-5.
    for ours, right, limit in zip(found, wanted, (1e-6, 0, 1e-6, 2e-5), strict=True):
        assert (ours.double() - right.double()).norm() <= limit * right.double().norm()
    if halves[0] is not None:
        assert torch.equal(halves[0], found[0].to(torch.bfloat16))


def test_gradients_are_clipped_once(apex: ModuleType) -> None:
    """Only our factor scales the gradient, and apex itself is not imported."""
    calls = []
    kernels = extension("amp_C")
    real = kernels.multi_tensor_adam
    kernels.multi_tensor_adam = lambda *given: (calls.append(given[2][0][0].clone()), real(*given))
    param, grad, exp_avg, exp_avg_sq = draw_state(8, torch.float32)
    before = grad.clone()
    apex.adam(param, grad, exp_avg, exp_avg_sq, **SETTINGS, step=1, factor=torch.full((), 0.25), copy=None)
    assert torch.equal(calls[0], before * 0.25)
    assert [name for name in sys.modules if name.startswith("apex")] == []


def test_bf16_parameters_are_errors(installed: ModuleType) -> None:
    """apex would update bf16 parameters in place without fp32 copies, whatever `master_weights` says."""
    use = KernelUse("cpu", torch.bfloat16, 64)
    assert IMPLEMENTATIONS["adam"]["apex"].why_not(use) == "it supports float32, not bfloat16"
    param = torch.zeros(4, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        installed("multi_tensor").adam(param, param, param, param, **SETTINGS, step=1, factor=None, copy=None)


def test_empty_tensors_are_accepted(apex: ModuleType) -> None:
    empty = [torch.empty(0) for _ in range(4)]
    apex.adam(*empty, **SETTINGS, step=1, factor=torch.ones(()), copy=torch.empty(0))
