"""LayerNorm and RMSNorm against their definitions, with gradients from those."""

import pytest
import torch

from megalite.kernels.norms import layer_norm, rms_norm

EPS = 1e-3  # large, so that leaving it out or putting it outside the root shows


def plain_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    mean = x.sum(-1, keepdim=True) / x.shape[-1]
    variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
    return (x - mean) / (variance + EPS) ** 0.5 * weight + bias


def plain_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPS) ** 0.5 * weight


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 2, 24), (24,), (24,), (3, 2, 24))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_values_and_gradients(kind: str) -> None:
    x, weight, bias, grad = inputs(torch.float64)
    ours_in, plain_in = ([tensor.clone().requires_grad_() for tensor in (x, weight, bias)] for _ in range(2))
    if kind == "layer":
        ours = layer_norm(ours_in[0], ours_in[1], ours_in[2], EPS)
        plain = plain_layer_norm(plain_in[0], plain_in[1], plain_in[2])
    else:
        ours, plain = rms_norm(ours_in[0], ours_in[1], EPS), plain_rms_norm(plain_in[0], plain_in[1])
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    ours.backward(grad)
    plain.backward(grad)
    for one, other in list(zip(ours_in, plain_in, strict=True))[: 3 if kind == "layer" else 2]:
        assert one.grad is not None
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_bf16_statistics_are_not_taken_in_bf16(kind: str) -> None:
    """512 equal terms would stop adding up in bf16 once their sum has 8 bits more."""
    x = (1.0 + 0.01 * torch.randn(4, 512, generator=torch.Generator().manual_seed(3))).bfloat16()
    weight, bias = torch.ones(512, dtype=torch.bfloat16), torch.zeros(512, dtype=torch.bfloat16)
    if kind == "layer":
        ours, plain = (
            layer_norm(x, weight, bias, EPS),
            plain_layer_norm(x.double(), weight.double(), bias.double()),
        )
    else:
        ours, plain = rms_norm(x, weight, EPS), plain_rms_norm(x.double(), weight.double())
    torch.testing.assert_close(ours.double(), plain, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_zero_centered_weights_are_added_to_one(kind: str) -> None:
    x, weight, bias, grad = inputs(torch.float64)
    ours_in, plain_in = ([tensor.clone().requires_grad_() for tensor in (x, weight, bias)] for _ in range(2))
    if kind == "layer":
        ours = layer_norm(*ours_in, EPS, zero_centered=True)
        plain = plain_layer_norm(plain_in[0], 1 + plain_in[1], plain_in[2])
    else:
        ours = rms_norm(*ours_in[:2], EPS, zero_centered=True)
        plain = plain_rms_norm(plain_in[0], 1 + plain_in[1])
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    ours.backward(grad)
    plain.backward(grad)
    for one, other in list(zip(ours_in, plain_in, strict=True))[: 3 if kind == "layer" else 2]:
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_small_zero_centered_weight_is_not_rounded_away_in_bf16(kind: str) -> None:
    """1 + 3/1024 rounds to 1 in bf16."""
    weight = torch.full((64,), 3 / 1024, dtype=torch.bfloat16)
    assert (weight + 1 == 1).all()
    x = torch.randn(100, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    zero = torch.zeros_like(weight)
    if kind == "layer":
        scaled, plain = (layer_norm(x, w, zero, EPS, zero_centered=True).double() for w in (weight, zero))
    else:
        scaled, plain = (rms_norm(x, w, EPS, zero_centered=True).double() for w in (weight, zero))
    # Single results are rounded too; their mean is not.
    assert (scaled.abs().mean() / plain.abs().mean()).item() == pytest.approx(1 + 3 / 1024, rel=3e-4)


def test_rms_norm_keeps_its_input_and_a_number_a_row() -> None:
    x = torch.randn(4, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(64, dtype=torch.bfloat16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rms_norm(x, weight, EPS)
    others = [tensor for tensor in kept if tensor.data_ptr() not in (x.data_ptr(), weight.data_ptr())]
    assert [tensor.shape for tensor in others] == [(4, 3, 1)]


def test_rms_norm_of_bf16_has_the_gradients_of_fp64_within_its_rounding() -> None:
    x, weight, _, grad = inputs(torch.bfloat16)
    half = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [x.double().requires_grad_(), weight.double().requires_grad_()]
    rms_norm(*half, EPS).backward(grad)
    plain_rms_norm(*exact).backward(grad.double())
    for one, other in zip(half, exact, strict=True):
        assert one.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=2**-7, atol=2**-6)
