"""Bias, dropout, residual sum and norm by Triton against their definition in float64, with gradients from that."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megalite.kernels import layer_ops
from megalite.kernels.triton.norms import add_norm, layernorm, rmsnorm
from tests.kernels.triton.exact import DTYPES, assert_near, compare, distance, norm, numbers, run

pytestmark = pytest.mark.usefixtures("poisoned")
EPS, P = 1e-3, 0.25
Pair = tuple[Tensor, Tensor]


def ours(zero_centered: bool = False, kernel: Callable[..., Pair] = add_norm) -> Callable[..., Pair]:
    def function(branch: Tensor, bias: Tensor | None, keep: Tensor | None, *rest: Tensor | None) -> Pair:
        return kernel(branch, bias, keep, P, *rest, EPS, zero_centered=zero_centered)

    return function


def exact(
    branch: Tensor,
    bias: Tensor | None,
    keep: Tensor | None,
    residual: Tensor,
    weight: Tensor,
    norm_bias: Tensor | None,
    offset: float = 0.0,
) -> Pair:
    part = branch if bias is None else branch + bias
    if keep is not None:
        part = torch.where(keep, part / (1 - P), 0.0)
    total = residual + part
    return norm(total, weight, norm_bias, EPS, offset), total


def arguments(
    shape: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype = torch.float64,
    *,
    bias: bool = True,
    keep: bool = True,
    norm_bias: bool = True,
) -> list[Tensor | None]:
    n = shape[-1]
    make = partial(numbers, dtype=dtype, device=device)
    return [
        make(*shape, seed=1),
        make(n, seed=2) if bias else None,
        numbers(*shape, device=device, seed=3) > -0.67 if keep else None,
        make(*shape, seed=4),
        make(n, seed=5),
        make(n, seed=6) if norm_bias else None,
    ]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("keep", [True, False], ids=["dropout", ""])
@pytest.mark.parametrize("norm_bias", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("kernel", [add_norm, layer_ops.add_norm], ids=["triton", "torch"])
def test_every_form(bias: bool, keep: bool, norm_bias: bool, kernel: Callable[..., Pair], device: torch.device) -> None:
    inputs = arguments((3, 2, 7), device, bias=bias, keep=keep, norm_bias=norm_bias)
    compare(ours(kernel=kernel), exact, inputs)
    compare(ours(zero_centered=True, kernel=kernel), partial(exact, offset=1.0), inputs)


@pytest.mark.parametrize("norm_bias", [True, False], ids=["layer", "rms"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (13, 130),
        (1, 2049),
        *(pytest.param((1027, n), marks=pytest.mark.gpu) for n in (128, 2048, 5120, 8192, 12288, 65536)),
    ],
    ids=str,
)
def test_types_and_sizes(norm_bias: bool, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    compare(ours(), exact, arguments(shape, device, dtype, norm_bias=norm_bias))


@pytest.mark.parametrize("norm_bias", [True, False], ids=["layer", "rms"])
def test_rows_longer_than_a_block(norm_bias: bool, device: torch.device) -> None:
    """The forward has a kernel of its own for these; in float64 the backward has for 2049 elements."""
    inputs = arguments((2, 8192 + 8), device, norm_bias=norm_bias)
    rounded = [v.float() if v is not None and v.is_floating_point() else v for v in inputs]
    for one, other in zip(ours()(*rounded), exact(*inputs), strict=True):
        assert_near(one, other)


def test_no_rows(device: torch.device) -> None:
    inputs = arguments((2, 0, 12), device)
    (normed, total), grads = run(ours(), inputs, [inputs[0], inputs[0]])
    assert normed.shape == total.shape == (2, 0, 12)
    assert [tuple(grad.shape) for grad in grads] == [(2, 0, 12), (12,), (2, 0, 12), (12,), (12,)]
    assert not any(grad.any() for grad in grads)


def test_any_strides(device: torch.device) -> None:
    inputs = arguments((4, 6, 20), device)
    branch, bias, keep, residual, *rest = inputs
    assert branch is not None and keep is not None and residual is not None
    swapped = [branch.transpose(0, 1), bias, keep.transpose(0, 1), residual.transpose(0, 1), *rest]
    compare(ours(), exact, swapped)
    compare(ours(), exact, [branch[:, ::2], bias, keep[:, ::2], residual[:, 1::2], *rest])
    narrow = [value if value is None or value.dim() > 1 else value[:3] for value in (bias, *rest)]
    columns = [value.transpose(0, 2)[..., :3] for value in (branch, keep, residual)]
    compare(ours(), exact, [columns[0], narrow[0], columns[1], columns[2], *narrow[1:]])


@pytest.mark.parametrize("used", [0, 1])
def test_one_of_the_outputs_is_not_used(used: int, device: torch.device) -> None:
    inputs = arguments((5, 9), device)
    grads = [torch.zeros(5, 9, dtype=torch.float64, device=device) for _ in range(2)]
    grads[used] = numbers(5, 9, device=device, seed=8)
    _, found = run(lambda *args: ours()(*args)[used], inputs, [grads[used]])
    _, expected = run(exact, inputs, grads)
    for one, other in zip(found, expected, strict=True):
        assert_near(one, other)


def test_dropped_elements_have_no_part(device: torch.device) -> None:
    """Not even where the branch is not finite; and no gradient."""
    branch, bias, _, residual, weight, norm_bias = arguments((6, 40), device)
    assert branch is not None and residual is not None
    keep = numbers(6, 40, device=device, seed=9) > 0
    branch = torch.where(keep, branch, float("inf"))
    (normed, total), (dbranch, *_) = run(
        ours(), [branch, bias, keep, residual, weight, norm_bias], [residual, residual]
    )
    assert normed.isfinite().all()
    assert torch.equal(total[~keep], residual[~keep])
    assert torch.equal(dbranch == 0, ~keep)


@pytest.mark.parametrize("n", [256, 8192 + 8])
@pytest.mark.parametrize("norm_bias", [True, False], ids=["layer", "rms"])
def test_what_is_normalised_is_the_sum_as_it_is_stored(n: int, norm_bias: bool, device: torch.device) -> None:
    """Else the backward, which has only what is stored, would belong to another forward."""
    inputs = arguments((2, n), device, torch.bfloat16, norm_bias=norm_bias)
    *_, weight, bias = inputs
    normed, total = ours()(*inputs)
    assert weight is not None
    again = rmsnorm(total, weight, EPS) if bias is None else layernorm(total, weight, bias, EPS)
    assert torch.equal(normed, again)


@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_extreme_values(scale: float, device: torch.device) -> None:
    branch, bias, keep, residual, weight, norm_bias = arguments((3, 300), device, torch.float32)
    assert branch is not None and bias is not None and residual is not None
    inputs = [branch * scale, bias * scale, keep, residual * scale, weight, norm_bias]
    normed, total = ours()(*inputs)
    exact_normed, exact_total = exact(*(v.double() if v is not keep and v is not None else v for v in inputs))
    assert_near(normed, exact_normed)
    assert_near(total, exact_total)


def test_a_residual_in_fp32(device: torch.device) -> None:
    inputs = arguments((4, 128), device, torch.bfloat16, keep=False)
    inputs[3] = numbers(4, 128, dtype=torch.float32, device=device, seed=4)
    (normed, total), grads = run(ours(), inputs, [inputs[3], inputs[3]])
    wide = [value if value is None else value.double() for value in inputs]
    (exact_normed, exact_total), exact_grads = run(exact, wide, [wide[3], wide[3]])
    assert normed.dtype == total.dtype == torch.float32
    assert_near(normed, exact_normed)
    assert_near(total, exact_total)
    for one, other in zip(grads, exact_grads, strict=True):
        assert_near(one, other)


@pytest.mark.parametrize("shape", [(11, 100), pytest.param((4099, 2048), marks=pytest.mark.gpu)], ids=str)
def test_the_same_bits_in_two_runs(shape: tuple[int, int], device: torch.device) -> None:
    inputs = arguments(shape, device, torch.float32)
    grads = [numbers(*shape, dtype=torch.float32, device=device, seed=seed) for seed in (7, 8)]
    first, second = (run(ours(), inputs, grads) for _ in range(2))
    for one, other in zip([*first[0], *first[1]], [*second[0], *second[1]], strict=True):
        assert torch.equal(one, other)


def test_keeps_the_sum_and_the_mask(device: torch.device) -> None:
    inputs = [
        value.requires_grad_() if value is not None and value.is_floating_point() else value
        for value in arguments((4, 3, 64), device, torch.bfloat16)
    ]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, total = ours()(*inputs)
    known = {value.data_ptr() for value in (total, inputs[2], inputs[4])}
    assert total.data_ptr() in {value.data_ptr() for value in kept}
    assert [tuple(value.shape) for value in kept if value.data_ptr() not in known] == [(2, 12)]


@pytest.mark.gpu
def test_more_elements_than_32_bits_count(device: torch.device) -> None:
    n, rows = 4096, 2**31 // 4096 + 5
    branch, residual = (torch.randn(rows, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    small = arguments((3, n), device, torch.bfloat16)
    keep = torch.zeros(rows, n, dtype=torch.bool, device=device)
    keep[-3:] = small[2]
    grad = torch.zeros_like(branch)
    grad[-3:] = numbers(3, n, dtype=torch.bfloat16, device=device, seed=9)
    (normed, total), grads = run(ours(), [branch, small[1], keep, residual, *small[4:]], [grad, grad])
    few = [branch[-3:], small[1], keep[-3:], residual[-3:], *small[4:]]
    wide = [v.double() if v is not None and v.is_floating_point() else v for v in few]
    outputs, exact_grads = run(exact, wide, [grad[-3:].double()] * 2)
    assert not normed.isnan().any()
    assert torch.equal(total[:-3], residual[:-3])
    for one, other in zip([normed, total, *grads], [*outputs, *exact_grads], strict=True):
        assert distance(one[-3:] if one.dim() > 1 else one, other) < 4e-3
    assert not grads[0][:-3].any()
