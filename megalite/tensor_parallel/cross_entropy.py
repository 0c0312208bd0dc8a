"""Cross-entropy over logits whose vocabulary is split over tp; full logits never exist on one rank."""

from typing import Any

import torch

from megalite.topology.group import Group


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """loss = log Σ exp(z) - z_label for the logits z: each rank sends its part's log-sum-exp and, if it has it, z_label."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, first: int, tp: Group) -> torch.Tensor:
        # The fused log-softmax of the local part gives its log-sum-exp in one pass; ranks then merge those.
        log_probabilities = torch.log_softmax(logits, dim=-1, dtype=_wide(logits.dtype))
        count = logits.shape[-1]
        local = labels - first
        outside = (local < 0) | (local >= count)
        index = local.masked_fill(outside, 0).unsqueeze(-1)
        picked = log_probabilities.gather(-1, index).squeeze(-1)
        if tp.size == 1:
            ctx.save_for_backward(log_probabilities, index, None, None)
            return -picked
        log_sum = (logits[..., :1].to(log_probabilities.dtype) - log_probabilities[..., :1]).squeeze(-1)
        own = torch.stack((log_sum, (picked + log_sum).masked_fill(outside, 0.0)))
        gathered = own.new_empty(tp.size * own.shape[0], *own.shape[1:])
        tp.all_gather(gathered, own)
        parts = gathered.view(tp.size, *own.shape)
        log_total = parts[:, 0].logsumexp(dim=0)
        ctx.save_for_backward(log_probabilities, index, outside, log_sum - log_total)
        return log_total - parts[:, 1].sum(dim=0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        log_probabilities, index, outside, shift = ctx.saved_tensors
        # In place: this is the only reader of the saved tensor, and the largest activation of the step.
        probabilities = log_probabilities if shift is None else log_probabilities.add_(shift.unsqueeze(-1))
        probabilities.exp_()
        one = torch.ones_like(grad) if outside is None else (~outside).to(grad.dtype)
        probabilities.scatter_add_(-1, index, -one.unsqueeze(-1))
        return probabilities.mul_(grad.unsqueeze(-1)), None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, *, first: int, vocab_size: int, tp: Group
) -> torch.Tensor:
    """Loss of each token, [s, b], in fp32 (fp64 for fp64 logits).

    Args:
        logits: [s, b, V/tp], fresh from a GEMM; columns for ids at or above `vocab_size` are padding. They are
            overwritten and take no part, so the numbers do not depend on how far the vocabulary is padded.
        labels: [s, b] ids below `vocab_size`.
        first: the id of this rank's first column.

    Collectives: one all-gather of two numbers a token / none.
    """
    if first + logits.shape[-1] > vocab_size:
        # Finite, so that a rank with nothing but padding stays free of NaN. In place: no operation saved its output.
        logits.detach()[..., max(vocab_size - first, 0) :] = torch.finfo(logits.dtype).min / 2
    return _VocabParallelCrossEntropy.apply(logits, labels, first, tp)
