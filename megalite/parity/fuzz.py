"""The fuzzer: random legal layouts and models against one rank, for as long as it is given."""

import random
import shlex
import time
from collections.abc import Callable

from megalite.parity.draw import draw
from megalite.parity.pool import RankPool
from megalite.parity.report import Report, run_parity
from megalite.parity.shrink import MAX_WORLD


def fuzz(
    seconds: float, *, seed: int, steps: int, tolerance: float | None, failed: Callable[[str, Report], None]
) -> tuple[int, int]:
    """Try drawn configs until the time is up.

    Config number i depends on (seed, i) alone, so a longer run with the same seed begins with the same configs.

    Args:
        failed: is told the command line that repeats a failure, and what was found.

    Returns:
        (configs tried, failures).
    """
    end = time.monotonic() + seconds
    tried = failures = 0
    pool = RankPool(MAX_WORLD)
    try:
        while time.monotonic() < end or not tried:
            arguments, shrunk = draw(random.Random(f"{seed} {tried}"))
            if pool.stopped:  # by the failure before
                pool = RankPool(MAX_WORLD)
            report = run_parity(shrunk, steps=steps, tolerance=tolerance, pool=pool)
            tried += 1
            if not report.same:
                failures += 1
                extra = [] if tolerance is None else ["--tolerance", str(tolerance)]
                failed(shlex.join(["megalite", "parity", *arguments, "--steps", str(steps), *extra]), report)
    finally:
        pool.stop()
    return tried, failures
