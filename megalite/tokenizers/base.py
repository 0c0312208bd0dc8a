"""The tokenizer interface, and the two tokenizers without a library: bytes, and text that consists of ids."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.config.reading import open_regular
from megalite.config.registry import optional

TOKENIZER_NAME, SETTINGS_NAME, TEMPLATE_NAME = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Default names of the end of document in a tokenizer.json; the first is GPT-2's."""
GPT2_END = END_OF_DOCUMENT[0]
MAX_TOKENIZER_BYTES = 1 << 30  # so that a corpus passed by mistake is not read into memory


class Tokenizer(ABC):
    """Converts text to ids and back."""

    name: str  # a value of --tokenizer-type
    vocab_size: int  # all ids are below it
    eod: int  # id of the end-of-document token
    _fingerprint: str

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, without start or end tokens. Raises ConfigError if the text contains a lone
        surrogate, or (NullTokenizer) a word that is not an id."""
        return list(self.encode_batch([text])[0])

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> Sequence[list[int] | NDArray[np.uint8]]:
        """Return the ids of each text, as from `encode`, in one thread."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD; ids without a token are left out."""

    def fingerprint(self) -> str:
        """Return the sha256 (hex) of the tokenizer's definition: equal fingerprints mean equal ids."""
        return self._fingerprint


class ByteLevelTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 is the end of document. Decoding restores every text, and token
    files take two bytes per id. In contrast, Megatron-LM's byte tokenizer ends a document with id 0, like a NUL in the
    text, and drops invalid UTF-8 when decoding."""

    name = "ByteLevelTokenizer"
    vocab_size = 257
    eod = 256

    def __init__(self) -> None:
        self._fingerprint = digest(self.name.encode())

    def encode(self, text: str) -> list[int]:
        return list(utf8(text))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint8]]:
        return [np.frombuffer(utf8(text), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(int(i) for i in ids if 0 <= i < self.eod).decode("utf-8", errors="replace")


class NullTokenizer(Tokenizer):
    """Text consists of decimal ids, separated by white space; the last id of the vocabulary is the end of document.
    Raises ConfigError if vocab_size is missing or below 1."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int | None) -> None:
        if vocab_size is None or vocab_size < 1:
            raise ConfigError(f"NullTokenizer needs a vocab_size, got {vocab_size}; try --vocab-size 32000")
        self.vocab_size = vocab_size
        self.eod = vocab_size - 1
        self._fingerprint = digest(f"{self.name} {vocab_size}".encode())

    def encode(self, text: str) -> list[int]:
        words = text.split()
        for word in words:
            if not (word.isascii() and word.isdigit() and len(word) < 20 and int(word) < self.vocab_size):
                raise ConfigError(f"NullTokenizer: {word[:40]!r} is not a number from 0 to {self.vocab_size - 1}")
        return list(map(int, words))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def read_tokenizer_file(path: str | Path) -> bytes:
    """Read a whole tokenizer file. Raises ConfigError if it cannot be read, is not a regular file, or is longer than
    MAX_TOKENIZER_BYTES."""
    remedy = "give the path of an existing file (of a model: hf download OWNER/NAME)"
    try:
        opened = open_regular(path)
    except ValueError:
        raise ConfigError(f"tokenizer file {str(path)!r} is not a path; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"tokenizer file {path} cannot be read: {error.strerror}; {remedy}") from None
    with opened as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_TOKENIZER_BYTES:
            raise ConfigError(f"tokenizer file {path} has {size} bytes, more than {MAX_TOKENIZER_BYTES}")
        return file.read()


def parse_json(content: bytes, path: str | Path) -> Any:
    """Parse a tokenizer file in JSON. Raises ConfigError if it is not JSON."""
    try:
        return json.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {str(error)[:200]}; give the undamaged file") from None


def digest(*contents: bytes) -> str:
    """Return the sha256 of one file's bytes, or of several files, each preceded by its length."""
    sha256 = hashlib.sha256()
    for content in contents:
        if len(contents) > 1:
            sha256.update(len(content).to_bytes(8, "little"))
        sha256.update(content)
    return sha256.hexdigest()


def utf8(text: str) -> bytes:
    """Encode a text as UTF-8. Raises ConfigError for a lone surrogate, which a JSON escape such as \\ud83d can
    produce."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"a text holds half of a surrogate pair at character {error.start}; fix the text") from None


def require_characters(texts: Sequence[str]) -> None:
    """Raise the ConfigError of `utf8` if a text contains a lone surrogate."""
    for text in texts:
        if not text.isascii():
            utf8(text)


def require_package(what: object, module: str, extra: str) -> Any:
    package = module.partition(".")[0]
    needs = f"{what} needs the package {package}, which is not installed: pip install 'megalite[{extra}]'"
    return optional(module, needs)


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Convert exceptions of a library to a ConfigError that starts with `what`. Includes panics of Rust libraries,
    which are no Exceptions, but not KeyboardInterrupt."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError) or not (
            isinstance(error, Exception) or type(error).__name__ == "PanicException"
        ):
            raise
        raise ConfigError(f"{what}: {str(error)[:200]}") from None
