"""Fits of measured times: a sum of a few constants, each times a known count."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Fit:
    """seconds = known + Σ constant · count."""

    constants: tuple[float, ...]
    """In the order of the columns, none below 0."""
    error: float
    """Mean of |fitted / measured - 1|."""


def fit_times(
    columns: Sequence[Sequence[float]], seconds: Sequence[float], known: Sequence[float] | None = None
) -> Fit:
    """Least squares over the relative errors, with no constant below 0.

    Each row is divided by its time, so that a message of a kilobyte counts as much as one of a megabyte. The columns are
    few: the best solution with constants at 0 is found by trying all choices of them.

    Args:
        columns: for each constant its counts, one a measurement, such as latencies of a ring's steps, bytes or FLOPs.
        seconds: measured, above 0.
        known: what of each time needs no constant; default 0.
    """
    time = np.asarray(seconds, dtype=float)
    left = np.ones(len(time)) if known is None else 1.0 - np.asarray(known, dtype=float) / time
    rows = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1) / time[:, None]
    # Columns of like size, for the sake of the solution's accuracy.
    scale = np.abs(rows).max(axis=0)
    scale[scale == 0] = 1.0
    rows = rows / scale
    best, least = np.zeros(len(columns)), np.inf
    for count in range(len(columns), 0, -1):
        for free in itertools.combinations(range(len(columns)), count):
            found = np.zeros(len(columns))
            found[list(free)] = np.linalg.lstsq(rows[:, free], left, rcond=None)[0]
            squares = float(((rows @ found - left) ** 2).sum())
            if (found >= 0).all() and squares < least:
                best, least = found, squares
    error = float(np.abs(rows @ best - left).mean())
    return Fit(constants=tuple(float(value) for value in best / scale), error=error)
