"""A custom dataset: the bytes of text files. It needs no tokenizer and no preprocessing."""

from pathlib import Path
from typing import Any

import numpy as np

from megalite import DATASETS, RunConfig


class Pieces:
    """Some text in samples of `length` inputs and one more: a length and `[i]` are all that megalite asks for.

    Each epoch comes in an order that is drawn from (seed, epoch), so that a run on other ranks, or one that was stopped,
    reads the same samples.
    """

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens, self.length = np.frombuffer(text, dtype=np.uint8), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, i: int) -> np.ndarray:
        return self.tokens[i * self.length : (i + 1) * self.length + 1]


@DATASETS.register("text-bytes")
def open_text(split: str, config: RunConfig, tokenizer: Any) -> Pieces | None:
    """The last tenth is for validation; there is no test split."""
    text = b"\n".join(Path(name).read_bytes() for name in config.data.data_path)
    cut = len(text) * 9 // 10
    parts = {"train": text[:cut], "valid": text[cut:]}
    return Pieces(parts[split], config.training.seq_length) if split in parts else None
