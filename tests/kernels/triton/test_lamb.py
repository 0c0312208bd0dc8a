"""LAMB by Triton and by torch against the formula in float64."""

from typing import Any

import pytest
import torch

from megalite.kernels import optimizer_ops as by_torch
from megalite.kernels.triton.optimizer_ops import BLOCK, lamb_moments, lamb_step
from tests.kernels.lamb_formula import TERMS, draw_tensors, exact, relative_errors, run

KERNEL = lamb_moments, lamb_step
BOTH = pytest.mark.parametrize("kernel", [KERNEL, (by_torch.lamb_moments, by_torch.lamb_step)], ids=["triton", "torch"])


@pytest.mark.parametrize("n", [1, 2 * BLOCK, 5 * BLOCK + 3])
@pytest.mark.parametrize(("step", "weight_decay"), [(1, 0.1), (10**6, 0.0)])
@BOTH
@pytest.mark.usefixtures("poisoned")
def test_step_equals_formula(kernel: Any, n: int, step: int, weight_decay: float, device: torch.device) -> None:
    terms = {**TERMS, "weight_decay": weight_decay, "step": step, "rate": 0.3}
    tensors = draw_tensors(n, device=device)
    wanted = exact(tensors, **terms)
    found = relative_errors(run(kernel, tensors, **terms), wanted)
    assert found["grad"] == 0.0
    assert max(found.values()) < 5e-7, found


def test_errors_do_not_accumulate_over_ten_steps(device: torch.device) -> None:
    """Second moments keep the digits of 1 - β₂."""
    n = BLOCK + 5
    ours = [*draw_tensors(n, device=device)[:2], *(torch.zeros(n, device=device) for _ in range(2))]
    right = [tensor.double() for tensor in ours]
    terms = {**TERMS, "rate": 0.01}
    for step in range(1, 11):
        right[1] = torch.randn(n, dtype=torch.float64, generator=torch.Generator().manual_seed(step)).to(device)
        ours[1] = right[1].float()
        wanted = exact(right, **terms, step=step)
        found = relative_errors(run(KERNEL, ours, **terms, step=step), wanted)
        right = [wanted[name] for name in ("param", "grad", "exp_avg", "exp_avg_sq")]
    assert max(found.values()) < 1e-6, found


def test_moments_of_a_constant_gradient_stay_exact(device: torch.device) -> None:
    """Also with betas that fp32 cannot represent: beta·m + (1 - beta)·g would not converge to g."""
    grad = draw_tensors(64, device=device)[1]
    tensors = [torch.ones_like(grad), grad, grad.clone(), grad.square()]
    for step in (1, 2, 3):
        lamb_moments(*tensors, **{**TERMS, "beta2": 0.9999}, step=step, norms=False)
    assert torch.equal(tensors[2], grad)
    assert torch.equal(tensors[3], grad.square())


@BOTH
def test_norms_are_computed_on_request(kernel: Any, device: torch.device) -> None:
    lamb_moments, _ = kernel
    tensors, same = draw_tensors(BLOCK + 40, device=device), draw_tensors(BLOCK + 40, device=device)
    assert lamb_moments(*tensors, **TERMS, step=3, norms=False) == ()
    norms = [lamb_moments(*same, **TERMS, step=3, norms=True)]
    assert all(torch.equal(one, other) for one, other in zip(tensors, same, strict=True))
    again = draw_tensors(BLOCK + 40, device=device)
    norms.append(lamb_moments(*again, **TERMS, step=3, norms=True))
    assert torch.equal(torch.stack(norms[0]), torch.stack(norms[1])), "bitwise equal"
