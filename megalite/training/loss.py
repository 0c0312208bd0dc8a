"""The objective, and the only divisions in it.

Its main term is the mean over all unmasked tokens of the global batch. The denominator is known before the first forward;
microbatch losses are sums over tokens divided by it; gradients and logged losses are then plain sums over
microbatches and over data- and context-parallel ranks. So no layout, mask or microbatch size can change what is
optimized. Terms that layers add (MoE's load balancing) are means over the sequences or tokens of the global batch.
"""

from collections.abc import Sequence

import torch

from megalite.data.loader import Microbatch
from megalite.models.context import AuxiliaryLosses
from megalite.topology.group import Group


def token_denominator(microbatches: Sequence[Microbatch], *, dp: Group, device: torch.device) -> torch.Tensor:
    """Unmasked tokens of the global batch, fp64 and at least 1: the sum over this rank's microbatches and over dp.

    Collectives: one all-reduce of a number over dp.
    """
    # Counted on the host, where the masks are, and filled in: a copy from there would make the host wait.
    counted = sum(float(microbatch.loss_mask.sum(dtype=torch.float64)) for microbatch in microbatches)
    total = torch.full((), counted, dtype=torch.float64, device=device)
    dp.all_reduce(total)
    return total.clamp_(min=1.0)


def masked_loss(losses: torch.Tensor, mask: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """One microbatch's term of the objective: Σ loss·mask / denominator, for losses and mask [b, s]."""
    return (losses * mask.to(losses.dtype)).sum() / denominator.to(losses.dtype)


def auxiliary_losses(*, batch_size: int, seq_length: int, scale: float, device: torch.device) -> AuxiliaryLosses:
    """Where layers add their own terms in a step: means over the sequences or the tokens of the global batch."""
    return AuxiliaryLosses(
        per_sequence=1.0 / batch_size, per_token=1.0 / (batch_size * seq_length), scale=scale, device=device
    )
