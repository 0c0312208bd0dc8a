"""Cross-entropy over some columns of the logits: what a rank has to tell the others, and its part of the gradient."""

from collections.abc import Sequence

import torch


def cross_entropy_forward(
    logits: torch.Tensor, labels: torch.Tensor, first: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What this rank's columns add to the loss of each token.

    With (m_r, d_r) of each rank r, log Σ_r d_r·exp(m_r) is the log-sum-exp of the whole row.

    Args:
        logits: [n, v], columns `first` to `first` + v of the vocabulary.
        labels: [n] in the whole vocabulary.

    Returns:
        [3, n] in fp32 (fp64 for fp64 logits): m, d = Σ exp(z - m), for which m need not be the maximum, and the label's
        z - m, 0 where it is another rank's. Beside it the tensors that `cross_entropy_backward` takes.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    log_probabilities = torch.log_softmax(logits, dim=-1, dtype=wide)
    log_sum = logits[:, 0].to(wide) - log_probabilities[:, 0]
    local = labels - first
    outside = (local < 0) | (local >= logits.shape[1])
    index = local.masked_fill(outside, 0).unsqueeze(-1)
    picked = log_probabilities.gather(-1, index).squeeze(-1).masked_fill(outside, 0.0)
    return torch.stack((log_sum, torch.ones_like(log_sum), picked)), (log_probabilities, log_sum)


def cross_entropy_backward(
    saved: Sequence[torch.Tensor],
    labels: torch.Tensor,
    first: int,
    logsumexp: torch.Tensor | None,
    grad: torch.Tensor,
) -> torch.Tensor:
    """(softmax - one at the label)·grad for this rank's columns [n, v]; what was saved is used up.

    Args:
        saved: of the forward: here the log-softmax over this rank's columns, and their log-sum-exp [n].
        labels, first: as in the forward.
        logsumexp: [n], log Σ exp z over all ranks' columns; None: there are no others.
        grad: [n], of each token's loss.
    """
    # In place: this is the only reader of the saved tensor, and the largest activation of the step.
    probabilities, log_sum = saved
    if logsumexp is not None:
        probabilities.add_((log_sum - logsumexp).unsqueeze(-1))
    probabilities.exp_()
    local = labels - first
    inside = (local >= 0) & (local < probabilities.shape[1])
    index = local.masked_fill(~inside, 0).unsqueeze(-1)
    probabilities.scatter_add_(-1, index, -inside.to(probabilities.dtype).unsqueeze(-1))
    return probabilities.mul_(grad.unsqueeze(-1))
