"""Which checkpoints stay. No torch."""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What to keep of a run's checkpoints.

    Args:
        keep_latest: that many of the newest; None: all.
        keep_every: and for ever those whose step is a multiple of this.
    """

    keep_latest: int | None = None
    keep_every: int | None = None

    def superfluous(self, steps: Iterable[int], newest: int) -> list[int]:
        """The steps to be removed once `newest` is there and known to be sound, oldest first.

        Steps beyond `newest` are damaged leftovers of the run before it was resumed, or another run's: they do not
        count, and stay.
        """
        if self.keep_latest is None:
            return []
        passing = sorted(step for step in set(steps) if step <= newest)
        old = passing[: -self.keep_latest]
        return [step for step in old if self.keep_every is None or step % self.keep_every]
