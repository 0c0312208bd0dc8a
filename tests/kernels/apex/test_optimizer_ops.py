"""apex's Adam and LAMB: numbers, types, clipping, empty tensors, arguments that must not reach them, and effects that they must
not have."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.kernels import optimizer_ops as torch_ops
from megalite.kernels.probes import extension
from megalite.kernels.registry import IMPLEMENTATIONS, KernelUse
from tests.kernels.lamb_formula import NAMES, TERMS, draw_tensors, exact, relative_errors, run

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
        installed.adam(param, param, param, param, **SETTINGS, step=1, factor=None, copy=None)


def test_empty_tensors_are_accepted(apex: ModuleType) -> None:
    empty = [torch.empty(0) for _ in range(4)]
    apex.adam(*empty, **SETTINGS, step=1, factor=torch.ones(()), copy=torch.empty(0))


CHUNK = 1 << 16


def kernel(apex: ModuleType) -> tuple[Any, Any]:
    return apex.lamb_moments, apex.lamb_step


@pytest.mark.parametrize("n, step", [(1, 1), (CHUNK, 7), (3 * CHUNK + 5, 10**6)])
@pytest.mark.parametrize(
    "settings, limit",
    [
        ({"beta2": 0.95}, 1e-6),
        ({"beta2": 0.95, "weight_decay": 0.0}, 1e-6),
        # 1 - β₂ in fp32 has a relative error of 1.3e-5, visible with moments that apex did not compute.
        ({"beta2": 0.999}, 1e-5),
    ],
)
def test_step_equals_formula(apex: ModuleType, n: int, step: int, settings: dict[str, float], limit: float) -> None:
    terms = {**TERMS, **settings, "step": step, "rate": 0.3}
    tensors = draw_tensors(n)
    wanted = exact(tensors, **terms)
    found = relative_errors(run(kernel(apex), tensors, **terms), wanted)
    assert found["grad"] == 0.0
    assert max(found.values()) < limit, found


def test_bias_corrections_match_apexs_fp32_betas(apex: ModuleType) -> None:
    """Bias corrections are exact from the first step: apex's fp32 powers have an error of 1.5e-5 at the second."""
    fresh = [*draw_tensors(3000)[:2], torch.zeros(3000), torch.zeros(3000)]
    terms = {**TERMS, "eps": 1e-8, "weight_decay": 0.0, "rate": 0.3}
    right = [tensor.double() for tensor in fresh]
    for step in range(1, 12):
        generator = torch.Generator().manual_seed(step)
        right[1] = torch.randn(3000, dtype=torch.float64, generator=generator)
        fresh[1] = right[1].float()
        wanted = exact(right, **terms, step=step)
        found = run(kernel(apex), fresh, **terms, step=step)
        assert relative_errors(found, wanted)["norms"] < 5e-7, step
        right = [wanted[name] for name in NAMES]
    assert relative_errors(found, wanted)["param"] < 1e-6


def test_large_gradients_are_not_clipped(apex: ModuleType) -> None:
    tensors = draw_tensors(100)
    tensors[1] *= 1e6
    terms = {**TERMS, "step": 3, "rate": 0.3}
    wanted = exact(tensors, **terms)
    assert relative_errors(run(kernel(apex), tensors, **terms), wanted)["exp_avg"] < 1e-6


def test_parameter_step_does_not_change_the_moments(apex: ModuleType) -> None:
    """No moment changes, even if its square overflows: another tensor is passed as the gradient, times 1 - β = 0."""
    param, _, exp_avg, exp_avg_sq = draw_tensors(300)
    exp_avg[:3] = torch.tensor([3e38, -3e38, 1e-30])
    before = exp_avg.clone(), exp_avg_sq.clone()
    kernel(apex)[1](param, exp_avg, exp_avg_sq, **TERMS, step=3, rate=1e-3)
    assert torch.equal(exp_avg, before[0]) and torch.equal(exp_avg_sq, before[1])


def test_empty_tensors_have_zero_norms(apex: ModuleType) -> None:
    """Empty tensors launch no kernel, which would fail, and have norms of 0."""
    found = run(kernel(apex), [torch.empty(0) for _ in range(4)], **TERMS, step=1, rate=1.0)
    assert found["norms"].tolist() == [0.0, 0.0]


def test_other_types_and_strides_are_errors(installed: ModuleType) -> None:
    use = KernelUse("cpu", torch.bfloat16, 64)
    assert IMPLEMENTATIONS["lamb"]["apex"].why_not(use) == "it supports float32, not bfloat16"
    for wrong in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8)[::2]):
        tensors = [torch.zeros(4), wrong, torch.zeros(4), torch.zeros(4)]
        with pytest.raises(AssertionError):
            installed.lamb_moments(*tensors, **TERMS, step=1, norms=True)
