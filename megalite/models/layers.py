"""The blocks of a stage one after the other, recomputed whole where the run says so."""

from collections.abc import Sequence

import torch
from torch.utils.checkpoint import checkpoint

from megalite.models.block import Block
from megalite.models.cache import KeyValueCache
from megalite.models.context import ForwardContext
from megalite.models.recompute import Recompute


def run_layers(
    blocks: Sequence[Block],
    x: torch.Tensor,
    context: ForwardContext,
    *,
    cache: KeyValueCache | None,
    recompute: Recompute,
) -> torch.Tensor:
    """[s/cp, b, h] -> [s/cp, b, h] through all blocks, split over tp as well with sequence parallelism.

    With full recompute a unit keeps its input alone and runs again in the backward; dropout needs no saved generator
    state for that, since its masks have none.
    """
    recomputed, kept = 0, len(blocks)
    if recompute.granularity == "full" and torch.is_grad_enabled():
        recomputed = kept if recompute.method == "uniform" else min(recompute.num_layers, kept)
    unit = recompute.num_layers if recompute.method == "uniform" else 1
    for start in range(0, recomputed, unit):
        x = checkpoint(
            _run, blocks[start : start + unit], x, context, use_reentrant=False, preserve_rng_state=False
        )
    return _run(blocks[recomputed:], x, context, cache)


def _run(
    blocks: Sequence[Block], x: torch.Tensor, context: ForwardContext, cache: KeyValueCache | None = None
) -> torch.Tensor:
    for block in blocks:
        x = block(x, context, cache)
    return x
