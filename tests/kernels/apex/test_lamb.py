"""LAMB by apex's functions: numbers, arguments that must not reach them, and effects that they must not have."""

from types import ModuleType
from typing import Any

import pytest
import torch

from megalite.kernels.registry import IMPLEMENTATIONS, KernelUse
from tests.kernels.lamb_formula import NAMES, TERMS, draw_tensors, exact, relative_errors, run

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
            installed("multi_tensor").lamb_moments(*tensors, **TERMS, step=1, norms=True)
