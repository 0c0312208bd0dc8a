"""Cross-entropy over some columns of the logits: what a rank adds to the sums, and its part of the gradient.

Logits are the largest activation of a step. On a CPU each pass over them costs as much as its arithmetic, so they are taken
block by block, all passes over a block while it is in the cache; and nothing of their size is kept in addition.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 17  # logits of a block: half a mebibyte of fp32


def cross_entropy_forward(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What this rank's columns add to the loss of each token.

    With (m_r, d_r) of each rank r, log Σ_r d_r·exp(m_r) is the log-sum-exp of the whole row.

    Args:
        logits: [n, v], columns `first` to `first` + v of the vocabulary. Those in fp32 and fp64 are overwritten.
        labels: [n] in the whole vocabulary.

    Returns:
        [3, n] in fp32 (fp64 for fp64 logits): m, d = Σ exp(z - m), for which m need not be the maximum, and the label's
        z - m, 0 where it is another rank's. Beside it the tensors that `cross_entropy_backward` takes.
    """
    wide = _wide(logits)
    stats = logits.new_empty((3, logits.shape[0]), dtype=wide)
    outside, index = _own_columns(labels, first, logits.shape[1])
    for rows in _blocks(logits):
        z = logits[rows].to(wide)  # a copy, or the logits themselves
        maximum, total, picked = stats[:, rows]
        torch.amax(z, dim=1, out=maximum)
        z.sub_(maximum.unsqueeze(1))
        picked.copy_(z.gather(1, index[rows]).squeeze(1))
        torch.sum(z.exp_(), dim=1, out=total)
    stats[2].masked_fill_(outside, 0.0)
    return stats, (logits, stats[0], stats[0] + stats[1].log())


def cross_entropy_backward(
    saved: Sequence[Tensor], labels: Tensor, first: int, logsumexp: Tensor | None, grad: Tensor
) -> Tensor:
    """(softmax - one at the label)·grad for this rank's columns [n, v], in the place of the logits.

    Args:
        saved: of the forward: exp(z - m), or in half precision, which a second rounding would cost digits, the logits
            still; m [n]; and the log-sum-exp [n] of this rank's columns.
        labels, first: as in the forward.
        logsumexp: [n], log Σ exp z over all ranks' columns; None: there are no others.
        grad: [n], of each token's loss.
    """
    logits, maximum, own = saved
    logsumexp, wide = own if logsumexp is None else logsumexp, _wide(logits)
    outside, index = _own_columns(labels, first, logits.shape[1])
    scale = (maximum - logsumexp).exp_().mul_(grad)
    label = grad.masked_fill(outside, 0.0).neg_().unsqueeze(1)
    for rows in _blocks(logits):
        if logits.dtype == wide:
            logits[rows].mul_(scale[rows].unsqueeze(1)).scatter_add_(1, index[rows], label[rows])
            continue
        z = logits[rows].to(wide).sub_(logsumexp[rows].unsqueeze(1)).exp_().mul_(grad[rows].unsqueeze(1))
        logits[rows] = z.scatter_add_(1, index[rows], label[rows])
    return logits


def _wide(logits: Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _own_columns(labels: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """Which labels are another rank's, [n]; the column of each, [n, 1], 0 for those."""
    local = labels - first
    outside = (local < 0) | (local >= columns)
    return outside, local.masked_fill(outside, 0).unsqueeze(1)


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Spans of rows: on a GPU, where launches count more than passes, all of them."""
    n, v = logits.shape
    rows = n if logits.device.type != "cpu" else max(1, _BLOCK // max(v, 1))
    for begin in range(0, n, max(rows, 1)):
        yield slice(begin, begin + rows)
