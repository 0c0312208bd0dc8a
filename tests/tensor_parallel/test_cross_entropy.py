"""The split cross-entropy against torch's over the true vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.topology.group import Group
from tests.support.ranks import RankContext, run_ranks

S, B, VOCAB = 6, 2, 9
KINDS = ("random", "extreme", "equal")


def whole_logits(kind: str, padded: int) -> Tensor:
    """Draw [s, b, padded] with arbitrary values in the padding columns."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(S, B, padded, dtype=torch.float64, generator=generator)
    if kind == "extreme":
        logits = torch.where(logits > 0, 1e4, -1e4) + logits
    if kind == "equal":
        logits = torch.zeros_like(logits)
    logits[..., VOCAB:] = torch.tensor([float("nan"), 1e300, float("inf")]).repeat(padded)[: padded - VOCAB]
    return logits


def labels() -> Tensor:
    return torch.arange(S * B).view(S, B) % VOCAB


def check(tp: Group, kind: str, padded: int) -> None:
    whole = whole_logits(kind, padded)
    true = whole[..., :VOCAB].clone().requires_grad_()
    expected = F.cross_entropy(true.flatten(0, 1), labels().flatten(), reduction="none").view(S, B)
    grad = torch.randn(S, B, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected.backward(grad)
    full_grad = F.pad(true.grad, (0, padded - VOCAB))

    first = tp.rank * padded // tp.size
    local = whole.chunk(tp.size, -1)[tp.rank].clone().requires_grad_()
    # A fresh tensor, like the product of a GEMM: the function overwrites its padding.
    losses = vocab_parallel_cross_entropy(local * 1.0, labels(), first=first, vocab_size=VOCAB, tp=tp)
    # With logits of ±1e4 a loss of 2e4 keeps an absolute error of 1e-11.
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=2e-11 if kind == "extreme" else 1e-13)
    losses.backward(grad)
    torch.testing.assert_close(
        local.grad, full_grad.chunk(tp.size, -1)[tp.rank], rtol=1e-11, atol=1e-11 if kind == "extreme" else 1e-13
    )


def check_on_ranks(context: RankContext, tp: int, padded: int) -> None:
    group = context.topology(tp=tp).tp
    for kind in KINDS:
        check(group, kind, padded)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [9, 12, 16])
def test_loss_on_one_rank(kind: str, padded: int) -> None:
    check(Group.solo("tp"), kind, padded)


# 12 columns over 4 ranks: the last holds only padding; 16 over 2: the second holds one true column.
@pytest.mark.parametrize("tp, padded", [(2, 10), (2, 16), (4, 12), (4, 16)])
def test_split_loss_on_several_ranks(tp: int, padded: int) -> None:
    run_ranks(tp, check_on_ranks, tp, padded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_losses_of_half_precision_logits_are_fp32(dtype: torch.dtype) -> None:
    logits = (5 * whole_logits("random", VOCAB)).to(dtype)
    expected = F.cross_entropy(logits.double().flatten(0, 1), labels().flatten(), reduction="none").view(S, B)
    losses = vocab_parallel_cross_entropy(logits, labels(), first=0, vocab_size=VOCAB, tp=Group.solo("tp"))
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses.double(), expected, rtol=1e-6, atol=1e-6)


def fp16_on_padding(context: RankContext) -> list[float]:
    group = context.topology(tp=4).tp
    whole = whole_logits("random", 12)
    local = whole.chunk(4, -1)[group.rank].half().requires_grad_()
    losses = vocab_parallel_cross_entropy(local * 1.0, labels(), first=3 * group.rank, vocab_size=VOCAB, tp=group)
    losses.sum().backward()
    assert local.grad.isfinite().all()
    return losses.flatten().tolist()


def test_rank_with_only_padding_in_fp16() -> None:
    """fp16 cannot represent a very negative number; its replacement must still vanish."""
    true = whole_logits("random", 12)[..., :VOCAB].half().double()
    expected = F.cross_entropy(true.flatten(0, 1), labels().flatten(), reduction="none").tolist()
    for losses in run_ranks(4, fp16_on_padding):
        assert losses == pytest.approx(expected, rel=1e-5)
