"""The error of a schedule that is not legal."""

from megalite.config.errors import ConfigError


class ScheduleError(ConfigError):
    """A schedule that cannot run: incomplete, out of order, wrongly wired, or deadlocked.

    The first line of the message names the rank, the position and the action.
    """
