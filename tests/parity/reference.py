"""The one-rank runs that layouts are held against, each made once."""

from megalite.parity.trajectory import Trajectory, one_rank_trajectory, plain
from tests.parity.factors import Settings, world_of
from tests.support.tiny import tiny_config

STEPS = 2
"""The gradients of the second one, and the weights and the evaluation after it, depend on all that a step leaves."""
TOLERANCE = 1e-9

_made: dict[str, Trajectory] = {}


def reference(settings: Settings) -> Trajectory:
    """The one-rank run of a layout; layouts of the same model and batch share it."""
    config = plain(tiny_config(world_of(settings), **settings))
    if (key := str(config)) not in _made:
        _made[key] = one_rank_trajectory(config, STEPS)
    return _made[key]
