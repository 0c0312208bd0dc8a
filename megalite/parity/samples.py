"""Made-up samples that make trouble: documents of uneven length, and so masks that differ from sample to sample."""

import numpy as np

from megalite.data.dataset import Packing

EOD = 0
"""The end-of-document token of `UnevenSamples`."""


class UnevenSamples:
    """Sample k is a pure function of (k, seq_length, vocab_size); a `SampleSource`.

    In even samples two tokens of five end a document, in odd ones one of fifty. Whoever divides by a local number of
    unmasked tokens, or takes positions and visibility of one sample for another's, gets other numbers than one rank.

    Args:
        seq_length: inputs of a sample.
        vocab_size: tokens are below it.
        packed: the documents are packed, and up to a quarter of the sample is padding, none of it in every third.
    """

    def __init__(self, seq_length: int, vocab_size: int, *, packed: bool = False) -> None:
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.packed = packed

    def sample(self, k: int) -> np.ndarray:
        """Sample k: int64 [seq_length + 1]."""
        generator = np.random.Generator(np.random.Philox(key=k))
        tokens = generator.integers(1, self.vocab_size, size=self.seq_length + 1)
        tokens[generator.random(self.seq_length + 1) < (0.4 if k % 2 == 0 else 0.02)] = EOD
        return tokens

    def packing(self, k: int) -> Packing | None:
        """Where the documents of sample k are, if they are packed."""
        if not self.packed:
            return None
        used = self.seq_length - k % 3 * self.seq_length // 8
        ends = np.flatnonzero(self.sample(k)[: used - 1] == EOD)
        return Packing(starts=(0, *(int(end) + 1 for end in ends)), used=used)
