"""Cross-entropy over some columns of the logits by xentropy_cuda.

The autograd function of apex.contrib.xentropy is not used: it takes token 0 for padding and gives it no loss. bf16 logits
are not served: the kernel rounds their log-sum-exp to bf16, which puts the probabilities off by up to 3 %.
"""

from collections.abc import Sequence

import torch
import xentropy_cuda as kernels

_NO_SMOOTHING = 0.0


def cross_entropy_forward(
    logits: torch.Tensor, labels: torch.Tensor, first: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What this rank's columns add to the loss of each token; see `megalite.kernels.cross_entropy`.

    Args:
        logits: [n, v] in fp32 or fp16, columns `first` to `first` + v of the vocabulary.
        labels: [n] in the whole vocabulary.

    Returns:
        [3, n] in fp32: log Σ exp z for the maximum, 1 for the sum, and the label's z less the first, 0 where it is another
        rank's. Beside it what `cross_entropy_backward` takes: the logits and their log-sum-exp [n].
    """
    if logits.numel() == 0:
        nothing = logits.new_zeros(logits.shape[0], dtype=torch.float32)
        return torch.stack((nothing, nothing + 1.0, nothing)), (logits, nothing)
    local = labels - first
    outside = (local < 0) | (local >= logits.shape[1])
    # The kernel reads the logit at the label, wherever that is.
    logits, inside = logits.contiguous(), local.masked_fill(outside, 0).contiguous()
    losses, log_sum = kernels.forward(logits, inside, _NO_SMOOTHING, logits.dtype == torch.float16)
    picked = losses.neg().masked_fill_(outside, 0.0)
    return torch.stack((log_sum, torch.ones_like(log_sum), picked)), (logits, log_sum)


def cross_entropy_backward(
    saved: Sequence[torch.Tensor],
    labels: torch.Tensor,
    first: int,
    logsumexp: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """(softmax - one at the label)·grad for this rank's columns [n, v].

    Args:
        saved: of the forward.
        labels, first: as in the forward.
        logsumexp: [n], log Σ exp z over all ranks' columns; None: there are no others.
        grad: [n] in fp32, of each token's loss.
    """
    logits, log_sum = saved
    local = labels - first
    # Compared with the column's number alone: -1 is none of them.
    local = local.masked_fill((local < 0) | (local >= logits.shape[1]), -1)
    whole = log_sum if logsumexp is None else logsumexp.contiguous()
    if logits.numel() == 0:
        return torch.empty_like(logits)
    return kernels.backward(grad.float().contiguous(), logits, whole, local.contiguous(), _NO_SMOOTHING)
