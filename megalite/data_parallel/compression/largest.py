"""The largest elements of a tensor, without sorting it."""

import math

import numpy as np
import torch

STRIDE = 61
"""Every so many'th element is looked at first. Odd, so that it passes through all columns of the usual matrices."""

SMALL = 1 << 14
"""Elements of a tensor that is not worth a sample."""


def largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """The places of the `count` largest of `magnitudes` [n], none of them negative: int64 [count], ascending.

    Of equal ones the first count as larger; NaN counts as largest. The result does not depend on how it is found: a
    threshold from a sample leaves few candidates, and where it leaves too few, all are.
    """
    places = _candidates(magnitudes, count)
    among = magnitudes if places is None else magnitudes[places]
    # kthvalue counts from the smallest.
    last = torch.kthvalue(among, among.numel() - count + 1).values
    if last.isnan():
        chosen = among.isnan()
    else:
        chosen = torch.le(among, last).logical_not_()  # larger, or NaN: fewer than `count`
        equal = torch.eq(among, last).nonzero().view(-1)
        chosen[equal[: count - int(chosen.sum())]] = True
    indices = chosen.nonzero().view(-1)[:count]
    return indices if places is None else places[indices]


def _candidates(magnitudes: torch.Tensor, count: int) -> torch.Tensor | None:
    """Places that hold the `count` largest, ascending; None: it may be any."""
    size = magnitudes.numel()
    if size < SMALL:
        return None
    sample = magnitudes[::STRIDE]
    expected = count * sample.numel() / size
    rank = math.ceil(1.1 * expected + 4 * math.sqrt(expected) + 4)
    if rank >= sample.numel():
        return None
    threshold = torch.topk(sample, rank).values[-1]
    places = _at_least(magnitudes, threshold)
    return places if places.numel() >= count else None


def _at_least(magnitudes: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """The places of what is not smaller than the threshold; NaN is not."""
    if magnitudes.device.type != "cpu":
        return torch.lt(magnitudes, threshold).logical_not_().nonzero().view(-1)
    # numpy compares and finds four times as fast as torch.
    return torch.from_numpy(np.flatnonzero(~np.less(magnitudes.numpy(), threshold.item())))
