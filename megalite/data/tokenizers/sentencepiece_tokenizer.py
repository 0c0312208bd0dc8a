"""SentencePiece .model files."""

from collections.abc import Sequence
from pathlib import Path

import sentencepiece

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import digest, read_tokenizer_file, require_characters


class SentencePieceTokenizer:
    """A SentencePiece model; its </s> is the end of document.

    Args:
        model_file: the .model file.

    Raises:
        ConfigError: the file is missing, is no SentencePiece model or has no </s>.
    """

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: str | Path) -> None:
        content = read_tokenizer_file(model_file)
        self._path = model_file
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            loaded = self._processor.LoadFromSerializedProto(content)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"{model_file} is not a SentencePiece model: {error}") from None
        if not loaded or not self._processor.get_piece_size():
            raise ConfigError(
                f"{model_file} is not a SentencePiece model ({len(content)} bytes); give a .model file"
            )
        self._fingerprint = digest(content)
        self.vocab_size = self._processor.get_piece_size()
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise ConfigError(
                f"{model_file} has no end-of-sequence piece (eos_id -1), which ends documents; train it with eos_id >= 0, "
                "as `megalite train-tokenizer` does"
            )

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""
        require_characters(texts)
        try:
            ids: list[list[int]] = self._processor.encode(list(texts), out_type=int, num_threads=1)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"{self._path}: the model fails on a text: {str(error)[:200]}") from None
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control pieces such as </s> are left out."""
        return str(self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size]))

    def fingerprint(self) -> str:
        """Digest of the model file."""
        return self._fingerprint
