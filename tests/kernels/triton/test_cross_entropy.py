"""The cross-entropy kernels against torch in float64, alone and merged over vocabulary shards."""

import pytest
import torch
from torch import Tensor

from megalite.kernels.triton.cross_entropy import WIDEST, cross_entropy_backward, cross_entropy_forward, cut
from megalite.tensor_parallel.cross_entropy import merge_ranks

LIMIT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Relative L2 error of gradients, which are rounded to the type of the logits."""


def random_logits(n: int, v: int, device: torch.device, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(n, v, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(device)


def random_labels(n: int, v: int, device: torch.device) -> Tensor:
    return torch.randint(v, (n,), generator=torch.Generator().manual_seed(v)).to(device)


def expected(logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return losses and gradients in float64."""
    exact = logits.double().requires_grad_()
    loss = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    return loss.detach(), torch.autograd.grad(loss, exact, grad.double())[0]


def run_kernels(shards: list[Tensor], labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the kernels' losses and gradients, with the columns of `shards` merged like ranks."""
    firsts = [sum(shard.shape[1] for shard in shards[:i]) for i in range(len(shards))]
    parts = [cross_entropy_forward(shard, labels, first) for shard, first in zip(shards, firsts, strict=True)]
    stats = torch.stack([part for part, _ in parts])
    if len(shards) == 1:
        loss, logsumexp = stats[0, 1].log() - stats[0, 2], None
    else:
        loss, logsumexp = merge_ranks(stats, labels // shards[0].shape[1])
    gradients = [
        cross_entropy_backward(saved, labels, first, logsumexp, grad)
        for (_, saved), first in zip(parts, firsts, strict=True)
    ]
    return loss, torch.cat(gradients, dim=1)


def check(logits: Tensor, shards: list[Tensor], labels: Tensor) -> None:
    grad = torch.linspace(-1.0, 2.0, len(labels), device=logits.device)
    loss, gradient = expected(logits, labels, grad)
    found_loss, found_gradient = run_kernels(shards, labels, grad)
    torch.testing.assert_close(found_loss.double(), loss, rtol=1e-6, atol=2e-6)
    assert found_gradient.dtype == logits.dtype
    error = (found_gradient.double() - gradient).norm()
    assert error <= LIMIT[logits.dtype] * gradient.norm(), float(error / gradient.norm())


@pytest.mark.parametrize(
    ("v", "dtype"),
    [(WIDEST + 17, dtype) for dtype in LIMIT]
    + [(1, torch.float32), (5, torch.bfloat16), (5, torch.float64), (1000, torch.float16)],
    ids=str,
)
def test_loss_and_gradient_of_one_rank(v: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = random_logits(3, v, device).to(dtype)
    shard = logits.clone()
    check(logits, [shard], random_labels(3, v, device))
    assert shard._version > 0  # so that autograd detects a second backward through overwritten logits


@pytest.mark.parametrize("ranks", [2, 4])
def test_vocabulary_shards_equal_the_whole(ranks: int, device: torch.device) -> None:
    logits = random_logits(7, 4 * 253, device).float()
    check(logits, list(logits.clone().chunk(ranks, dim=1)), random_labels(7, 4 * 253, device))


def test_many_rows_use_one_program_each(device: torch.device) -> None:
    """Few rows use several programs each; the other tests' rows are split if they have more than one block."""
    assert cut(3, WIDEST + 17, 8).parts == 2
    assert cut(8, WIDEST + 17, 8).parts == 1
    logits = random_logits(8, WIDEST + 17, device).float()
    check(logits, [logits.clone()], random_labels(8, WIDEST + 17, device))


@pytest.mark.parametrize(("n", "v"), [(1, 1), (1, 131072), (7, 50304), (528, 131072), (16384, 50257), (40, 6288)])
def test_every_column_has_one_program(n: int, v: int) -> None:
    parts, span, block, warps = cut(n, v, 528)
    assert span % block == 0
    assert (parts - 1) * span < v <= parts * span
    assert n * parts <= max(2 * 528, n)
    assert block // (32 * warps) <= 16  # elements per thread, in registers


def test_empty_logits_are_accepted(device: torch.device) -> None:
    labels, empty = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, device=device)
    stats, saved = cross_entropy_forward(torch.zeros(0, 11, device=device), labels, 0)
    assert stats.shape == (3, 0)
    assert cross_entropy_backward(saved, labels, 0, empty, empty).shape == (0, 11)


def test_gradient_overwrites_strided_logits(device: torch.device) -> None:
    """Memory between rows does not change, and no tensor of the logits' size is allocated."""
    wide = random_logits(4, 96, device).bfloat16()
    before = wide.clone()
    logits = wide[:, 7:84]
    check(before[:, 7:84], [logits], random_labels(4, 77, device))
    assert not torch.equal(logits, before[:, 7:84])
    assert torch.equal(wide[:, :7], before[:, :7])
    assert torch.equal(wide[:, 84:], before[:, 84:])
    stats, saved = cross_entropy_forward(logits, random_labels(4, 77, device), 0)
    assert saved[0].data_ptr() == logits.data_ptr()
    assert cross_entropy_backward(saved, random_labels(4, 77, device), 0, None, stats[0]) is saved[0]


@pytest.mark.parametrize("kind", ["columns apart", "one row in all places"])
def test_logits_that_cannot_be_overwritten_are_copied(kind: str, device: torch.device) -> None:
    logits = random_logits(4, 154, device)[:, ::2] if kind == "columns apart" else random_logits(1, 9, device)
    logits = logits if kind == "columns apart" else logits.expand(5, 9)
    before = logits.clone()
    check(before, [logits], random_labels(*before.shape, device))
    assert torch.equal(logits, before)


def test_large_logits_do_not_overflow(device: torch.device) -> None:
    logits = random_logits(5, 300, device, 1e4).float()
    check(logits, [logits.clone()], random_labels(5, 300, device))


def test_columns_of_minus_infinity_are_ignored(device: torch.device) -> None:
    logits = random_logits(6, 2 * 130, device).float()
    logits[:, 40:140] = -float("inf")
    logits[1, :139] = -float("inf")  # the whole first shard of this row
    labels = torch.tensor([0, 259, 39, 140, 200, 3], device=device)
    labels[1] = 259
    check(logits, list(logits.clone().chunk(2, dim=1)), labels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rank_with_only_padding_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """Padding columns contain half of the type's lowest number and have no gradient."""
    logits, labels = random_logits(5, 100, device).to(dtype), random_labels(5, 100, device)
    padding = torch.full((5, 100), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
    grad = torch.ones(5, device=device)
    loss, gradient = run_kernels([logits.clone(), padding.clone()], labels, grad)
    alone, gradient_alone = run_kernels([logits.clone()], labels, grad)
    assert torch.equal(loss, alone)
    assert torch.equal(gradient[:, :100], gradient_alone)
    assert torch.equal(gradient[:, 100:], torch.zeros_like(padding))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter
def test_non_finite_logits_give_nan_losses(device: torch.device) -> None:
    logits = random_logits(3, 200, device).float()
    logits[0, 50], logits[1, 199] = float("nan"), float("inf")
    stats, _ = cross_entropy_forward(logits, torch.zeros(3, dtype=torch.int64, device=device), 0)
    loss = stats[1].log() - stats[2]
    assert loss.isnan().tolist() == [True, True, False]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from the interpreter
def test_ignored_tokens_have_no_gradient_even_from_nan_logits(device: torch.device) -> None:
    logits = random_logits(4, 300, device).float()
    logits[1, 3], logits[2] = float("inf"), float("nan")
    labels = torch.tensor([5, -100, 7, 299], device=device)
    grad = torch.tensor([1.0, 0.0, 0.0, 2.0], device=device)
    _, gradient = expected(logits[[0, 3]], labels[[0, 3]], grad[[0, 3]])
    _, found = run_kernels([logits], labels, grad)
    assert torch.equal(found[1:3], torch.zeros(2, 300, device=device))
    torch.testing.assert_close(found[[0, 3]].double(), gradient, rtol=1e-5, atol=1e-7)


def test_two_runs_are_bitwise_equal(device: torch.device) -> None:
    logits, labels = random_logits(3, 2 * WIDEST, device).bfloat16(), random_labels(3, 2 * WIDEST, device)
    grad = torch.ones(3, device=device)
    first, second = (run_kernels([logits.clone()], labels, grad) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.gpu
def test_more_than_2_to_the_31_logits() -> None:
    """The last rows need 64-bit offsets; unwritten memory would be NaN."""
    n, v = 16384 + 64, 131072
    logits = torch.empty(n, v, dtype=torch.bfloat16, device="cuda").normal_()
    labels = torch.randint(v, (n,), device="cuda")
    torch.full((3, n), float("nan"), device="cuda")  # freed at once; the statistics reuse this memory
    rows = torch.tensor([0, 1, 16383, 16384, n - 1], device="cuda")
    grad = torch.ones(n, device="cuda")
    loss, gradient = expected(logits[rows], labels[rows], grad[rows])
    found_loss, found = run_kernels([logits], labels, grad)
    torch.testing.assert_close(found_loss[rows].double(), loss, rtol=1e-6, atol=2e-6)
    assert (found[rows].double() - gradient).norm() / gradient.norm() < LIMIT[torch.bfloat16]
    assert bool(found_loss.isfinite().all())
