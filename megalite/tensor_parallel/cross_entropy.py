"""Cross-entropy over logits with the vocabulary split over tp; full logits never exist on one rank."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.kernels.bases import Function
from megalite.kernels.cross_entropy import cross_entropy_backward, cross_entropy_forward
from megalite.topology.group import Group

Kernel = tuple[Callable[..., Any], Callable[..., Tensor]]
"""Forward and backward over one rank's columns, with the signatures of `megalite.kernels.cross_entropy`."""


class _VocabParallelCrossEntropy(Function):
    """loss = log Σ exp(z) - z_label, from each rank's sums over its columns and its labels' logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int | None, tp: Group, kernel: Kernel) -> Tensor:
        labels, columns = labels.flatten(), logits.shape[-1]
        own, saved = kernel[0](logits.detach().flatten(0, -2), labels, first)
        ctx.kernel, ctx.first, ctx.shape = kernel, first, logits.shape
        logsumexp = None
        if tp.size == 1:
            _, total, picked = own.unbind()
            loss = total.log() - picked
        else:
            gathered = own.new_empty(tp.size * own.shape[0], own.shape[1])
            tp.all_gather(gathered, own)
            loss, logsumexp = merge_ranks(gathered.view(tp.size, *own.shape), labels // columns)
        ctx.save_for_backward(labels, logsumexp, *saved)
        return loss.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        labels, logsumexp, *saved = ctx.saved_tensors
        grad_logits = ctx.kernel[1](saved, labels, ctx.first, logsumexp, grad.reshape(-1))
        return grad_logits.view(ctx.shape), None, None, None, None


def merge_ranks(stats: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """Return (loss, log Σ exp z) of each token [n], from all ranks' `stats` [ranks, 3, n] and the label's rank [n]."""
    maximum, total, picked = stats.unbind(1)
    highest = maximum.amax(dim=0)
    log_total = (total * (maximum - highest).exp()).sum(dim=0).log()
    # Differences from the maximum: with large logits the sums themselves would lose digits.
    at_label = (picked + (maximum - highest)).gather(0, owner.unsqueeze(0)).squeeze(0)
    return log_total - at_label, log_total + highest


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    first: int,
    vocab_size: int,
    tp: Group,
    kernel: Kernel = (cross_entropy_forward, cross_entropy_backward),
) -> Tensor:
    """Return the loss of each token [s, b] in fp32 (fp64 for fp64 logits), for labels [s, b] below `vocab_size`.

    Args:
        logits: [s, b, V/tp], the new output of a GEMM; a kernel may overwrite it with the gradient. Columns for ids at
            or above `vocab_size` are padding: they are masked, so the loss does not depend on the amount of padding.
        first: the id of this rank's first column.

    Collectives: one all-gather of three numbers per token / none."""
    if first + logits.shape[-1] > vocab_size:
        # A finite value avoids NaN on a rank with only padding. In place, because no operation saved the logits.
        logits.detach()[..., max(vocab_size - first, 0) :] = torch.finfo(logits.dtype).min / 2
    return _VocabParallelCrossEntropy.apply(logits, labels, first if tp.size > 1 else None, tp, kernel)
