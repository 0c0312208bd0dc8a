"""Megatron-LM's greedy blending index, computed for many stretches of the run at once."""

import numpy as np
from numpy.typing import NDArray

_LANES = 1024
_STEPS = 1024
"""A wave is so many stretches of so many samples."""
_WIDE_PASSES, _NARROW = 4, 64
"""Passes over all stretches of a wave that do not fit, before they are over that many of them at a time."""


def fill_greedy(
    dataset_index: NDArray[np.int16], dataset_sample_index: NDArray[np.int64], weights: NDArray[np.float64]
) -> None:
    """Fill both arrays `[size]`: at step k the dataset with the largest weights_i·max(k, 1) - count_i goes next, the first
    of equals, in float64 as helpers.cpp has it; dataset_sample_index is its count before.

    A step needs the counts that the steps before have left. Here a wave of stretches is computed side by side, each from
    counts that are guessed (its share, rounded); greedy choice forgets a wrong guess within some steps, so most stretches
    end with the right counts. Then each stretch that did not begin with the counts that the one before it ended with is
    computed again from those, until all of them fit. The first begins with what is known, so that when all fit, all are
    right, whatever was guessed.
    """
    size = len(dataset_index)
    counts = np.zeros(len(weights), dtype=np.int64)
    done = 0
    while done < size:
        steps = max(1, min(_STEPS, (size - done) // _LANES))
        lanes = min(_LANES, (size - done) // steps)
        counts = _wave(
            dataset_index[done : done + lanes * steps].reshape(lanes, steps),
            dataset_sample_index[done : done + lanes * steps].reshape(lanes, steps),
            weights,
            counts,
            first=done,
        )
        done += lanes * steps


def _wave(
    choice: NDArray[np.int16],
    ordinal: NDArray[np.int64],
    weights: NDArray[np.float64],
    counts: NDArray[np.int64],
    *,
    first: int,
) -> NDArray[np.int64]:
    """Fill `lanes` stretches of `steps` samples from sample `first` and `counts` on; the counts after them."""
    lanes, steps = choice.shape
    starts = _guess(first + steps * np.arange(lanes), weights)
    starts[0] = counts
    ends = starts.copy()
    wrong = np.arange(lanes)
    passes = 0
    while len(wrong):
        ends[wrong] = _run(choice, ordinal, weights, starts, wrong, first)
        passes += 1
        wrong = 1 + np.flatnonzero((starts[1:] != ends[:-1]).any(axis=1))
        # Where a pass mends one stretch, which sets the next one wrong, it should not be a wide one.
        wrong = wrong if passes < _WIDE_PASSES else wrong[:_NARROW]
        starts[wrong] = ends[wrong - 1]
    return ends[-1]


def _guess(samples: NDArray[np.int64], weights: NDArray[np.float64]) -> NDArray[np.int64]:
    """Counts with the sums `samples` in the proportions of the weights, `[len(samples), datasets]`."""
    ideal = np.multiply.outer(samples, weights)
    guess = np.floor(ideal).astype(np.int64)
    missing = samples - guess.sum(axis=1)
    order = (guess - ideal).argsort(axis=1, kind="stable")
    ranks = order.argsort(axis=1, kind="stable")
    return guess + (ranks < missing[:, None])


def _run(
    choice: NDArray[np.int16],
    ordinal: NDArray[np.int64],
    weights: NDArray[np.float64],
    starts: NDArray[np.int64],
    lanes: NDArray[np.int64],
    first: int,
) -> NDArray[np.int64]:
    """Greedy steps of the stretches `lanes`, side by side; their counts at the end, `[len(lanes), datasets]`."""
    steps = choice.shape[1]
    # Whole numbers below 2^53, as doubles: Megatron converts them before it subtracts.
    counts = starts[lanes].astype(np.float64)
    chosen = np.empty((steps, len(lanes)), dtype=np.int16)
    before = np.empty((steps, len(lanes)), dtype=np.int64)
    here = (first + steps * lanes).astype(np.float64)[:, None]
    errors, rows = np.empty_like(counts), np.arange(len(lanes))
    for step in range(steps):
        np.multiply(np.maximum(here + step, 1.0), weights, out=errors)
        errors -= counts
        best = errors.argmax(axis=1)
        chosen[step] = best
        before[step] = counts[rows, best]
        counts[rows, best] += 1.0
    choice[lanes] = chosen.T
    ordinal[lanes] = before.T
    return counts.astype(np.int64)
