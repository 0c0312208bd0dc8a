"""The MLP's nonlinearities against their definitions."""

import math

import torch

from megalite.kernels.activations import gelu, swiglu


def test_gelu_is_x_times_the_normal_distribution() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    plain = torch.tensor(
        [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()], dtype=torch.float64
    )
    torch.testing.assert_close(gelu(x), plain, rtol=1e-12, atol=1e-13)


def test_gelu_tanh_is_the_approximation() -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    plain = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(gelu(x, tanh=True), plain, rtol=1e-12, atol=1e-13)
    assert (gelu(x) - plain).abs().max() > 1e-4, "the two forms differ"


def test_swiglu_gates_with_the_first_half() -> None:
    x = torch.randn(2, 3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gate, up = x[..., :5], x[..., 5:]
    torch.testing.assert_close(swiglu(x), gate / (1 + torch.exp(-gate)) * up, rtol=1e-12, atol=1e-13)
