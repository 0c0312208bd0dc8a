"""What every dataset offers."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class SampleSource(Protocol):
    """An endless sequence of numbered samples: GPTDataset, BlendedDataset, MockDataset."""

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k >= 0: int64 `[seq_length + 1]`, the same at every call."""
        ...
