"""What every dataset offers."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Packing:
    """Where whole documents lie in a sample of seq_length inputs; they see only themselves.

    A document of L tokens that starts at position a has inputs a .. a+L-2, each with a label, the next token of the
    document. Its last token predicts nothing: the token after it is another document's.
    """

    starts: tuple[int, ...]
    """Positions at which a document starts, ascending, 0 first."""
    used: int
    """No prediction from this position on counts: it holds the last document's last token (or is seq_length, where
    that token is the last label), and after it is padding."""


class SampleSource(Protocol):
    """An endless sequence of numbered samples: GPTDataset, PackedDataset, BlendedDataset, MockDataset."""

    def sample(self, k: int) -> NDArray[np.int64]:
        """Sample k >= 0: int64 `[seq_length + 1]`, the same at every call."""
        ...

    def packing(self, k: int) -> Packing | None:
        """Where the documents of sample k are; None if it is a stretch of a stream of documents."""
        ...
