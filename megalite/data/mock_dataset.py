"""Made-up tokens with a pattern in them, for timing and for tests without files."""

import numpy as np
from numpy.typing import NDArray

from megalite.data.random_draws import raw_draws


class MockDataset:
    """Samples from a noisy recurrence: token i+1 is (token i + stride) mod vocab_size, except for one in eight
    positions, where it starts again at a random id, small ids being likelier.

    So a model can learn it: the loss falls from ln(vocab_size) towards that of the restarts alone, about
    (1/8)·ln(vocab_size) + 0.4. Sample k is a pure function of (vocab_size, seq_length, seed, split, k).

    Args:
        vocab_size: ids are below it.
        seq_length: inputs of a sample; a sample has one token more.
        seed: of the draws.
        split: number of the split; each has its own samples.
    """

    _RESTART = 1 / 8
    _STRIDE = 17

    def __init__(self, *, vocab_size: int, seq_length: int, seed: int, split: int = 0) -> None:
        self.vocab_size = vocab_size
        self.seq_length = seq_length
        self.seed = seed
        self.split = split

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k >= 0: int64 `[seq_length + 1]`."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        length = self.seq_length + 1
        words = raw_draws(2 * length, seed=self.seed, index=k, stream=self.split)
        uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53
        restarts = uniform[:length] < self._RESTART
        restarts[0] = True
        starts = (uniform[length:] ** 2 * self.vocab_size).astype(np.int64)
        positions = np.arange(length)
        last = np.maximum.accumulate(np.where(restarts, positions, 0))
        return (starts[last] + self._STRIDE * (positions - last)) % self.vocab_size

    def packing(self, k: int) -> None:
        """A sample is a stretch of a stream."""
