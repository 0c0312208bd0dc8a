"""A tokenizer for text that is already token ids."""

from collections.abc import Sequence

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import digest


class NullTokenizer:
    """Text is ids in decimal, parted by white space; the last id of the vocabulary is the end of document.

    Args:
        vocab_size: ids are below it.
    """

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(
                f"NullTokenizer needs a vocab_size of at least 1, got {vocab_size}; try --vocab-size 32000"
            )
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1

    def encode(self, text: str) -> list[int]:
        """The numbers in `text`.

        Raises:
            ConfigError: a word is no number from 0 to vocab_size - 1.
        """
        ids = []
        for word in text.split():
            if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.vocab_size):
                raise ConfigError(
                    f"NullTokenizer: {word[:40]!r} is not a number from 0 to {self.vocab_size - 1}"
                )
            ids.append(int(word))
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers in each text; raises as encode does."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The ids in decimal."""
        return " ".join(str(i) for i in ids)

    def fingerprint(self) -> str:
        """Digest of the kind and the vocabulary size."""
        return digest(f"{self.name} {self.vocab_size}".encode())
