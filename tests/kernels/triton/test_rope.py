"""Rotary embedding by Triton against complex multiplication in float64, with gradients from that."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.kernels.triton.rope import rope
from tests.kernels.triton.exact import DTYPES, LIMITS, assert_near, distance, numbers, run

pytestmark = pytest.mark.usefixtures("poisoned")


def exact(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """A pair (x_i, x_{i+d/2}) is one complex number."""
    half = x.shape[-1] // 2
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(cos.double(), sin.double())
    return torch.cat((turned.real, turned.imag), dim=-1)


def tables(length: int, batch: int, half: int, device: torch.device) -> tuple[Tensor, Tensor]:
    angles = 3.0 * numbers(length, batch, 1, half, device=device, seed=7)
    return angles.cos().float(), angles.sin().float()


def check(x: Tensor, cos: Tensor, sin: Tensor, limit: float | None = None) -> None:
    grad = numbers(*x.shape, dtype=x.dtype, device=x.device, seed=3)
    (y,), (dx,) = run(lambda v: rope(v, cos, sin), [x], [grad])
    (exact_y,), (exact_dx,) = run(lambda v: exact(v, cos, sin), [x.double()], [grad.double()])
    assert y.dtype == x.dtype
    assert y.is_contiguous()
    assert_near(y, exact_y, limit)
    assert_near(dx, exact_dx, limit)


@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (5, 2, 3, 64),
        (1, 1, 1, 38),
        (3, 2, 1, 200),
        *(
            pytest.param(shape, marks=pytest.mark.gpu)
            for shape in ((1024, 3, 16, 128), (1023, 2, 12, 64), (1024, 1, 8, 256))
        ),
    ],
    ids=str,
)
def test_values_and_gradients(
    own_positions: bool, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    length, batch, _, size = shape
    x = numbers(*shape, dtype=dtype, device=device)
    check(x, *tables(length, batch if own_positions else 1, size // 2, device))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, :, 1:, :8],
        lambda x: x.transpose(0, 1)[:3, :2],
        lambda x: x.transpose(2, 3)[..., :2],
        lambda x: x[:, :1].expand(3, 2, 3, 12),
    ],
    ids=["slice", "batch first", "no dense dimension", "expanded"],
)
def test_any_strides(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    """Queries and keys are slices of one projection's output."""
    x = view(numbers(3, 3, 3, 12, device=device))
    check(x, *tables(len(x), x.shape[1], x.shape[-1] // 2, device))


def test_tables_of_other_strides(device: torch.device) -> None:
    cos, sin = tables(4, 3, 20, device)
    x = numbers(3, 2, 2, 20, device=device)
    check(x, cos[1:, :2, :, ::2], sin[1:, :2, :, ::2])


def test_an_expanded_gradient(device: torch.device) -> None:
    """That of a sum has strides of 0."""
    x, (cos, sin) = numbers(3, 2, 2, 8, device=device), tables(3, 1, 4, device)
    grads = [
        run(lambda v, f=f: f(v, cos, sin).sum(), [x], [torch.ones((), device=device).double()])[1][0]
        for f in (rope, exact)
    ]
    assert distance(*grads) < LIMITS[torch.float64]


def test_nothing_to_turn(device: torch.device) -> None:
    x = numbers(4, 0, 2, 8, device=device)
    (y,), (dx,) = run(lambda v: rope(v, *tables(4, 1, 4, device)), [x], [x])
    assert y.shape == dx.shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_great_and_small_numbers(dtype: torch.dtype, device: torch.device) -> None:
    x = (1e4 * numbers(2, 1, 2, 64, device=device)).to(dtype)
    x[0] = 0.0
    check(x, *tables(2, 1, 32, device))


def test_the_gradient_turns_back_to_the_bit(device: torch.device) -> None:
    """By quarters of a turn nothing is rounded, so that back and forth is the same."""
    x = numbers(4, 1, 2, 6, dtype=torch.float32, device=device)
    cos = torch.tensor([1.0, 0.0, -1.0, 0.0], device=device).view(4, 1, 1, 1).repeat(1, 1, 1, 3)
    sin = torch.tensor([0.0, 1.0, 0.0, -1.0], device=device).view(4, 1, 1, 1).repeat(1, 1, 1, 3)
    y = rope(x, cos, sin)
    assert torch.equal(y[1], torch.cat((-x[1, ..., 3:], x[1, ..., :3]), dim=-1))
    _, (back,) = run(lambda v: rope(v, cos, sin), [x], [y])
    assert torch.equal(back, x)


def test_the_same_bits_in_two_runs(device: torch.device) -> None:
    x, angles = numbers(6, 2, 3, 32, dtype=torch.float32, device=device), tables(6, 1, 16, device)
    first, second = (run(lambda v: rope(v, *angles), [x], [x]) for _ in range(2))
    assert torch.equal(first[0][0], second[0][0])
    assert torch.equal(first[1][0], second[1][0])


def test_keeps_the_tables_alone(device: torch.device) -> None:
    x, (cos, sin) = numbers(6, 2, 3, 32, device=device).requires_grad_(), tables(6, 1, 16, device)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rope(x, cos, sin)
    assert {value.data_ptr() for value in kept} == {cos.data_ptr(), sin.data_ptr()}


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(device: torch.device) -> None:
    length = 2**31 // (2 * 16 * 128) + 3
    x = torch.randn(length, 2, 16, 128, dtype=torch.bfloat16, device=device)
    cos, sin = tables(64, 1, 64, device)
    cos, sin = (table.repeat(length // 64 + 1, 1, 1, 1)[:length] for table in (cos, sin))
    (y,), (dx,) = run(lambda v: rope(v, cos, sin), [x], [x])
    assert not y.isnan().any()
    last = [table[-3:] for table in (cos, sin)]
    assert distance(y[-3:], exact(x[-3:].double(), *last)) < 4e-3
    assert distance(dx[-3:], exact(x[-3:].double(), last[0], -last[1])) < 4e-3
