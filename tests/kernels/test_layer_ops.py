"""Dropout, and RoPE against complex numbers: pair i of a head is x_i + j·x_{i+d/2}, rotated by pos·θ_i. YaRN's frequencies
and attention factor are bitwise equal to those of transformers in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.kernels.layer_ops import apply_rope, attention_factor, masked_dropout, rope_frequencies, rope_tables
from tests.models.test_families import all_float64


def frequencies(head_size: int, base: float, scaling: str = "none", original: int = 64) -> Tensor:
    scaled = {"rope_scaling_factor": 8.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0}
    scaled |= {"rope_scaling": scaling, "rope_original_max_positions": original}
    return rope_frequencies(ModelConfig(kv_channels=head_size, rotary_base=base, **scaled))


def tables_of(positions: Tensor, theta: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return tables of positions [s] in the shape of apply_rope."""
    return [table[:, None, None] for table in rope_tables(positions, theta, dtype)]


def rotate(x: Tensor, base: float) -> Tensor:
    s, d = x.shape[0], x.shape[3]
    out = torch.empty_like(x)
    for position in range(s):
        for i in range(d // 2):
            angle = position * base ** (-2 * i / d)
            number = torch.complex(x[position, ..., i], x[position, ..., i + d // 2])
            number = number * complex(math.cos(angle), math.sin(angle))
            out[position, ..., i], out[position, ..., i + d // 2] = number.real, number.imag
    return out


def test_rope_rotates_each_pair_by_its_angle() -> None:
    x = torch.randn(7, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    tables = tables_of(torch.arange(7), frequencies(8, 500.0), torch.float64)
    torch.testing.assert_close(apply_rope(x, *tables), rotate(x, 500.0), rtol=1e-13, atol=1e-13)


def test_sequences_may_have_separate_positions() -> None:
    x = torch.randn(6, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    theta = frequencies(8, 500.0)
    positions = torch.tensor([[0, 0], [1, 1], [2, 0], [3, 1], [0, 2], [1, 3]])
    cos, sin = rope_tables(positions, theta, torch.float64)
    assert cos.shape == sin.shape == (6, 2, 4)
    both = apply_rope(x, cos[:, :, None], sin[:, :, None])
    for i in range(2):
        tables = tables_of(positions[:, i], theta, torch.float64)
        assert torch.equal(both[:, i : i + 1], apply_rope(x[:, i : i + 1], *tables))


def test_angles_of_large_positions_are_exact() -> None:
    """Angles are computed in fp64: in fp32 position 1,000,003 would have an error of a hundredth of a radian."""
    position = 1_000_003
    cos, sin = rope_tables(torch.tensor([position]), frequencies(4, 1e4), torch.float32)
    assert math.isclose(float(cos[0, 0]), math.cos(position), abs_tol=1e-6)
    assert math.isclose(float(sin[0, 1]), math.sin(position * 1e-2), abs_tol=1e-6)


def test_half_types_are_rotated_in_the_precision_of_the_tables() -> None:
    x = torch.randn(5, 1, 2, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    ours = apply_rope(x, *tables_of(torch.arange(5), frequencies(8, 1e4), torch.float32))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, rotate(x.double(), 1e4).bfloat16())


def test_linear_scaling_divides_positions() -> None:
    plain, scaled = frequencies(16, 1e4), frequencies(16, 1e4, "linear")
    assert scaled.dtype == torch.float64
    torch.testing.assert_close(scaled * 80, plain * 10, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("wavelength", "divisor"), [(15.9, 1.0), (32.0, 2.4), (64.1, 8.0)])
def test_llama3_scaling_depends_on_the_wavelength(wavelength: float, divisor: float) -> None:
    """64 original positions, factors 1 and 4: full scaling above 64, none below 16, interpolated frequencies between.

    A wavelength of 32 fits twice into 64, a third of the way from 1 to 4, so θ·(1/3 + 2/3/8) = θ / 2.4."""
    base = (wavelength / (2 * math.pi)) ** 2  # the second of the two pairs of a head of 4 has this wavelength
    plain, scaled = frequencies(4, base), frequencies(4, base, "llama3")
    assert math.isclose(2 * math.pi / float(plain[1]), wavelength, rel_tol=1e-12)
    assert math.isclose(float(plain[1] / scaled[1]), divisor, rel_tol=1e-12)
    assert scaled[0] == plain[0]


def test_dropout_scales_kept_elements() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2, 7, dtype=torch.float64, generator=generator).requires_grad_()
    keep = torch.rand(5, 2, 7, generator=generator) >= 0.25
    grad = torch.randn(5, 2, 7, dtype=torch.float64, generator=generator)
    y = masked_dropout(x, keep, 0.25)
    y.backward(grad)
    torch.testing.assert_close(y, torch.where(keep, x / 0.75, 0.0), rtol=1e-14, atol=0)
    torch.testing.assert_close(x.grad, torch.where(keep, grad / 0.75, 0.0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_dropout_saves_one_byte_per_element(dtype: torch.dtype) -> None:
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        masked_dropout(torch.ones(40, dtype=dtype).requires_grad_(), torch.ones(40, dtype=torch.bool), 0.1)
    assert [(tensor.dtype, tensor.numel()) for tensor in saved] == [(torch.bool, 40)]


QWEN = {"rotary_base": 1e6, "rope_scaling_factor": 4.0, "rope_original_max_positions": 32768}
DEEPSEEK = {"rope_scaling_factor": 40.0, "rope_original_max_positions": 4096}
SHORT = {"rope_original_max_positions": 12, "rope_scaling_factor": 3.0}


@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize(
    "settings",
    [
        QWEN,
        {**QWEN, "rope_truncate": False},
        {**QWEN, "rotary_percent": 0.5},
        {**QWEN, "rope_beta_fast": 20.0, "rope_beta_slow": 2.0, "rope_attention_factor": 1.3},
        {**DEEPSEEK, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
        {**DEEPSEEK, "rope_mscale": 0.707, "rope_mscale_all_dim": 1.3},
        SHORT,
        {**SHORT, "rope_truncate": False, "rope_beta_fast": 1.4, "rope_beta_slow": 0.2},
    ],
    ids=str,
)
def test_yarn_is_bitwise_equal_to_transformers(settings: dict[str, Any], head_size: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    model = ModelConfig(kv_channels=head_size, rope_scaling="yarn", **settings)
    names = ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim", "attention_factor")
    parameters = {name: getattr(model, f"rope_{name}") for name in names}
    parameters |= {"rope_type": "yarn", "factor": model.rope_scaling_factor, "rope_theta": model.rotary_base}
    parameters["original_max_position_embeddings"] = model.rope_original_max_positions
    parameters["partial_rotary_factor"] = model.rotary_percent
    config = LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=int(model.rope_scaling_factor * model.rope_original_max_positions),
        rope_parameters=parameters,
    )
    with all_float64():
        theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    assert theirs.dtype == torch.float64
    assert torch.equal(rope_frequencies(model), theirs)
    assert attention_factor(model) == factor


def test_tables_are_scaled_before_they_are_rounded() -> None:
    theta = rope_frequencies(ModelConfig(kv_channels=8, rope_scaling="yarn", **QWEN))
    positions = torch.arange(50)
    exact = [table * 1.37 for table in rope_tables(positions, theta, torch.float64)]
    for ours, expected in zip(rope_tables(positions, theta, torch.float32, 1.37), exact, strict=True):
        assert torch.equal(ours, expected.float())


def test_attention_factor_of_other_scalings_is_one() -> None:
    assert {attention_factor(ModelConfig(rope_scaling=kind)) for kind in ("none", "linear", "llama3", "dynamic")} == {
        1.0
    }


@pytest.mark.parametrize("length", [1, 4096, 4097, 8192, 100_000])
def test_dynamic_scaling_equals_transformers(length: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.configuration_llama import LlamaConfig

    scaled = {"rope_scaling": "dynamic", "rope_scaling_factor": 2.5, "rope_original_max_positions": 4096}
    model = ModelConfig(kv_channels=64, rotary_base=1e4, **scaled)
    parameters = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4}
    config = LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=parameters)
    with all_float64():
        theirs, factor = ROPE_INIT_FUNCTIONS["dynamic"](config, torch.device("cpu"), seq_len=length)
    assert factor == 1.0
    torch.testing.assert_close(rope_frequencies(model, length=length), theirs, rtol=1e-14, atol=0.0)
