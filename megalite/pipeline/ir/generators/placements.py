"""Which rank holds which virtual stage."""

from megalite.config.errors import ConfigError


def loop_placement(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """Stage s on rank s mod p: each rank hands its output to the next, and the last one to the first."""
    check_sizes("loop placement", num_ranks, num_chunks)
    return tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """Two stages a rank, down and up again: stage s on rank s if s < p, else on rank 2p - 1 - s.

    The turn on the last rank is a hand-over without a message, and rank 0 has both the first and the last stage.
    """
    check_sizes("V placement", num_ranks)
    return (*range(num_ranks), *reversed(range(num_ranks)))


def check_sizes(what: str, num_ranks: int, num_chunks: int = 1, num_microbatches: int = 1) -> None:
    """Raises a ConfigError if a size is below 1."""
    for size, value in (
        ("pp", num_ranks),
        ("vpp", num_chunks),
        ("the number of microbatches", num_microbatches),
    ):
        if value < 1:
            raise ConfigError(f"{what}: {size} is {value}; it must be 1 or more")
