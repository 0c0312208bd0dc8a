"""Compute one rank's part of the vocab-parallel cross-entropy: its sums over its columns, and its part of the gradient.

Logits are the largest activation of a step. On a CPU each pass over them costs as much as its arithmetic, so they are
processed in blocks, with all passes over a block while it is in the cache; no second tensor of their size is allocated.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 17  # logits per block: 0.5 MiB of fp32


def cross_entropy_forward(logits: Tensor, labels: Tensor, first: int | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return this rank's contribution to the loss of each token.

    With (m_r, d_r) of each rank r, log Σ_r d_r·exp(m_r) is the log-sum-exp of the whole row.

    Args:
        logits: [n, v], columns `first` to `first` + v of the vocabulary; None: the whole vocabulary. fp32 and fp64
            logits are overwritten.
        labels: [n], indices into the whole vocabulary.

    Returns:
        [3, n] in fp32 (fp64 for fp64 logits): m, d = Σ exp(z - m), for which m need not be the maximum, and the label's
        z - m, or 0 if another rank has the label's column. Then the `saved` tensors of `cross_entropy_backward`."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    stats = logits.new_empty((3, logits.shape[0], 1), dtype=wide)
    maxima, totals, at_labels = stats.unbind()
    outside, index = _own_columns(labels, first, logits.shape[1])
    for block, maximum, total, picked, column in _blocks(logits, maxima, totals, at_labels, index):
        z = block.to(wide)  # a copy, or the logits themselves
        torch.amax(z, dim=1, keepdim=True, out=maximum)
        torch.gather(z.sub_(maximum), 1, column, out=picked)
        torch.sum(z.exp_(), dim=1, keepdim=True, out=total)
    if outside is not None:
        at_labels.masked_fill_(outside, 0.0)
    return stats.squeeze(2), (logits, maxima, maxima + totals.log())


def cross_entropy_backward(
    saved: Sequence[Tensor], labels: Tensor, first: int | None, logsumexp: Tensor | None, grad: Tensor
) -> Tensor:
    """Return (softmax - one-hot label)·grad for this rank's columns [n, v], written over the logits.

    Args:
        saved: from the forward: exp(z - m), or in half precision the logits, to avoid a second rounding; m [n, 1]; the
            log-sum-exp [n, 1] of this rank's columns.
        labels, first: as in the forward.
        logsumexp: [n], log Σ exp z over all ranks' columns; None: this rank has all columns.
        grad: [n], the gradient of each token's loss."""
    logits, maximum, own = saved
    logsumexp, grad = own if logsumexp is None else logsumexp.unsqueeze(1), grad.unsqueeze(1)
    outside, index = _own_columns(labels, first, logits.shape[1])
    at_label = grad.neg() if outside is None else grad.masked_fill(outside, 0.0).neg_()
    wide = torch.promote_types(logits.dtype, torch.float32)
    if logits.dtype == wide:
        scale = (maximum - logsumexp).exp_().mul_(grad)
        for block, factor, column, label in _blocks(logits, scale, index, at_label):
            block.mul_(factor).scatter_add_(1, column, label)
        return logits
    for block, lse, factor, column, label in _blocks(logits, logsumexp, grad, index, at_label):
        block.copy_(block.to(wide).sub_(lse).exp_().mul_(factor).scatter_add_(1, column, label))
    return logits


def _own_columns(labels: Tensor, first: int | None, columns: int) -> tuple[Tensor | None, Tensor]:
    """Return the mask [n, 1] of labels of other ranks (None with one rank), and local columns [n, 1], 0 for those."""
    labels = labels.unsqueeze(1)
    if first is None:
        return None, labels
    local = labels - first
    outside = (local < 0) | (local >= columns)
    return outside, local.masked_fill(outside, 0)


def _blocks(logits: Tensor, *columns: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Yield blocks of rows of all tensors; on a GPU, where launches cost more than passes, one block with all rows."""
    n, v = logits.shape
    rows = n if logits.device.type != "cpu" else max(1, _BLOCK // max(v, 1))
    if n <= rows:
        return ((logits, *columns),) if n else ()
    return zip(*(tensor.split(rows) for tensor in (logits, *columns)))
