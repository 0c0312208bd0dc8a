"""Attention block by block: as exact as torch's fused kernel, forward and backward, and chosen where it is quicker."""

import pytest
import torch
from torch import Tensor

from megalite.config.errors import ConfigError
from megalite.kernels import attention_backends
from megalite.kernels.attention import causal_attention
from megalite.kernels.attention_backends import AttentionShape, choose_attention, why_not_blocked

CPU = torch.device("cpu")
WHY_NOT = why_not_blocked(CPU, torch.bfloat16)

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

# [batch, heads, groups, sequence, head size]: one block and less, several with a rest, larger blocks, few and many heads.
SHAPES = [
    (2, 4, 4, 1, 16),
    (2, 4, 2, 100, 16),
    (1, 3, 3, 128, 24),
    (2, 8, 2, 300, 32),
    (1, 2, 1, 1100, 64),
    (3, 16, 16, 257, 8),
]


def drawn(shape: tuple[int, int, int, int, int]) -> list[Tensor]:
    """Queries with large scores, keys, values and the output's gradient, laid out as the model has them."""
    b, heads, groups, seq, size = shape
    generator = torch.Generator().manual_seed(seq)
    counts = (heads, groups, groups, heads)
    tensors = [torch.randn((seq, b, count, size), generator=generator) for count in counts]
    tensors[0] *= 3.0
    return [tensor.bfloat16().permute(1, 2, 0, 3) for tensor in tensors]


def results(kernel: object, given: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out = kernel(*leaves)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, given[3])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_exact_as_torchs(shape: tuple[int, int, int, int, int]) -> None:
    given = drawn(shape)
    exact = results(causal_attention, [tensor.double() for tensor in given])
    ours = results(attention_backends.blocked_attention, given)
    theirs = results(causal_attention, given)
    for mine, their, right in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16 and mine.shape == right.shape
        error, other = ((each.double() - right).norm() / right.norm().clamp(min=1e-3) for each in (mine, their))
        assert error <= max(1.5 * other, 3e-3), (float(error), float(other))


def test_no_query_sees_what_comes_later() -> None:
    given = drawn((1, 2, 2, 300, 16))
    whole = attention_backends.blocked_attention(*given[:3])
    changed = [tensor.clone() for tensor in given[:3]]
    changed[1][:, :, 200:] += 5.0
    changed[2][:, :, 200:] -= 5.0
    after = attention_backends.blocked_attention(*changed)
    assert torch.equal(after[:, :, :200], whole[:, :, :200])
    assert not torch.equal(after[:, :, 200:], whole[:, :, 200:])


def test_heads_are_cut_as_memory_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    given = drawn((2, 4, 4, 200, 16))
    whole = results(attention_backends.blocked_attention, given)
    monkeypatch.setattr(attention_backends, "SCORES", 1)
    for mine, other in zip(results(attention_backends.blocked_attention, given), whole, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


def test_without_a_mask() -> None:
    q, k, v, _ = drawn((2, 4, 2, 50, 16))
    found = attention_backends.blocked_attention(q[:, :, :1], k, v, causal=False)
    assert torch.equal(found, causal_attention(q[:, :, :1], k, v, causal=False))


def test_nothing_is_kept_but_the_inputs() -> None:
    """As the planner counts flash attention."""
    q, k, v, _ = (tensor.requires_grad_() for tensor in drawn((2, 4, 4, 256, 16)))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        attention_backends.blocked_attention(q, k, v)
    assert sorted(tensor.numel() for tensor in kept) == [q.numel()] * 3


@pytest.mark.parametrize("kinds, backend", [(("amd-avx512",), "blocked"), ((), "flash")])
def test_auto_takes_it_where_it_is_quicker(
    kinds: tuple[str, ...], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_backends, "cpu_kinds", lambda: kinds)
    half, single = (AttentionShape(CPU, dtype, 4, 4, 16) for dtype in (torch.bfloat16, torch.float32))
    assert choose_attention("auto", half, seq=12).backend == backend
    assert choose_attention("auto", single, seq=12).backend == "flash"


def test_what_it_does_not_take() -> None:
    with pytest.raises(ConfigError, match=r"blocked cannot be had: it takes bfloat16, not float32; use"):
        choose_attention("blocked", AttentionShape(CPU, torch.float32, 4, 4, 16), seq=12)
    assert why_not_blocked(torch.device("cuda"), torch.bfloat16) == "there is none on cuda"
    choice = choose_attention("blocked", AttentionShape(CPU, torch.bfloat16, 4, 2, 16), seq=12)
    assert (choice.backend, choice.why) == ("blocked", "asked for")
