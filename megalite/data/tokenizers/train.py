"""Train a SentencePiece model for those who have no tokenizer."""

import io
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from megalite.config.errors import ConfigError

_NO_SENTENCE_LIMIT = 1 << 30


def train_sentencepiece(texts: Iterable[str], *, output_prefix: str | Path, vocab_size: int) -> Path:
    """Train byte-pair encoding on `texts` and write `<output_prefix>.model`; returns its path.

    Every text comes back as it was: no normalisation, no space put in front, runs of white space and line ends are
    ordinary pieces, and characters without a piece fall back to bytes. The one exception is U+2581 (a lower block),
    SentencePiece's own sign for a space, which decodes to one. Digits are single pieces. The same texts in the same
    order give the same file.

    Raises:
        ConfigError: no text, or too little of it for vocab_size; what `texts` raises is raised again.
    """
    source = _Source(texts)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(source),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            # Rare characters get no piece of their own: bytes serve them.
            character_coverage=0.9999,
            max_sentence_length=_NO_SENTENCE_LIMIT,
            num_threads=2,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        if source.fault is not None:
            raise source.fault from None
        if not source.characters:
            raise ConfigError("no text to train a tokenizer on") from None
        raise ConfigError(
            f"a SentencePiece model with vocab_size {vocab_size} cannot be trained on {source.characters} characters: "
            f"{error}; 256 bytes, 3 control pieces and every common character must fit: try --vocab-size 2048, or "
            "more text"
        ) from None
    if source.fault is not None:
        raise source.fault
    path = Path(f"{output_prefix}.model")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(f"{path}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    partial.write_bytes(model.getvalue())
    partial.replace(path)
    return path


class _Source:
    """Passes texts on, counts their characters and keeps the exception that reading them raised.

    SentencePiece takes an exception of its iterator for the end of the text and would train on the part before it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = texts
        self.characters = 0
        self.fault: Exception | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self.texts:
                self.characters += len(text)
                yield text
        except Exception as fault:
            self.fault = fault
