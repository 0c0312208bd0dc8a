"""What every tokenizer offers, and what they share."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megalite.config.errors import ConfigError


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def name(self) -> str:
        """Kind of tokenizer, as --tokenizer-type spells it."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        ...

    @property
    def eod(self) -> int:
        """Id of the end-of-document token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; nothing is added at the start or the end."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        ...

    def fingerprint(self) -> str:
        """Sha256 (hex) of what defines the tokenizer: equal digests give equal ids."""
        ...


def read_tokenizer_file(path: str | Path) -> bytes:
    """All of a tokenizer file.

    Raises:
        ConfigError: it does not exist, is no file or cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"tokenizer file {path} cannot be read: {error.strerror}; give the path of an existing file"
        ) from None


def digest(*contents: bytes) -> str:
    """Sha256 of one file's bytes, or of several with their lengths between them."""
    if len(contents) == 1:
        return hashlib.sha256(contents[0]).hexdigest()
    sha256 = hashlib.sha256()
    for content in contents:
        sha256.update(len(content).to_bytes(8, "little"))
        sha256.update(content)
    return sha256.hexdigest()
