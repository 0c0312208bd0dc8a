"""Which checkpoints are superfluous."""

import pytest

from megalite.checkpoint.prune import Retention


@pytest.mark.parametrize(
    "latest, every, steps, newest, gone",
    [
        (None, None, [1, 2, 3], 3, []),
        (1, None, [1, 2, 3], 3, [1, 2]),
        (2, None, [1, 2, 3], 3, [1]),
        (3, None, [1, 2, 3], 3, []),
        (9, None, [1, 2, 3], 3, []),
        (1, 2, [1, 2, 3, 4, 5], 5, [1, 3]),
        (2, 4, [2, 4, 6, 8, 10], 10, [2, 6]),
        (1, None, [5], 5, []),
        # 8 and 9 are damaged leftovers: the run went back to 6 and has come to 7.
        (1, None, [6, 7, 8, 9], 7, [6]),
        (2, None, [6, 7, 8, 9], 7, []),
        # `step-N` and `step-N.replaced` are one step.
        (2, None, [3, 3, 4], 4, []),
    ],
)
def test_superfluous(latest: int | None, every: int | None, steps: list[int], newest: int, gone: list[int]) -> None:
    assert Retention(keep_latest=latest, keep_every=every).superfluous(steps, newest) == gone
