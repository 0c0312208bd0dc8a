"""apex's cross-entropy against float64, whole and in parts of the vocabulary."""

import pytest
import torch

from megalite.kernels.cross_entropy import cross_entropy_forward
from megalite.kernels.implementations import IMPLEMENTATIONS, Use
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.topology.group import Group
from tests.kernels.apex.conftest import Adapter

LIMITS = {torch.float32: 3e-6, torch.float16: 5e-4}


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits [n, v], labels of which some are 0, gradients of the losses."""
    generator = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(12, 40, generator=generator)
    labels = torch.randint(40, (12,), generator=generator)
    labels[::4] = 0
    return logits.to(dtype), labels, torch.rand(12, generator=generator)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("parts", [1, 4])
def test_parts_of_the_vocabulary_add_up(adapter: Adapter, dtype: torch.dtype, parts: int) -> None:
    module = adapter("cross_entropy")
    logits, labels, grad = inputs(dtype)
    exact = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    (right,) = torch.autograd.grad(losses, exact, grad.double())
    pieces = logits.chunk(parts, dim=1)  # not dense: the kernel must not see their strides
    width = pieces[0].shape[1]
    stats, saved = zip(
        *(module.cross_entropy_forward(part, labels, width * place) for place, part in enumerate(pieces)),
        strict=True,
    )
    maximum, total, picked = torch.stack(stats).unbind(1)
    logsumexp = (maximum + total.log()).logsumexp(0)
    owner = (labels // width).unsqueeze(0)
    found = logsumexp - (picked + maximum).gather(0, owner).squeeze(0)
    assert all(part.dtype == torch.float32 for part in stats)
    torch.testing.assert_close(found.double(), losses.detach(), atol=1e-5, rtol=1e-5)
    grads = [
        module.cross_entropy_backward(kept, labels, width * place, None if parts == 1 else logsumexp, grad)
        for place, kept in enumerate(saved)
    ]
    whole = torch.cat(grads, dim=1)
    assert whole.dtype == dtype
    assert (whole.double() - right).norm() <= LIMITS[dtype] * right.norm()


def test_token_0_is_a_token(adapter: Adapter) -> None:
    """apex's own wrapper takes 0 for padding, without loss or gradient."""
    module = adapter("cross_entropy")
    logits, labels, _ = inputs(torch.float32)
    logits.requires_grad_()
    losses = vocab_parallel_cross_entropy(
        logits.view(6, 2, 40),
        labels.view(6, 2),
        first=0,
        vocab_size=40,
        tp=Group.solo("tp"),
        kernel=(module.cross_entropy_forward, module.cross_entropy_backward),
    ).flatten()
    losses.sum().backward()
    assert logits.grad is not None
    assert bool((losses[labels == 0] > 0.1).all())
    assert bool((logits.grad[labels == 0, 0] < 0).all())


def test_no_tokens(adapter: Adapter) -> None:
    module = adapter("cross_entropy")
    logits, labels = torch.empty(0, 40), torch.empty(0, dtype=torch.int64)
    stats, saved = module.cross_entropy_forward(logits, labels, 0)
    assert stats.shape == cross_entropy_forward(logits, labels, 0)[0].shape
    assert module.cross_entropy_backward(saved, labels, 0, None, torch.empty(0)).shape == (0, 40)


def test_bf16_logits_are_not_served(installed: Adapter) -> None:
    module = installed("cross_entropy")
    found = IMPLEMENTATIONS["cross_entropy"]["apex"]
    assert found.why_not(Use("cpu", torch.bfloat16, 40)) == "it takes float32, float16, not bfloat16"
    logits, labels, _ = inputs(torch.bfloat16)
    (_, _, _), (_, log_sum) = module.cross_entropy_forward(logits, labels, 0)
    # What it would have to go by: half a digit of bf16, 1 % and more of each probability.
    assert (log_sum.double() - logits.double().logsumexp(1)).abs().max() > 0.01
