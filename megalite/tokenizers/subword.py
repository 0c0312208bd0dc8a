"""Subword tokenizers based on libraries: SentencePiece models, Hugging Face's tokenizer.json and GPT-2's two files."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sentencepiece

from megalite.config.errors import ConfigError
from megalite.tokenizers.base import (
    END_OF_DOCUMENT,
    GPT2_END,
    SETTINGS_NAME,
    TOKENIZER_NAME,
    Tokenizer,
    as_config_error,
    digest,
    parse_json,
    read_tokenizer_file,
    require_characters,
    require_package,
)

if TYPE_CHECKING:
    import tokenizers


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model with </s> as the end of document. Raises ConfigError if the file is missing, not a
    SentencePiece model, or without </s>."""

    name = "SentencePieceTokenizer"

    def __init__(self, model_file: str | Path) -> None:
        content = read_tokenizer_file(model_file)
        self._path = model_file
        self._processor = sentencepiece.SentencePieceProcessor()
        with as_config_error(f"{model_file} is not a SentencePiece model"):
            loaded = self._processor.LoadFromSerializedProto(content)
        self.vocab_size = self._processor.get_piece_size() if loaded else 0
        if not self.vocab_size:
            raise ConfigError(f"{model_file} is not a SentencePiece model ({len(content)} bytes); give a .model file")
        self._fingerprint = digest(content)
        self.eod = self._processor.eos_id()
        if self.eod < 0:
            raise ConfigError(f"{model_file} has no end-of-sequence piece to end documents; train it with eos_id >= 0")

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        require_characters(texts)
        with as_config_error(f"{self._path}: the model fails on a text"):
            return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        # Control pieces such as </s> are left out.
        return str(self._processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size]))


class _TokenizersLibrary(Tokenizer):
    _path: str | Path
    _tokenizer: "tokenizers.Tokenizer"

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # TOKENIZERS_PARALLELISM=false in the environment keeps the library to one thread.
        require_characters(texts)
        # encode_batch_fast skips the character offsets of tokens; older versions lack it.
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)
        with as_config_error(f"{self._path}: the tokenizer fails on a text"):
            return [encoding.ids for encoding in encode(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        # Special tokens are left out.
        return str(self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size]))


class HuggingFaceTokenizer(_TokenizersLibrary):
    """A tokenizer.json. Its end of document is eos_token in the tokenizer_config.json beside it, or else the first of
    END_OF_DOCUMENT in the vocabulary.

    Special tokens spelled out in a text become those tokens, as with Hugging Face. Raises ConfigError if a file is
    missing or damaged, there is no end-of-document token, or `tokenizers` is not installed."""

    name = "HuggingFaceTokenizer"

    def __init__(self, tokenizer_file: str | Path) -> None:
        content = read_tokenizer_file(tokenizer_file)
        self._path = tokenizer_file
        with as_config_error(f"{tokenizer_file} is not a Hugging Face tokenizer.json"):
            self._tokenizer = require_package(tokenizer_file, "tokenizers", "tokenizers").Tokenizer.from_str(
                content.decode("utf-8")
            )
        # A file may enable truncation and padding, which are meant for inference.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        guess = next((token for token in END_OF_DOCUMENT if token in vocabulary), None)
        self.file = Path(tokenizer_file)
        token = self.settings().get("eos_token")
        text = token.get("content") if isinstance(token, dict) else token
        end = text if isinstance(text, str) and text else None
        if end is not None and end not in vocabulary:
            where = self.file.with_name(SETTINGS_NAME)
            raise ConfigError(f"{where}: eos_token {end!r} is not in the vocabulary of {tokenizer_file}")
        self._fingerprint = digest(content) if end in (None, guess) else digest(content, str(end).encode())
        end = end or guess
        if end is None:
            raise ConfigError(f"{tokenizer_file} has none of {', '.join(END_OF_DOCUMENT)}; name it in {SETTINGS_NAME}")
        self.eod: int = vocabulary[end]

    def settings(self) -> dict[str, Any]:
        """Read the tokenizer_config.json beside a tokenizer.json; empty without one. Raises ConfigError if it is
        damaged."""
        file = self.file.with_name(SETTINGS_NAME)
        if self.file.name != TOKENIZER_NAME or not file.exists():
            return {}
        values = parse_json(read_tokenizer_file(file), file)
        return values if isinstance(values, dict) else {}

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids, and the range of characters of each. Raises ConfigError as `encode`."""
        require_characters([text])
        with as_config_error(f"{self._path}: the tokenizer fails on a text"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def beginning(self) -> list[int]:
        """Return the ids that the file's post-processor inserts before a text, such as a start of document."""
        plain, marked = (self._tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        count = next((at for at in range(len(marked)) if plain and marked[at : at + len(plain)] == plain), 0)
        return list(marked[:count])


class GPT2BPETokenizer(_TokenizersLibrary):
    """GPT-2's byte-level BPE (Radford et al. 2019). Decoding restores every text.

    <|endoftext|> spelled out in a text is encoded as its letters; only the caller ends a document. `vocab_file`:
    vocab.json, token -> id. `merge_file`: merges.txt, one pair per line, in the order of merging. Raises ConfigError if
    a file is missing or damaged, the two do not belong together, <|endoftext|> or a byte is missing, or `tokenizers` is
    not installed."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | Path, merge_file: str | Path) -> None:
        vocab_bytes, merge_bytes = read_tokenizer_file(vocab_file), read_tokenizer_file(merge_file)
        library = require_package(vocab_file, "tokenizers", "tokenizers")
        self._path, self._fingerprint = vocab_file, digest(vocab_bytes, merge_bytes)
        vocabulary = _parse_vocabulary(vocab_bytes, vocab_file)
        if GPT2_END not in vocabulary:
            raise ConfigError(f"{vocab_file}: {GPT2_END} is not in the vocabulary; add it with an unused id")
        self.eod, self.vocab_size = vocabulary[GPT2_END], max(vocabulary.values()) + 1
        missing = sorted(set(library.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
        if missing:
            raise ConfigError(f"{vocab_file} lacks {len(missing)} of 256 bytes, such as {missing[0]!r}; give another")
        self._tokenizer = library.Tokenizer(_bpe(library, vocabulary, merge_bytes, merge_file, vocab_file))
        self._tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._tokenizer.decoder = library.decoders.ByteLevel()


def _parse_vocabulary(content: bytes, path: str | Path) -> dict[str, int]:
    vocabulary = parse_json(content, path)
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else [None]
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids) or len(set(ids)) != len(ids):
        raise ConfigError(f"{path}: expected an object of tokens and ids, as GPT-2's vocab.json")
    return dict(vocabulary)


def _bpe(library: Any, vocabulary: dict[str, int], content: bytes, path: str | Path, vocab_file: str | Path) -> Any:
    """Build the BPE model from a vocabulary and the unique pairs of a merges.txt, in the order of the file."""
    with as_config_error(f"{path} is not the merges.txt that belongs to {vocab_file}; give one tokenizer's files"):
        lines = [line.rstrip("\r") for line in content.decode("utf-8").split("\n")]
        pairs = dict.fromkeys(tuple(line.split(" ")) for line in lines if line and not line.startswith("#version"))
        return library.models.BPE(vocab=vocabulary, merges=list(pairs))
