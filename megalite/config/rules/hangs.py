"""The watch on hangs and the limits of communication."""

from megalite.config.errors import ConfigError
from megalite.config.run import RunConfig


def check_hang_timeout(config: RunConfig, world_size: int) -> None:
    """Raise ConfigError if collectives would fail, naming nobody, before the watch could tell who stands still."""
    parallel = config.parallel
    hang, collective = parallel.hang_timeout_minutes, parallel.distributed_timeout_minutes
    if hang is not None and world_size > 1 and hang >= collective:
        raise ConfigError(
            f"hang_timeout_minutes {hang:g} is not below distributed_timeout_minutes {collective:g}: collectives would "
            f"fail before anyone could say which rank stands still; use --hang-timeout-minutes {0.8 * collective:g} or "
            f"--distributed-timeout-minutes {1.25 * hang:g}"
        )
