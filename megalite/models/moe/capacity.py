"""Which (token, expert) pairs an expert of limited capacity takes."""

import torch

from megalite.topology.group import Group

WEIGHT_STEPS = {torch.float32: 2.0**16, torch.float64: 2.0**30}
"""Weights are compared in so many steps from 0 to 1."""


@torch.no_grad()
def within_capacity(
    weights: torch.Tensor,
    chosen: torch.Tensor,
    positions: torch.Tensor,
    *,
    capacity: int,
    drop_last: bool,
    sequence: Group,
) -> torch.Tensor:
    """Of each sequence an expert takes the `capacity` tokens with the largest weights, or the first ones.

    The whole sequence is looked at, and nothing but it: the outcome depends neither on how it is split over ranks
    nor on the other sequences of the microbatch. Of equal weights the lower position goes first; weights count as equal
    within `WEIGHT_STEPS`, since those of equal tokens differ by a rounding that is the layout's.

    Args:
        weights: [s_local, b, k] of this rank's tokens; `chosen` are the experts, int64.
        positions: [s_local], where in the sequence the tokens are.
        drop_last: take the first tokens, whatever their weights.
        sequence: the ranks over which the sequence is split; together they have every position once.

    Returns:
        bool [s_local, b, k]: the pair is taken.

    Collectives: an all-gather of s_local·(2·b·k + 1) numbers.
    """
    local, b, k = weights.shape
    # Positions and experts are exact in fp32 below 2^24: one message carries all three.
    packed = torch.cat(
        (weights.flatten(1), chosen.flatten(1).to(weights.dtype), positions[:, None].to(weights.dtype)), dim=1
    )
    everything = packed.new_empty(local * sequence.size, packed.shape[1])
    sequence.all_gather(everything, packed)
    own = slice(sequence.rank * local, (sequence.rank + 1) * local)
    by_position = everything[:, -1].argsort()
    ordered = everything[by_position]
    # One column for each sequence: its s·k pairs, tokens in true order.
    weight, expert = (
        part.view(-1, b, k).transpose(1, 2).flatten(0, 1) for part in ordered[:, :-1].split(b * k, dim=1)
    )
    pairs = torch.arange(weight.shape[0], device=weight.device)[:, None].expand_as(weight)
    if not drop_last:
        steps = (weight * WEIGHT_STEPS[weight.dtype]).round_()
        pairs = steps.sort(dim=0, descending=True, stable=True).indices
    by_expert = expert.gather(0, pairs).sort(dim=0, stable=True)
    pairs = pairs.gather(0, by_expert.indices)
    taken = torch.empty_like(pairs, dtype=torch.bool)
    taken.scatter_(0, pairs, _place_in_run(by_expert.values) < capacity)
    rows = torch.empty_like(by_position)
    rows[by_position] = torch.arange(rows.numel(), device=rows.device)
    return taken.view(-1, k, b).transpose(1, 2)[rows[own]]


def _place_in_run(values: torch.Tensor) -> torch.Tensor:
    """For each element of the sorted columns of [n, b], how many equal ones come before it."""
    index = torch.arange(values.shape[0], device=values.device)[:, None].expand_as(values)
    first = torch.ones_like(values, dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    return index - torch.where(first, index, 0).cummax(dim=0).values
