"""Random numbers that are pure functions of (seed, index): the data order rests on these two functions.

Both use only the raw output of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11),
a counter-based generator with a published definition, and none of numpy's distributions or shuffles, whose
algorithms may change from one numpy to the next.
"""

import numpy as np
from numpy.typing import NDArray

_WORD = (1 << 64) - 1


def raw_draws(count: int, *, seed: int, index: int, stream: int = 0) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words, a pure function of (seed, index, stream, position). Shape `[count]`."""
    key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream & _WORD], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(count: int, *, seed: int, index: int, stream: int = 0) -> NDArray[np.int64]:
    """A permutation of range(count): the order that sorts `count` random words. Shape `[count]`, int64.

    The sort is stable, so that even equal words (odds count²/2⁶⁵) give one well-defined order.
    """
    return np.argsort(raw_draws(count, seed=seed, index=index, stream=stream), kind="stable").astype(np.int64)
