"""LAMB by apex's functions: numbers, arguments that must not reach them, and effects that they must not have."""

from typing import Any

import pytest
import torch

from megalite.kernels.registry import IMPLEMENTATIONS, KernelUse
from tests.kernels.apex.conftest import Adapter
from tests.kernels.lamb_formula import NAMES, TERMS, exact, off, piece, run

CHUNK = 1 << 16


def kernel(adapter: Adapter) -> tuple[Any, Any]:
    module = adapter("multi_tensor")
    return module.lamb_moments, module.lamb_step


@pytest.mark.parametrize("n, step", [(1, 1), (CHUNK, 7), (3 * CHUNK + 5, 10**6)])
@pytest.mark.parametrize(
    "settings, limit",
    [
        ({"beta2": 0.95}, 1e-6),
        ({"beta2": 0.95, "weight_decay": 0.0}, 1e-6),
        # 1 - β₂ in fp32 is 1.3e-5 of itself off, which shows beside moments that were made without apex.
        ({"beta2": 0.999}, 1e-5),
    ],
)
def test_one_step(adapter: Adapter, n: int, step: int, settings: dict[str, float], limit: float) -> None:
    terms = {**TERMS, **settings, "step": step, "rate": 0.3}
    tensors = piece(n)
    wanted = exact(tensors, **terms)
    found = off(run(kernel(adapter), tensors, **terms), wanted)
    assert found["grad"] == 0.0
    assert max(found.values()) < limit, found


def test_directions_are_corrected_for_the_betas_that_apex_has(adapter: Adapter) -> None:
    """Bias corrections are exact from the first step: apex's fp32 powers have an error of 1.5e-5 at the second."""
    fresh = [*piece(3000)[:2], torch.zeros(3000), torch.zeros(3000)]
    terms = {**TERMS, "eps": 1e-8, "weight_decay": 0.0, "rate": 0.3}
    right = [tensor.double() for tensor in fresh]
    for step in range(1, 12):
        generator = torch.Generator().manual_seed(step)
        right[1] = torch.randn(3000, dtype=torch.float64, generator=generator)
        fresh[1] = right[1].float()
        wanted = exact(right, **terms, step=step)
        found = run(kernel(adapter), fresh, **terms, step=step)
        assert off(found, wanted)["norms"] < 5e-7, step
        right = [wanted[name] for name in NAMES]
    assert off(found, wanted)["param"] < 1e-6


def test_a_long_gradient_is_not_clipped(adapter: Adapter) -> None:
    tensors = piece(100)
    tensors[1] *= 1e6
    terms = {**TERMS, "step": 3, "rate": 0.3}
    wanted = exact(tensors, **terms)
    assert off(run(kernel(adapter), tensors, **terms), wanted)["exp_avg"] < 1e-6


def test_the_second_half_leaves_the_moments(adapter: Adapter) -> None:
    """No moment changes, even if its square overflows: another tensor is passed as the gradient, times 1 - β = 0."""
    param, _, exp_avg, exp_avg_sq = piece(300)
    exp_avg[:3] = torch.tensor([3e38, -3e38, 1e-30])
    before = exp_avg.clone(), exp_avg_sq.clone()
    kernel(adapter)[1](param, exp_avg, exp_avg_sq, **TERMS, step=3, rate=1e-3)
    assert torch.equal(exp_avg, before[0]) and torch.equal(exp_avg_sq, before[1])


def test_nothing_to_update(adapter: Adapter) -> None:
    """Empty tensors launch no kernel, which would fail, and have norms of 0."""
    found = run(kernel(adapter), [torch.empty(0) for _ in range(4)], **TERMS, step=1, rate=1.0)
    assert found["norms"].tolist() == [0.0, 0.0]


def test_only_dense_fp32(installed: Adapter) -> None:
    use = KernelUse("cpu", torch.bfloat16, 64)
    assert IMPLEMENTATIONS["lamb"]["apex"].why_not(use) == "it supports float32, not bfloat16"
    for wrong in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(8)[::2]):
        tensors = [torch.zeros(4), wrong, torch.zeros(4), torch.zeros(4)]
        with pytest.raises(AssertionError):
            installed("multi_tensor").lamb_moments(*tensors, **TERMS, step=1, norms=True)
