"""The Adam kernel against torch's fused AdamW and against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.kernels.triton.optimizer_ops import BLOCK, adam

SETTINGS: dict[str, Any] = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def draw(n: int, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)).to(device)


def initial_state(n: int, device: torch.device) -> list[Tensor]:
    """Draw param, exp_avg and exp_avg_sq before the first step."""
    return [draw(n, device), torch.zeros(n, device=device), torch.zeros(n, device=device)]


def torch_adam(state: list[Tensor], grad: Tensor, step: int, **settings: Any) -> None:
    param, exp_avg, exp_avg_sq = state
    torch._fused_adamw_(
        *([param], [grad], [exp_avg], [exp_avg_sq], []),
        # torch's kernel expects a step that its caller has already incremented.
        [torch.full((), float(step), device=param.device)],
        amsgrad=False,
        maximize=False,
        **settings,
    )


def adam_in_float64(state: list[Tensor], grad: Tensor, step: int, **settings: float) -> list[Tensor]:
    param, exp_avg, exp_avg_sq = state
    beta1, beta2 = settings["beta1"], settings["beta2"]
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt() + settings["eps"]
    param = param * (1 - settings["lr"] * settings["weight_decay"])
    return [param - settings["lr"] * exp_avg / (1 - beta1**step) / denominator, exp_avg, exp_avg_sq]


def ulps(found: Tensor, wanted: Tensor, least: Tensor) -> float:
    """Return the largest distance in units of the last place of `wanted`, or of `least` where that is larger.

    `least` is the value before the update: if the update cancels most of it, the result has its rounding error."""
    size = torch.maximum(wanted.double().abs(), least.double().abs())
    unit = torch.exp2(size.clamp(min=torch.finfo(torch.float32).tiny).log2().floor() - 23)
    return float(((found.double() - wanted.double()).abs() / unit).max())


@pytest.mark.parametrize("n", [1, 1000, 2 * BLOCK, 2 * BLOCK + 3])
def test_three_steps_equal_torch(n: int, device: torch.device) -> None:
    ours, theirs = initial_state(n, device), initial_state(n, device)
    for step in (1, 2, 3):
        grad = draw(n, device, step) * 10.0 ** torch.linspace(-12, 6, n, device=device)
        before = [x.clone() for x in theirs]
        adam(ours[0], grad, *ours[1:], **SETTINGS, step=step, factor=None, copy=None)
        torch_adam(theirs, grad, step, **SETTINGS)
        assert not torch.equal(ours[0], before[0])
        before[0] = before[0].abs().clamp(min=SETTINGS["lr"])  # an update of this size has this rounding error
        # torch computes in double on CUDA: 2 ulps are usual there, and one draw in a thousand has 3.
        assert max(ulps(a, b, c) for a, b, c in zip(ours, theirs, before, strict=True)) <= 3.0
        for a, b in zip(ours, theirs, strict=True):
            a.copy_(b)  # each step starts from the same state


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.float64], ids=str)
def test_gradient_factor_and_copy(grad_dtype: torch.dtype, factor_dtype: torch.dtype, device: torch.device) -> None:
    n = 777
    grad = draw(n, device, 1).to(grad_dtype)
    factor = torch.tensor(0.25, dtype=factor_dtype, device=device)
    for dtype in (torch.bfloat16, torch.float16):
        ours, plain = initial_state(n, device), initial_state(n, device)
        copy = torch.full((n,), float("nan"), dtype=dtype, device=device)
        adam(ours[0], grad, *ours[1:], **SETTINGS, step=1, factor=factor, copy=copy)
        adam(plain[0], grad.float() * 0.25, *plain[1:], **SETTINGS, step=1, factor=None, copy=None)
        assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
        if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter truncates to bf16
            torch.testing.assert_close(copy.float(), ours[0], rtol=2**-7, atol=0.0)
        else:
            assert torch.equal(copy, ours[0].to(dtype))


def test_memory_outside_the_shard_does_not_change(device: torch.device) -> None:
    """A shard is a part of a longer buffer."""
    buffers = [*initial_state(200, device), draw(200, device, 1), torch.zeros(200, dtype=torch.bfloat16, device=device)]
    before = [x.clone() for x in buffers]
    param, exp_avg, exp_avg_sq, grad, copy = (x[13:150] for x in buffers)
    adam(param, grad, exp_avg, exp_avg_sq, **SETTINGS, step=1, factor=None, copy=copy)
    for now, old in zip(buffers, before, strict=True):
        assert torch.equal(now[:13], old[:13])
        assert torch.equal(now[150:], old[150:])
    assert not torch.equal(copy, torch.zeros_like(copy))


def test_moments_of_a_constant_gradient_stay_exact(device: torch.device) -> None:
    """Also with betas that fp32 cannot represent: here beta·m + (1 - beta)·g would converge 1e-6 away from g²."""
    grad = torch.full((3,), 1.7, device=device)
    state = [torch.ones(3, device=device), grad.clone(), grad.square()]
    for step in (1, 2, 3):
        adam(state[0], grad, *state[1:], **{**SETTINGS, "beta2": 0.9999}, step=step, factor=None, copy=None)
    assert torch.equal(state[1], grad)
    assert torch.equal(state[2], grad.square())


def test_bias_correction_of_late_steps_uses_double(device: torch.device) -> None:
    """At step 1e6 with beta2 = 0.999999 the correction is 0.632; fp32 powers would have an error of 1 %."""
    state = [torch.zeros(1, device=device), torch.ones(1, device=device), torch.ones(1, device=device)]
    settings = {**SETTINGS, "beta2": 0.999999, "lr": 1.0, "weight_decay": 0.0}
    exact = adam_in_float64([x.double() for x in state], torch.ones(1).double().to(device), 10**6, **settings)
    adam(state[0], torch.ones(1, device=device), *state[1:], **settings, step=10**6, factor=None, copy=None)
    assert ulps(state[0], exact[0], exact[0]) <= 4.0


def test_empty_shards_are_accepted(device: torch.device) -> None:
    adam(*(torch.zeros(0, device=device) for _ in range(4)), **SETTINGS, step=1, factor=None, copy=None)


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements() -> None:
    """The last elements need 64-bit offsets, and the copy is complete."""
    n, device = 2**31 + 5, torch.device("cuda")
    state = [torch.ones(n, device=device), torch.zeros(n, device=device), torch.zeros(n, device=device)]
    grad = torch.empty(n, dtype=torch.bfloat16, device=device).normal_()
    copy = torch.full((n,), float("nan"), dtype=torch.bfloat16, device=device)
    adam(state[0], grad, *state[1:], **SETTINGS, step=1, factor=None, copy=copy)
    for end in (slice(0, 1000), slice(n - 1000, n)):
        small = [torch.ones(1000, device=device), *(torch.zeros(1000, device=device) for _ in range(2))]
        adam(small[0], grad[end].clone(), *small[1:], **SETTINGS, step=1, factor=None, copy=None)
        assert all(torch.equal(a[end], b) for a, b in zip(state, small, strict=True))
    assert torch.equal(copy, state[0].bfloat16())
