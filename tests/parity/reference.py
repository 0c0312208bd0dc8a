"""One-rank runs that layouts are compared with, each run once."""

from megalite.parity.trajectory import Trajectory, one_rank_trajectory, plain
from tests.parity.factors import Settings, world_of
from tests.support.tiny import tiny_config

STEPS = 2
"""Gradients of the second step, and weights and evaluation after it, depend on all state that a step leaves."""
TOLERANCE = 1e-9

_made: dict[str, Trajectory] = {}


def reference(settings: Settings) -> Trajectory:
    """The one-rank run of a layout; layouts of the same model and batch share it."""
    config = plain(tiny_config(world_of(settings), **settings))
    if (key := str(config)) not in _made:
        _made[key] = one_rank_trajectory(config, STEPS)
    return _made[key]
