"""Attention against a loop over queries, keys and heads; tiles against autograd of the dense formula."""

import math

import pytest
import torch
from torch import Tensor

from megalite.kernels import attention
from megalite.kernels.attention import TileKind, causal_attention, tile_backward, tile_forward

Tensors = list[Tensor]


def loop_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query i of s_q attends to the keys up to s_k - s_q + i; head h uses group h // (heads / groups)."""
    b, heads, s_q, d = q.shape
    groups, s_k = k.shape[1], k.shape[2]
    rows = []
    for n in range(b):
        for head in range(heads):
            group = head // (heads // groups)
            for i in range(s_q):
                count = s_k - s_q + i + 1
                scores = torch.stack([q[n, head, i] @ k[n, group, j] for j in range(count)]) / math.sqrt(d)
                rows.append((scores.exp() / scores.exp().sum()) @ v[n, group, :count])
    return torch.stack(rows).view(b, heads, s_q, d)


def draw_inputs(heads: int, groups: int, s_q: int, s_k: int, dtype: torch.dtype = torch.float64, d: int = 4) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, s_q, d), (2, groups, s_k, d), (2, groups, s_k, d))
    return [torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("heads, groups", [(4, 4), (4, 2), (4, 1)])
def test_values_and_gradients_equal_the_loop(heads: int, groups: int) -> None:
    ours_in = [tensor.requires_grad_() for tensor in draw_inputs(heads, groups, 6, 6)]
    expected_in = [tensor.detach().clone().requires_grad_() for tensor in ours_in]
    ours = causal_attention(*ours_in)
    expected = loop_attention(*expected_in)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ours.backward(grad)
    expected.backward(grad)
    for one, other in zip(ours_in, expected_in, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-11, atol=1e-12)


def test_one_query_attends_to_the_whole_cache() -> None:
    q, k, v = draw_inputs(4, 2, 1, 9)
    torch.testing.assert_close(causal_attention(q, k, v, causal=False), loop_attention(q, k, v), rtol=1e-12, atol=1e-12)


def dense_scores(q: Tensor, k: Tensor, kind: TileKind) -> Tensor:
    """Return scores [b, heads, s_q, s_k] with -inf for pairs outside the tile."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    all_pairs = torch.ones(scores.shape[-2:], dtype=torch.bool)
    visible = {TileKind.FULL: all_pairs, TileKind.CAUSAL: all_pairs.tril(), TileKind.EDGE: all_pairs.triu()}[kind]
    return scores.masked_fill(~visible, -math.inf)


def attention_over_tiles(q: Tensor, keys: Tensors, values: Tensors, kinds: list[TileKind]) -> Tensors:
    """Return output and logsumexp of one softmax over the keys of several tiles."""
    scores = torch.cat([dense_scores(q, k, kind) for k, kind in zip(keys, kinds, strict=True)], dim=-1)
    v = torch.cat(values, dim=2).repeat_interleave(q.shape[1] // values[0].shape[1], dim=1)
    return [scores.softmax(-1) @ v, scores.logsumexp(-1)]


SQUARES = [(1, 1), (3, 3), (17, 17), (33, 33)]
OBLONGS = [(1, 9), (9, 1), (40, 7), (7, 40)]
TILES = [(kind, *size) for kind in TileKind for size in (SQUARES + OBLONGS if kind is TileKind.FULL else SQUARES)]


@pytest.fixture(params=["fused", "products"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Select the CPU's fused kernel, or the matrix products of devices and types without one."""
    if request.param == "products":
        monkeypatch.setattr("megalite.kernels.attention._fused_on_cpu", lambda q: False)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind, s_q, s_k", TILES)
@pytest.mark.parametrize("heads, groups, d", [(2, 2, 6), (4, 2, 16), (3, 1, 128), (1, 1, 1)])
def test_tiles_equal_the_dense_formula(kind: TileKind, s_q: int, s_k: int, heads: int, groups: int, d: int) -> None:
    """With a second, full tile, the backward must use the merged output and logsumexp."""
    q, k, v = draw_inputs(heads, groups, s_q, s_k, d=d)
    _, other_k, other_v = draw_inputs(heads, groups, s_q, 5, d=d)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out, logsumexp = attention_over_tiles(q, [k, other_k], [v, other_v], [kind, TileKind.FULL])
    grad_out = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    # The gradient of q has a part from each tile.
    expected_dq = torch.autograd.grad(out, q, grad_out, retain_graph=True)[0]
    expected_dk, expected_dv = torch.autograd.grad(out, leaves[1:], grad_out)
    q, k, v, out, logsumexp = (tensor.detach() for tensor in (q, k, v, out, logsumexp))

    tile_out, tile_logsumexp = tile_forward(q, k, v, kind)
    expected = attention_over_tiles(q, [k], [v], [kind])
    torch.testing.assert_close([tile_out, tile_logsumexp], expected, rtol=1e-12, atol=1e-12)
    dq, dk, dv = tile_backward(grad_out, q, k, v, out, logsumexp, kind)
    other_dq, _, _ = tile_backward(grad_out, q, other_k, other_v, out, logsumexp, TileKind.FULL)
    torch.testing.assert_close([dq + other_dq, dk, dv], [expected_dq, expected_dk, expected_dv], rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", list(TileKind))
def test_tiles_accept_any_strides(kind: TileKind) -> None:
    """Inputs are slices of activations [s, b, heads, d], a gradient broadcast along d, and slices of the logsumexp."""
    generator = torch.Generator().manual_seed(3)
    q, k, v, out = (
        torch.randn(20, 2, 4, 8, dtype=torch.float64, generator=generator).permute(1, 2, 0, 3)[:, :, 3:14]
        for _ in range(4)
    )
    logsumexp = torch.randn(2, 4, 20, dtype=torch.float64, generator=generator)[:, :, 3:14] + 5.0
    grad_out = torch.randn(2, 4, 11, 1, dtype=torch.float64, generator=generator).expand(2, 4, 11, 8)
    transposed = [tensor.mT.contiguous().mT for tensor in (q, k, v)]
    packed = [tensor.contiguous() for tensor in (q, k, v)]
    assert all(tensor.stride(-1) != 1 for tensor in transposed)
    for given in ([q, k, v], transposed):
        torch.testing.assert_close(tile_forward(*given, kind), tile_forward(*packed, kind), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            tile_backward(grad_out, *given, out, logsumexp, kind),
            tile_backward(grad_out.contiguous(), *packed, out.contiguous(), logsumexp.contiguous(), kind),
            rtol=1e-13,
            atol=1e-13,
        )


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("kind", list(TileKind))
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_low_precision_tiles_are_within_rounding(kind: TileKind, dtype: torch.dtype, bound: float) -> None:
    q, k, v = draw_inputs(4, 2, 48, 48, dtype, d=32)
    grad_out = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    out, logsumexp = tile_forward(q, k, v, kind)
    assert out.dtype == dtype
    assert logsumexp.dtype == torch.float32
    grads = tile_backward(grad_out, q, k, v, out, logsumexp, kind)
    assert all(grad.dtype == dtype for grad in grads)
    leaves = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    exact = attention_over_tiles(leaves[0], [leaves[1]], [leaves[2]], [kind])
    exact_grads = torch.autograd.grad(exact[0], leaves, grad_out.double())
    for ours, reference in zip((out, logsumexp, *grads), (*exact, *exact_grads), strict=True):
        error = (ours.double() - reference).norm() / reference.norm()
        assert error < bound


def test_fused_cuda_operators_accept_our_arguments() -> None:
    """Only shapes: schemas differ between versions of torch, and gradients of grouped keys must stay grouped."""
    shapes = {"q": (2, 4, 16, 64), "k": (2, 2, 12, 64), "v": (2, 2, 12, 64)}
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes.values())
    out, logsumexp = attention._cuda_flash_forward(q, k, v, causal=False)
    assert out.shape == q.shape
    assert logsumexp.shape == q.shape[:3]
    assert logsumexp.dtype == torch.float32
    grads = attention._cuda_flash_backward(torch.empty_like(out), q, k, v, out, logsumexp, causal=False)
    assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]
