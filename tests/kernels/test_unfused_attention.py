"""Attention that stores probabilities, against autograd over plain operations, and its saved bytes."""

import math

import pytest
import torch
from torch import Tensor

from megalite.kernels.attention import unfused_attention

P = 0.3


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, keep: Tensor | None, sink: Tensor | None = None
) -> Tensor:
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).div(math.sqrt(q.shape[-1])).exp()
    if visible is not None:
        weights = weights * visible
    sink_weight = 0.0 if sink is None else sink.exp().view(-1, 1, 1)
    weights = weights / (weights.sum(-1, keepdim=True) + sink_weight)
    if keep is not None:
        weights = weights * keep / (1 - P)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def draw_inputs(
    groups: int, s_q: int, s_k: int, dtype: torch.dtype = torch.float64
) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
    """Draw q, k, v in the model's memory order (views of [s, b, heads, d]), a gradient, a mask and a dropout mask."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((s_q, 2, 4, 6), (s_k, 2, groups, 6), (s_k, 2, groups, 6), (s_q, 2, 4, 6))
    *inputs, grad = (
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).permute(1, 2, 0, 3) for shape in shapes
    )
    visible = torch.rand(2, 1, s_q, s_k, generator=generator) < 0.6
    visible[..., 0] = True
    keep = torch.rand(2, 4, s_q, s_k, generator=generator) >= P
    return inputs, grad, visible, keep


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize(("s_q", "s_k"), [(5, 5), (3, 8), (1, 4)])
def test_values_and_gradients_equal_autograd(groups: int, masked: bool, drops: bool, s_q: int, s_k: int) -> None:
    inputs, grad, visible, keep = draw_inputs(groups, s_q, s_k)
    masks = (visible if masked else None, keep if drops else None)
    ours_in, expected_in = ([tensor.detach().clone().requires_grad_() for tensor in inputs] for _ in range(2))
    ours = unfused_attention(*ours_in, visible=masks[0], keep=masks[1], p=P)
    expected = plain_attention(*expected_in, *masks)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    ours.backward(grad)
    expected.backward(grad)
    for one, other in zip(ours_in, expected_in, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sink_takes_probability_and_adds_no_value(groups: int, dtype: torch.dtype) -> None:
    inputs, grad, visible, keep = draw_inputs(groups, 5, 8, dtype)
    inputs.append(torch.tensor([0.5, -3.0, 2.0, 1.0]).to(dtype))
    ours_in = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    expected_in = [tensor.detach().double().requires_grad_() for tensor in inputs]
    ours = unfused_attention(*ours_in[:3], visible=visible, keep=keep, p=P, sink=ours_in[3])
    expected = plain_attention(*expected_in[:3], visible, keep, expected_in[3])
    ours.backward(grad)
    expected.backward(grad.double())
    found = zip((ours, *(one.grad for one in ours_in)), (expected, *(one.grad for one in expected_in)), strict=True)
    for one, other in found:
        assert one is not None and other is not None
        assert (one - other).norm() <= (1e-12 if dtype == torch.float64 else 0.02) * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_within_rounding_of_fp64(dtype: torch.dtype) -> None:
    inputs, grad, visible, keep = draw_inputs(2, 32, 32, dtype)
    half_in = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    exact_in = [tensor.detach().double().requires_grad_() for tensor in inputs]
    half = unfused_attention(*half_in, visible=visible, keep=keep, p=P)
    exact = plain_attention(*exact_in, visible, keep)
    assert half.dtype == dtype
    torch.testing.assert_close(half.double(), exact, rtol=3e-2, atol=3e-2)
    half.backward(grad)
    exact.backward(grad.double())
    for one, other in zip(half_in, exact_in, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(("dtype", "score"), [(torch.bfloat16, 5), (torch.float32, 9), (torch.float64, 17)])
def test_backward_saves_two_values_and_a_byte_per_score(dtype: torch.dtype, score: int) -> None:
    inputs, _, visible, keep = draw_inputs(2, 8, 8, dtype)
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        unfused_attention(*(x.detach().requires_grad_() for x in inputs), visible=visible, keep=keep, p=P)
    given = sum(x.numel() for x in inputs) * dtype.itemsize
    assert sum(storages.values()) == given + score * keep.numel()


def test_output_is_contiguous_for_the_projection() -> None:
    inputs, _, visible, keep = draw_inputs(2, 8, 8)
    out = unfused_attention(*inputs, visible=visible, keep=keep, p=P)
    assert out.permute(2, 0, 1, 3).is_contiguous()
