"""The MLP's nonlinearities against their definitions."""

import math
from functools import partial

import pytest
import torch

from megalite.kernels.activations import bias_gelu, geglu, swiglu

ACTIVATIONS = {
    "gelu": bias_gelu,
    "gelu_tanh": partial(bias_gelu, tanh=True),
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu_tanh": partial(geglu, tanh=True),
}


def test_gelu_is_x_times_the_normal_distribution() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    plain = torch.tensor(
        [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(bias_gelu(x), plain, rtol=1e-12, atol=1e-13)


def test_gelu_tanh_is_the_approximation() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    plain = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(bias_gelu(x, tanh=True), plain, rtol=1e-12, atol=1e-13)
    assert (bias_gelu(x) - plain).abs().max() > 1e-4, "the two forms differ"


def test_swiglu_gates_with_the_first_half() -> None:
    x = torch.randn(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = x[..., :5], x[..., 5:]
    torch.testing.assert_close(swiglu(x), gate / (1 + torch.exp(-gate)) * up, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["swiglu", "geglu", "geglu_tanh"])
def test_gates_and_their_gradients(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 14, dtype=torch.float64, generator=generator)
    grad = torch.randn(3, 2, 7, dtype=torch.float64, generator=generator)
    ours_in, plain_in = x.clone().requires_grad_(), x.clone().requires_grad_()
    gate, up = plain_in[..., :7], plain_in[..., 7:]
    gates = {
        "swiglu": gate * torch.sigmoid(gate),
        "geglu": gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))),
        "geglu_tanh": bias_gelu(gate, tanh=True),
    }
    expected = gates[name] * up
    ours = ACTIVATIONS[name](ours_in)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-13)
    ours.backward(grad)
    expected.backward(grad)
    torch.testing.assert_close(ours_in.grad, plain_in.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_the_input_alone_is_kept(name: str) -> None:
    x = torch.randn(4, 10, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = ACTIVATIONS[name](x)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    assert y.shape == (4, 10 if name.startswith("gelu") else 5)


def test_a_gradient_that_is_not_contiguous() -> None:
    x = torch.randn(4, 6, 8, dtype=torch.float64)
    grad = torch.randn(6, 4, 4, dtype=torch.float64)
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    swiglu(one).backward(grad.transpose(0, 1))
    swiglu(other).backward(grad.transpose(0, 1).contiguous())
    assert torch.equal(one.grad, other.grad) if one.grad is not None and other.grad is not None else False


@pytest.mark.parametrize("tanh", [False, True])
def test_the_bias_is_added_before_and_gets_its_gradient(tanh: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 2, 5, dtype=torch.float64, generator=generator)
    bias = torch.randn(5, dtype=torch.float64, generator=generator, requires_grad=True)
    y = bias_gelu(x, bias, tanh=tanh)
    assert torch.equal(y, bias_gelu(x + bias, tanh=tanh))
    y.sum().backward()
    one = (x + bias.detach()).requires_grad_()
    bias_gelu(one, tanh=tanh).sum().backward()
    assert one.grad is not None and bias.grad is not None
    torch.testing.assert_close(bias.grad, one.grad.sum((0, 1)))
