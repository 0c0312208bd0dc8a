"""Train a tokenizer with its library, on a sample that is spread evenly over the inputs."""

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import sentencepiece

from megalite.checkpoint.files import replace_durably
from megalite.config.errors import ConfigError, plural
from megalite.preprocess.documents import PieceTexts, read_piece
from megalite.preprocess.inputs import Input
from megalite.preprocess.output import check_output_prefix, make_folder
from megalite.preprocess.pieces import Limits, Place, cut
from megalite.tokenizers.base import GPT2_END, as_config_error, require_package
from megalite.tokenizers.tiktoken_tokenizer import LLAMA3_PATTERN

WORD_PATTERNS: dict[str, str | None] = {"gpt2": None, "gpt4": LLAMA3_PATTERN}
"""Patterns that split words for byte-level BPE. The library contains gpt2's; gpt4's (also Llama 3's) splits numbers
into groups of three digits."""
_MAX_VOCABULARY = 1 << 20  # ten times that of large models; libraries reserve memory for all ids
_NO_SENTENCE_LIMIT = 1 << 30
_HELD_OUT_EVERY, _HELD_OUT_FIRST = 50, 10


@dataclass
class TrainingText:
    """Iterates over at most max_bytes of the inputs' text, document by document, and counts it. Larger inputs are
    sampled evenly: at any point, the text taken as a fraction of max_bytes equals the bytes read as a fraction of all
    bytes on disk, so the end of a corpus counts as much as its start. Standard input, of unknown length, is read from
    its start. Every 50th document, from the 11th on, is held out to measure the tokenizer."""

    inputs: Sequence[Input]
    keys: Sequence[str]  # keys of the text in a document
    max_bytes: int  # of UTF-8 text; the last document is truncated
    advance: Callable[[int], None] = lambda count: None  # called with the bytes of text just read
    num_bytes: int = 0  # bytes of text read so far, including those held out
    documents: int = 0  # documents read so far; with several keys, texts
    bad: int = 0  # number of bad lines
    first_bad: str = ""  # the first bad line and its error, without a line number if pieces before it were skipped
    is_share: bool = False  # whether there was more text than max_bytes
    held_out: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        for text in self._texts():
            number, self.documents = self.documents, self.documents + 1
            if number % _HELD_OUT_EVERY == _HELD_OUT_FIRST:
                self.held_out.append(text)
            else:
                yield text
        if not self.documents and self.bad:
            lines = f"{plural(self.bad, 'line')} left out"
            raise ConfigError(f"no text to train a tokenizer on: {lines}, the first {self.first_bad}")

    def _texts(self) -> Iterator[str]:
        # Small pieces, so that even a small sample covers all parts of the inputs.
        limits = Limits(piece_bytes=max(1 << 12, min(self.max_bytes // 64, 1 << 18)))
        sizes = [item.size for item in self.inputs]
        on_disk = [0, *accumulate(size or 0 for size in sizes)]  # before each input
        total = None if None in sizes else on_disk[-1]
        place: Place | None = None
        pieces = cut(self.inputs, keys=self.keys, limits=limits)
        for piece in pieces:
            if self.num_bytes >= self.max_bytes:
                self.is_share = True
                pieces.close()
                return
            passed = on_disk[piece.source] + piece.disk_bytes
            if total is not None and self.num_bytes * total > self.max_bytes * passed:
                self.is_share = True
                continue
            found = read_piece(piece, self.keys, limits)
            if found.bad and not self.bad:
                first = found.bad[0]
                line = "" if self.is_share else f":{piece.after(first.line + 1, place).lines}"
                self.first_bad = f"{piece.path}{line}: {first.reason}"
            self.bad += len(found.bad)
            place = piece.after(found.lines, place)
            yield from self._take(found)

    def _take(self, found: PieceTexts) -> Iterator[str]:
        for text in (text for texts in zip(*found.texts, strict=True) for text in texts):
            content = text.encode("utf-8")
            left = self.max_bytes - self.num_bytes
            if len(content) > left:
                self.is_share = True
                text = content[:left].decode("utf-8", errors="ignore")
            count = min(len(content), left)
            self.num_bytes += count
            self.advance(count)
            if text:
                yield text


class _CountedTexts:
    """Forwards texts, counts their characters and stores an exception of the iterator. SentencePiece treats such an
    exception as the end of the text and would train on the part before it."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = texts
        self.characters = 0
        self.fault: BaseException | None = None

    def __iter__(self) -> Iterator[str]:
        try:
            for text in self._texts:
                self.characters += len(text)
                yield text
        except GeneratorExit:
            raise
        except BaseException as fault:
            self.fault = fault

    def require_any(self) -> None:
        """Raise the stored exception, or ConfigError if there was no text."""
        if self.fault is not None:
            raise self.fault
        if not self.characters:
            raise ConfigError("no text to train a tokenizer on")


def train_sentencepiece(
    texts: Iterable[str], *, output_prefix: str | Path, vocab_size: int, model_type: str = "bpe"
) -> Path:
    """Train SentencePiece on `texts`, write `<output_prefix>.model` and return its path.

    Decoding restores every text: there is no normalisation and no prepended space, runs of white space and line ends
    are ordinary pieces, and characters without a piece fall back to bytes. The one exception is U+2581 (a lower block),
    SentencePiece's sign for a space, which decodes to a space. Digits are single pieces. The same texts in the same
    order give the same file.

    `model_type`: "bpe" (byte-pair encoding) or "unigram" (Kudo 2018). Raises ConfigError if there is too little text
    for vocab_size, the file exists, or its folder is not writable; OSError if the file cannot be written; and
    exceptions of `texts`."""
    path = _output(output_prefix, ".model")
    _check_size(vocab_size, 260, "256 bytes, 3 control pieces and a character")
    source = _CountedTexts(texts)
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
            # Rare characters get no piece and are encoded as bytes.
            character_coverage=0.9999,
            max_sentence_length=_NO_SENTENCE_LIMIT,
            num_threads=2,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        source.require_any()
        why = f"on {source.characters} characters: {_reason(str(error))}"
        raise ConfigError(f"vocab_size {vocab_size} cannot be trained {why}") from None
    source.require_any()
    return _write(path, model.getvalue())


def train_byte_level(texts: Iterable[str], *, output_prefix: str | Path, vocab_size: int, words: str = "gpt2") -> Path:
    """Train byte-level BPE (GPT-2's) on `texts`, write `<output_prefix>.json`, a tokenizer.json, and return its path.

    Decoding restores every text, except <|endoftext|>: the 256 bytes are tokens, and nothing is normalised.
    <|endoftext|>, id 0, is the end of document; spelled out in a text it becomes that token, as in every
    tokenizer.json, and decoding leaves it out. The same texts in the same order give the same file.

    `words`: a key of WORD_PATTERNS; tokens do not cross word borders. Raises ConfigError and OSError as
    `train_sentencepiece`, and ConfigError if the package `tokenizers` is not installed."""
    path = _output(output_prefix, ".json")
    _check_size(vocab_size, 257, "256 bytes and the end of document")
    library = require_package("byte-level BPE", "tokenizers", "tokenizers")
    pattern, cutters = WORD_PATTERNS[words], library.pre_tokenizers
    tokenizer = library.Tokenizer(library.models.BPE())
    as_bytes = cutters.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    splits = [] if pattern is None else [cutters.Split(library.Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = cutters.Sequence([*splits, as_bytes])
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[GPT2_END],
        initial_alphabet=sorted(cutters.ByteLevel.alphabet()),
        show_progress=False,
    )
    source = _CountedTexts(texts)
    try:
        with as_config_error("byte-level BPE cannot be trained"):
            tokenizer.train_from_iterator(iter(source), trainer=trainer)
    except ConfigError:
        source.require_any()  # an exception of `texts` comes first
        raise
    source.require_any()
    if tokenizer.get_vocab_size() < vocab_size:
        raise ConfigError(f"{source.characters} characters give at most --vocab-size {tokenizer.get_vocab_size()}")
    return _write(path, tokenizer.to_str(pretty=True).encode())


def _output(prefix: str | Path, suffix: str) -> Path:
    check_output_prefix(prefix, example="tokenizer")
    path = Path(f"{prefix}{suffix}")
    _refuse_existing(path)
    make_folder(prefix)
    return path


def _refuse_existing(path: Path) -> None:
    # Never replaced: with another tokenizer, ids in existing models and token files would mean other text.
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; use another --output-prefix or move it away")


def _write(path: Path, content: bytes) -> Path:
    _refuse_existing(path)
    replace_durably(path, content)
    return path


def _reason(error: str) -> str:
    """Convert an error of SentencePiece about text and vocabulary to a remedy."""
    most = re.search(r"set it to a value <= (\d+)", error)
    if most:
        return f"they give {most[1]} pieces at most; try --vocab-size {most[1]}, or more text"
    least = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if least:
        return f"256 bytes, 3 control pieces and every common character are {least[1]}; try --vocab-size {least[1]} or more"
    # Drop the prefix "INTERNAL: file.cc(638) [condition] ".
    return re.sub(r"^.*\.cc\(\d+\) \[.*\]\s*", "", error, flags=re.DOTALL)[:200] + "; try another --vocab-size"


def _check_size(vocab_size: int, least: int, what: str) -> None:
    if not least <= vocab_size <= _MAX_VOCABULARY:
        raise ConfigError(f"vocab_size {vocab_size} is not from {least} ({what}) to {_MAX_VOCABULARY}; try 32000")
