"""Full tensors out of the slices that ranks hold."""

from collections.abc import Sequence

import numpy as np
import torch

from megalite.training.replica import Replica

Part = tuple[tuple[int, ...], tuple[tuple[int, int], ...], np.ndarray]
"""Global shape, slice, values."""


class CopiesDifferError(AssertionError):
    """Two ranks hold different numbers where the layout says that they hold the same."""


def local_parts(replica: Replica, kind: str) -> dict[str, Part]:
    """This rank's slice of every parameter, by name.

    Args:
        kind: `weight`, `grad` (as reduced), `main_param`, or an optimizer state such as `exp_avg`.

    Collectives: with the distributed optimizer an all-gather over a bucket's ranks, but for `weight`.
    """
    parts = {}
    strategy = replica.strategy
    strategy.wait_for_parameters()
    for shard in strategy.shards:
        if kind == "weight":
            flat = shard.bucket.data
        else:
            grad = shard.main_param.grad
            assert grad is not None
            states = {"grad": grad, "main_param": shard.main_param.data, **replica.optimizer.state(shard.main_param)}
            flat = strategy.gather(shard, states[kind])
        for placed in shard.bucket.placed:
            spec = placed.parameter.info.spec
            values = flat[placed.start : placed.stop].view(spec.shape).detach().clone()
            if values.dtype == torch.bfloat16:
                values = values.float()  # numpy has no bf16; fp32 holds each of its values
            parts[spec.name] = (spec.global_shape, spec.slice, values.numpy())
    return parts


def assemble(ranks: Sequence[dict[str, Part]]) -> dict[str, np.ndarray]:
    """Full tensors, in float64, from the slices of all ranks.

    Raises:
        CopiesDifferError: a slice that several ranks hold is not the same on all of them, to the bit.
    """
    full: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for parts in ranks:
        for name, (shape, bounds, values) in parts.items():
            tensor = full.setdefault(name, np.zeros(shape))
            seen = filled.setdefault(name, np.zeros(shape, dtype=bool))
            place = tuple(slice(start, stop) for start, stop in bounds)
            if seen[place].any() and not np.array_equal(tensor[place], values, equal_nan=True):
                worst = np.nanmax(np.abs(tensor[place] - values))
                raise CopiesDifferError(f"copies of {name} on several ranks differ by up to {worst:.2e}")
            tensor[place], seen[place] = values, True
    for name, seen in filled.items():
        assert seen.all(), f"part of {name} is on no rank"
    return full
