"""What every tokenizer offers, and what they share."""

import hashlib
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError

MAX_TOKENIZER_BYTES = 1 << 30
"""A tokenizer file has at most a few tens of megabytes; a corpus given in its place is not read into memory."""


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
        """Ids of `text`; nothing is added at the start or the end.

        Raises:
            ConfigError: the text has no ids: half of a surrogate pair is no character, and NullTokenizer reads numbers.
        """
        ...

    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int] | NDArray[np.uint8]]:
        """Ids of each text, the same as encode gives, and the same errors; as fast as the library can in one thread."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, and ids without a token nothing."""
        ...

    def fingerprint(self) -> str:
        """Sha256 (hex) of what defines the tokenizer: equal digests give equal ids."""
        ...


def read_tokenizer_file(path: str | Path) -> bytes:
    """All of a tokenizer file.

    Raises:
        ConfigError: it does not exist, is no file (a pipe could be waited for without end), cannot be read, or is
            longer than MAX_TOKENIZER_BYTES.
    """
    try:
        status = Path(path).stat()
        is_plain = stat.S_ISREG(status.st_mode)
        content = Path(path).read_bytes() if is_plain and status.st_size <= MAX_TOKENIZER_BYTES else None
    except ValueError:
        raise ConfigError(f"tokenizer file {str(path)!r} is no path; give that of an existing file") from None
    except OSError as error:
        raise ConfigError(
            f"tokenizer file {path} cannot be read: {error.strerror}; give the path of an existing file"
        ) from None
    if content is not None:
        return content
    if not is_plain:
        raise ConfigError(f"tokenizer file {path} is no plain file; give the path of an existing file")
    raise ConfigError(
        f"tokenizer file {path} has {status.st_size} bytes, more than any tokenizer ({MAX_TOKENIZER_BYTES}); "
        "give the tokenizer's own file"
    )


def digest(*contents: bytes) -> str:
    """Sha256 of one file's bytes, or of several with their lengths between them."""
    if len(contents) == 1:
        return hashlib.sha256(contents[0]).hexdigest()
    sha256 = hashlib.sha256()
    for content in contents:
        sha256.update(len(content).to_bytes(8, "little"))
        sha256.update(content)
    return sha256.hexdigest()


def utf8(text: str) -> bytes:
    """The text's bytes.

    Raises:
        ConfigError: it holds half of a surrogate pair: a JSON escape such as \\ud83d can stand alone, a character cannot.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"a text holds half of a surrogate pair (U+{ord(text[error.start]):04X}) at character {error.start}, which "
            "is no character; mend or drop that document"
        ) from None


def require_characters(texts: Sequence[str]) -> None:
    """Raise the ConfigError of `utf8` if one of the texts has half of a surrogate pair."""
    for text in texts:
        if not text.isascii():
            utf8(text)


def is_failure(error: BaseException) -> bool:
    """The library failed, in place of someone having stopped us: what a Rust library panics with is no Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
