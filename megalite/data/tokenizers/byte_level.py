"""Bytes as tokens: no file, no vocabulary to train."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalite.data.tokenizers.base import digest, utf8

_END = 256


class ByteLevelTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is the end of document.

    Megatron-LM's tokenizer of bytes ends a document with id 0 and pads with 1 in a vocabulary of 512. There a NUL in a
    text is an end of document, and decoding leaves out bytes that are no UTF-8 and white space at the end; here every
    text has ids of its own and comes back as it was, at the price of token files that take two bytes an id.
    """

    name = "ByteLevelTokenizer"
    vocab_size = _END + 1
    eod = _END

    def encode(self, text: str) -> list[int]:
        """Bytes of `text`."""
        return list(utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint8]]:
        """Bytes of each text, not to be written to."""
        return [np.frombuffer(utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; the end of document is left out."""
        return bytes(int(i) for i in ids if 0 <= i < _END).decode("utf-8", errors="replace")

    def fingerprint(self) -> str:
        """Digest of the kind: there is one such tokenizer."""
        return digest(self.name.encode())
