"""Rotary embedding against complex numbers: pair i of a head is the number x_i + j·x_{i+d/2}, turned by pos·θ_i."""

import math

import torch

from megalite.kernels.rope import apply_rope, rope_tables


def turned(x: torch.Tensor, base: float, first: int = 0) -> torch.Tensor:
    s, d = x.shape[0], x.shape[3]
    out = torch.empty_like(x)
    for position in range(s):
        for i in range(d // 2):
            angle = (first + position) * base ** (-2 * i / d)
            number = torch.complex(x[position, ..., i], x[position, ..., i + d // 2])
            number = number * complex(math.cos(angle), math.sin(angle))
            out[position, ..., i], out[position, ..., i + d // 2] = number.real, number.imag
    return out


def test_it_turns_each_pair_by_its_angle() -> None:
    x = torch.randn(7, 2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(torch.arange(7), 8, 500.0, torch.float64)
    torch.testing.assert_close(apply_rope(x, cos, sin), turned(x, 500.0), rtol=1e-13, atol=1e-13)


def test_products_depend_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 16, dtype=torch.float64, generator=generator) for _ in range(2))

    def product(q_position: int, k_position: int) -> float:
        tables = [rope_tables(torch.tensor([p]), 16, 1e4, torch.float64) for p in (q_position, k_position)]
        return float((apply_rope(q, *tables[0]) * apply_rope(k, *tables[1])).sum())

    assert math.isclose(product(5, 2), product(1005, 1002), rel_tol=1e-10)
    assert not math.isclose(product(5, 2), product(5, 3), rel_tol=1e-3)


def test_far_positions_keep_their_digits() -> None:
    """Angles are computed in fp64: in fp32 position 1,000,003 would be off by a hundredth of a radian."""
    position = 1_000_003
    cos, sin = rope_tables(torch.tensor([position]), 4, 1e4, torch.float32)
    assert math.isclose(float(cos[0, 0]), math.cos(position), abs_tol=1e-6)
    assert math.isclose(float(sin[0, 1]), math.sin(position * 1e-2), abs_tol=1e-6)


def test_half_precision_is_turned_in_the_precision_of_the_tables() -> None:
    x = torch.randn(5, 1, 2, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    cos, sin = rope_tables(torch.arange(5), 8, 1e4, torch.float32)
    ours = apply_rope(x, cos, sin)
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, turned(x.double(), 1e4).bfloat16())
