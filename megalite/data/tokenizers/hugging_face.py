"""Hugging Face tokenizer.json files, read by the optional package `tokenizers`."""

from collections.abc import Sequence
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import digest, read_tokenizer_file

END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")


class HuggingFaceTokenizer:
    """A tokenizer.json; the first of END_OF_DOCUMENT that it has is the end of document.

    Special tokens written out in a text are recognised, as Hugging Face does it.

    Args:
        tokenizer_file: the tokenizer.json.

    Raises:
        ConfigError: the file is missing or garbled, has no end-of-document token, or `tokenizers` is not installed.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, tokenizer_file: str | Path) -> None:
        content = read_tokenizer_file(tokenizer_file)
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"{tokenizer_file} needs the package tokenizers, which is not installed: "
                "pip install 'megalite[tokenizers]'"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # the package raises plain Exception for whatever is wrong in the JSON
            raise ConfigError(f"{tokenizer_file} is not a Hugging Face tokenizer.json: {error}") from None
        # Truncation and padding may be stored in the file; they are settings of an inference server, not of a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._fingerprint = digest(content)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        present = [token for token in END_OF_DOCUMENT if token in vocabulary]
        if not present:
            raise ConfigError(
                f"{tokenizer_file} has no end-of-document token: none of {', '.join(END_OF_DOCUMENT)} is in its "
                "vocabulary; add one of them to added_tokens"
            )
        self.eod: int = vocabulary[present[0]]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the start and end tokens of the file's post-processor."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out."""
        return str(self._tokenizer.decode([int(i) for i in ids]))

    def fingerprint(self) -> str:
        """Digest of the file."""
        return self._fingerprint
