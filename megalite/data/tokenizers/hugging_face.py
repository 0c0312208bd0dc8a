"""Hugging Face tokenizer.json files, read by the optional package `tokenizers`."""

import json
from collections.abc import Sequence
from pathlib import Path

from megalite.config.errors import ConfigError
from megalite.data.tokenizers.base import digest, is_failure, read_tokenizer_file, require_characters

END_OF_DOCUMENT = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>")
"""Names that the end of document is looked for under where nothing names it."""
TOKENIZER_NAME, SETTINGS_NAME = "tokenizer.json", "tokenizer_config.json"


class HuggingFaceTokenizer:
    """A tokenizer.json. Its end of document is the eos_token of the tokenizer_config.json beside it; where there is none,
    or it names none, the first of END_OF_DOCUMENT that the vocabulary has.

    Special tokens written out in a text are recognised, as Hugging Face does it.

    Args:
        tokenizer_file: the tokenizer.json.

    Raises:
        ConfigError: a file is missing or garbled, there is no end-of-document token, or `tokenizers` is not installed.
    """

    name = "HuggingFaceTokenizer"

    def __init__(self, tokenizer_file: str | Path) -> None:
        content = read_tokenizer_file(tokenizer_file)
        self._path = tokenizer_file
        try:
            import tokenizers
        except ImportError:
            raise ConfigError(
                f"{tokenizer_file} needs the package tokenizers, which is not installed: "
                "pip install 'megalite[tokenizers]'"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except BaseException as error:  # a plain Exception or a panic for whatever is wrong in the JSON
            if not is_failure(error):
                raise
            raise ConfigError(
                f"{tokenizer_file} is not a Hugging Face tokenizer.json: {str(error)[:300]}"
            ) from None
        # Truncation and padding may be stored in the file; they are settings of an inference server, not of a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._fingerprint = digest(content)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        guess = next((token for token in END_OF_DOCUMENT if token in vocabulary), None)
        settings = Path(tokenizer_file).with_name(SETTINGS_NAME)
        end = _named_end(settings) if Path(tokenizer_file).name == TOKENIZER_NAME else None
        if end is not None and end not in vocabulary:
            raise ConfigError(f"{settings}: eos_token {end!r} is not in the vocabulary of {tokenizer_file}")
        # A named end that is not the guess is part of what defines it; else the digest stays that of the file.
        if end is not None and end != guess:
            self._fingerprint = digest(content, end.encode())
        end = end or guess
        if end is None:
            raise ConfigError(
                f"{tokenizer_file} has no end-of-document token: none of {', '.join(END_OF_DOCUMENT)} is in its "
                f"vocabulary; name it as eos_token in a {SETTINGS_NAME} beside a {TOKENIZER_NAME}"
            )
        self.eod: int = vocabulary[end]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without the start and end tokens of the file's post-processor."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text. TOKENIZERS_PARALLELISM=false in the environment keeps the library to one thread."""
        require_characters(texts)
        # encode_batch_fast leaves out where in the text each token was; older versions of the package lack it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        try:
            return [encoding.ids for encoding in encode(list(texts), add_special_tokens=False)]
        except BaseException as error:
            if not is_failure(error):
                raise
            raise ConfigError(f"{self._path}: the tokenizer fails on a text: {str(error)[:200]}") from None

    def beginning(self) -> list[int]:
        """The ids that the file's post-processor puts before a text: those of a start of document, if any."""
        plain, whole = (
            self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
        )
        count = next((at for at in range(len(whole)) if plain and whole[at : at + len(plain)] == plain), 0)
        return list(whole[:count])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens are left out."""
        return str(self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size]))

    def fingerprint(self) -> str:
        """Digest of the file, and of the end of document if it is not the one that the file alone would have."""
        return self._fingerprint


def _named_end(settings: Path) -> str | None:
    """The eos_token of a tokenizer_config.json, if there is one."""
    if not settings.is_file():
        return None
    try:
        values = json.loads(read_tokenizer_file(settings).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{settings}: not JSON: {str(error)[:200]}") from None
    token = values.get("eos_token") if isinstance(values, dict) else None
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None
