"""Train a tokenizer for those who have none."""

import io
import os
import re
from collections.abc import Iterable
from pathlib import Path

import sentencepiece

from megalite.checkpoint.files import replace_durably
from megalite.config.errors import ConfigError
from megalite.data.output_prefix import check_output_prefix, make_folder
from megalite.data.tokenizers.base import is_failure
from megalite.data.tokenizers.tiktoken_known import LLAMA3_PATTERN
from megalite.data.tokenizers.training_text import CountedTexts

MAX_VOCABULARY = 1 << 20
"""Ten times what large models have; the libraries reserve memory for as many as they are asked for."""
WORD_PATTERNS: dict[str, str | None] = {"gpt2": None, "gpt4": LLAMA3_PATTERN}
"""How byte-level BPE cuts words: gpt2's are part of the library; gpt4's, those of Llama 3 too, cut numbers into threes."""
END_OF_DOCUMENT = "<|endoftext|>"
_NO_SENTENCE_LIMIT = 1 << 30


def train_sentencepiece(
    texts: Iterable[str], *, output_prefix: str | Path, vocab_size: int, model_type: str = "bpe"
) -> Path:
    """Train SentencePiece on `texts` and write `<output_prefix>.model`; returns its path.

    Every text comes back as it was: no normalisation, no space put in front, runs of white space and line ends are
    ordinary pieces, and characters without a piece fall back to bytes. The one exception is U+2581 (a lower block),
    SentencePiece's own sign for a space, which decodes to one. Digits are single pieces. The same texts in the same
    order give the same file.

    Args:
        model_type: "bpe" (byte-pair encoding) or "unigram" (Kudo 2018).

    Raises:
        ConfigError: no text, or too little of it for vocab_size; the file is there already, or its folder cannot be
            written to; what `texts` raises is raised again.
        OSError: the file cannot be written.
    """
    path = _output(output_prefix, ".model")
    _check_size(vocab_size, 260, "256 bytes, 3 control pieces and a character")
    source = CountedTexts(texts)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(source),
            model_writer=model,
            model_type=model_type,
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
        source.require_any()
        raise ConfigError(
            f"vocab_size {vocab_size} cannot be trained on {source.characters} characters: {_reason(str(error))}"
        ) from None
    source.require_any()
    _write(path, model.getvalue())
    return path


def train_byte_level(
    texts: Iterable[str], *, output_prefix: str | Path, vocab_size: int, words: str = "gpt2"
) -> Path:
    """Train byte-level BPE (GPT-2's) on `texts` and write `<output_prefix>.json`, a tokenizer.json; returns its path.

    Every text comes back as it was, but for <|endoftext|>: the 256 bytes are tokens, and nothing is normalised.
    <|endoftext|>, id 0, is the end of document; spelled out in a text it is that token, as in every tokenizer.json, and
    decoding leaves it out. The same texts in the same order give the same file.

    Args:
        words: a key of WORD_PATTERNS; tokens do not reach from one word into the next.

    Raises:
        ConfigError: no text, or too little of it for vocab_size; the package `tokenizers` is not installed; the file is
            there already, or its folder cannot be written to; what `texts` raises is raised again.
        OSError: the file cannot be written.
    """
    path = _output(output_prefix, ".json")
    _check_size(vocab_size, 257, "256 bytes and the end of document")
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise ConfigError(
            "byte-level BPE is trained by the package tokenizers, which is not installed: "
            "pip install 'megalite[tokenizers]'"
        ) from None
    pattern = WORD_PATTERNS[words]
    tokenizer = Tokenizer(models.BPE())
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    cuts = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    source = CountedTexts(texts)
    try:
        tokenizer.train_from_iterator(iter(source), trainer=trainer)
    except BaseException as error:
        if not is_failure(error):
            raise
        source.require_any()
        raise ConfigError(f"byte-level BPE cannot be trained: {str(error)[:200]}") from None
    source.require_any()
    if tokenizer.get_vocab_size() < vocab_size:
        raise ConfigError(
            f"{source.characters} characters give no more than {tokenizer.get_vocab_size()} tokens, {vocab_size} are "
            f"asked for; give more text, or --vocab-size {tokenizer.get_vocab_size()}"
        )
    _write(path, tokenizer.to_str(pretty=True).encode())
    return path


def _output(prefix: str | Path, suffix: str) -> Path:
    """The file to write; all that can be known of it before the training is."""
    check_output_prefix(prefix, example="tokenizer")
    path = Path(f"{prefix}{suffix}")
    _refuse_existing(path)
    make_folder(prefix)
    return path


def _refuse_existing(path: Path) -> None:
    # Models and token files may depend on it: they would read other text in the same ids.
    if os.path.lexists(path):
        raise ConfigError(f"{path} is there already; give another --output-prefix or move it away")


def _write(path: Path, content: bytes) -> None:
    _refuse_existing(path)
    replace_durably(path, content)


def _reason(error: str) -> str:
    """What SentencePiece says of text and vocabulary that do not fit, as what to do."""
    most = re.search(r"set it to a value <= (\d+)", error)
    if most:
        return f"they give {most[1]} pieces at most; try --vocab-size {most[1]}, or more text"
    least = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if least:
        return f"256 bytes, 3 control pieces and every common character are {least[1]}; try --vocab-size {least[1]} or more"
    # "INTERNAL: file.cc(638) [condition] " comes before what is meant for people.
    return (
        re.sub(r"^.*\.cc\(\d+\) \[.*\]\s*", "", error, flags=re.DOTALL)[:200] + "; try another --vocab-size"
    )


def _check_size(vocab_size: int, least: int, what: str) -> None:
    if not least <= vocab_size <= MAX_VOCABULARY:
        raise ConfigError(
            f"vocab_size {vocab_size} is not from {least} ({what}) to {MAX_VOCABULARY}; try --vocab-size 32000"
        )
