"""One long sequence of tokens to measure a model on: of token files as they are, or of texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import find_inputs
from megalite.data.inputs.pieces import cut
from megalite.data.inputs.places import Limits
from megalite.data.inputs.read import read_piece
from megalite.data.token_files import TokenFiles
from megalite.data.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class TokenStream:
    """Arrays of token ids, one after the other; those of token files stay on the disk until they are read.

    Args:
        parts: one-dimensional.
        text_bytes: of UTF-8 text that it stands for; None: nobody knows.
    """

    parts: Sequence[NDArray[np.integer]]
    text_bytes: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens [start, stop)."""
        found, first = [], 0
        for part in self.parts:
            found.append(part[max(start - first, 0) : max(stop - first, 0)])
            first += len(part)
        return np.concatenate(found).astype(np.int64)


def stream_of_files(prefixes: Sequence[str], vocab_size: int) -> TokenStream:
    """The documents of token files, in their order, as they were written.

    Raises:
        ConfigError: one is missing or damaged, or has ids that the model does not know.
    """
    files = TokenFiles(vocab_size)
    return TokenStream([files.open(prefix).tokens for prefix in prefixes])


def stream_of_texts(
    patterns: Sequence[str], *, key: str, limits: Limits, tokenizer: Tokenizer
) -> TokenStream:
    """The documents of text, jsonl or parquet files, each with an end of document behind it.

    Args:
        patterns: as those of `find_inputs`.
        key: of the text in a line of JSON or a row.

    Raises:
        ConfigError: a file cannot be read, or has a line that is no document.
    """
    parts, text_bytes = [], 0
    end = np.array([tokenizer.eod], dtype=np.int32)
    for texts in _texts(patterns, key, limits):
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            text_bytes += len(text.encode())
            parts += [np.asarray(ids, dtype=np.int32), end]
    if not parts:
        raise ConfigError(f"{' '.join(patterns)}: there is no text")
    return TokenStream([np.concatenate(parts)], text_bytes)


def _texts(patterns: Sequence[str], key: str, limits: Limits) -> Iterator[list[str]]:
    lines, source = 0, 0
    for piece in cut(find_inputs(patterns), keys=[key], limits=limits):
        if piece.source != source:
            lines, source = 0, piece.source
        found = read_piece(piece, [key], limits)
        if found.bad:
            bad = found.bad[0]
            raise ConfigError(
                f"{piece.path}:{lines + bad.line + 1}: {bad.reason}; mend the line or leave it out"
            )
        lines += found.lines
        yield found.texts[0]
