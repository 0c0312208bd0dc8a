"""Random numbers that are pure functions of (seed, index): the data order rests on what is here.

All of it uses only the raw output of Philox4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
SC'11), a counter-based generator with a published definition, and none of numpy's distributions or shuffles: their
algorithms may change from one numpy to the next.
"""

from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_WORD = (1 << 64) - 1
_BLOCK = 1 << 20
_ROUNDS = 8


def raw_draws(count: int, *, seed: int, index: int, stream: int = 0) -> NDArray[np.uint64]:
    """`count` uniform 64-bit words, a pure function of (seed, index, stream, position). Shape `[count]`."""
    key = np.array([seed & _WORD, index & _WORD], dtype=np.uint64)
    counter = np.array([0, 0, 0, stream & _WORD], dtype=np.uint64)
    return np.random.Philox(key=key, counter=counter).random_raw(count)


def permutation(count: int, *, seed: int, index: int, stream: int = 0, dtype: DTypeLike = np.int64) -> NDArray[Any]:
    """A permutation of range(count): the order that sorts `count` random words. Shape `[count]`.

    The low bits of each word, as many as a position needs, give way to the position: then to sort the words in place
    is to sort the positions, with no second array. 37 random bits are left for a hundred million, and positions with
    equal random bits (one in four thousand of those) stand in rising order. Needs 8·count bytes beside the result.
    """
    words = raw_draws(count, seed=seed, index=index, stream=stream)
    low = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    for first in range(0, count, _BLOCK):
        block = words[first : first + _BLOCK]
        block &= ~low
        block |= np.arange(first, first + len(block), dtype=np.uint64)
    words.sort()
    words &= low
    return words.astype(dtype)


class KeyedPermutation:
    """A permutation of range(count) of which any element is computed alone: no table, whatever the count.

    A number x is written as (x // a, x mod a) with a = ceil(sqrt(count)), and each of the two halves in turn is shifted,
    modulo its range, by a random function of the other: an alternating Feistel network over a domain of a·ceil(count/a)
    numbers, of which fewer than a are not below count; from those one walks on to the next (Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002). The random function of a round is splitmix64's finalizer (Steele, Lea
    and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) of the half and the round's 64-bit key.

    `count`: numbers to permute, at least 1 and below 2^64. `seed, index, stream`: of the keys, as of `raw_draws`."""

    def __init__(self, count: int, *, seed: int, index: int, stream: int = 0) -> None:
        assert 0 < count <= _WORD, count
        self.count = count
        self._columns = isqrt(count - 1) + 1
        self._rows = -(-count // self._columns)
        keys = raw_draws(_ROUNDS, seed=seed, index=index, stream=stream).tolist()
        self._keys = tuple(zip(keys[::2], keys[1::2], strict=True))

    def __call__(self, x: int) -> int:
        """Where x stands; 0 <= x < count."""
        columns, rows = self._columns, self._rows
        while True:
            row, column = divmod(x, columns)
            # Written out twice: a call costs as much as the arithmetic.
            for row_key, column_key in self._keys:
                z = row ^ row_key
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
                column = (column + (z ^ (z >> 31))) % columns
                z = column ^ column_key
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _WORD
                row = (row + (z ^ (z >> 31))) % rows
            x = row * columns + column
            if x < self.count:
                return x
