"""Train a tokenizer with its library, on a share of the inputs that is spread evenly over them."""

import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import sentencepiece

from megalite.checkpoint.files import replace_durably
from megalite.config.errors import ConfigError
from megalite.preprocess.documents import PieceTexts, read_piece
from megalite.preprocess.inputs import Input
from megalite.preprocess.output import check_output_prefix, make_folder
from megalite.preprocess.pieces import Limits, Place, cut
from megalite.tokenizers.base import needed_package, refusing
from megalite.tokenizers.subword import GPT2_END
from megalite.tokenizers.tiktoken_encodings import LLAMA3_PATTERN

WORD_PATTERNS: dict[str, str | None] = {"gpt2": None, "gpt4": LLAMA3_PATTERN}
"""How byte-level BPE splits words: gpt2's are part of the library; gpt4's, and Llama 3's, split numbers into threes."""
_MAX_VOCABULARY = 1 << 20  # ten times what large models have; libraries reserve memory for all
_NO_SENTENCE_LIMIT = 1 << 30
_HELD_OUT_EVERY, _HELD_OUT_FIRST = 50, 10


@dataclass
class TrainingText:
    """At most max_bytes of the inputs' text, document by document; iterating counts what was read. Of inputs that hold
    more, pieces are taken so that at any place the text taken is to max_bytes what the bytes on disk passed are to all
    of them: the end of a corpus counts as much as its beginning. Standard input, of unknown length, is taken from its
    start. Every 50th document, from the 11th on, is held out, to measure the tokenizer on."""

    inputs: Sequence[Input]
    keys: Sequence[str]  # keys of the text in a document
    max_bytes: int  # of UTF-8 text; the last document is cut there
    advance: Callable[[int], None] = lambda count: None  # called with the bytes of text just read
    num_bytes: int = 0  # bytes of text read so far, those held out among them
    documents: int = 0  # documents read so far (texts, where there are several keys)
    bad: int = 0  # bad lines
    first_bad: str = ""  # with what is wrong; without a line number after a part was left out
    is_share: bool = False  # there was more text than max_bytes
    held_out: list[str] = field(default_factory=list)

    def __iter__(self) -> Iterator[str]:
        for text in self._texts():
            number, self.documents = self.documents, self.documents + 1
            if number % _HELD_OUT_EVERY == _HELD_OUT_FIRST:
                self.held_out.append(text)
            else:
                yield text
        if not self.documents and self.bad:
            lines = f"{self.bad} line{'s' if self.bad > 1 else ''} left out"
            raise ConfigError(f"no text to train a tokenizer on: {lines}, the first {self.first_bad}")

    def _texts(self) -> Iterator[str]:
        # Small enough for a small share to have something of every part.
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
    """Passes texts on, counts their characters and keeps the exception that reading them raised. SentencePiece takes an
    exception of its iterator for the end of the text and would train on the part before it."""

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
        """Raise what reading raised; a ConfigError if there was no text."""
        if self.fault is not None:
            raise self.fault
        if not self.characters:
            raise ConfigError("no text to train a tokenizer on")


def train_sentencepiece(
    texts: Iterable[str], *, output_prefix: str | Path, vocab_size: int, model_type: str = "bpe"
) -> Path:
    """Train SentencePiece on `texts` and write `<output_prefix>.model`; returns its path.

    Every text comes back as it was: no normalisation, no space put in front, runs of white space and line ends are
    ordinary pieces, and characters without a piece fall back to bytes. The one exception is U+2581 (a lower block),
    SentencePiece's own sign for a space, which decodes to one. Digits are single pieces. The same texts in the same
    order give the same file.

    `model_type`: "bpe" (byte-pair encoding) or "unigram" (Kudo 2018). Raises ConfigError: no text, or too little of it
    for vocab_size; the file exists, or its folder cannot be written to; what `texts` raises is raised again. OSError:
    the file cannot be written."""
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
            # Rare characters get no piece: bytes serve them.
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
    """Train byte-level BPE (GPT-2's) on `texts` and write `<output_prefix>.json`, a tokenizer.json; returns its path.

    Every text comes back as it was, except <|endoftext|>: the 256 bytes are tokens, and nothing is normalised.
    <|endoftext|>, id 0, is the end of document; spelled out in a text it is that token, as in every tokenizer.json, and
    decoding leaves it out. The same texts in the same order give the same file.

    `words`: a key of WORD_PATTERNS; tokens do not reach from one word into the next. Raises ConfigError: as
    `train_sentencepiece`, or the package `tokenizers` is not installed. OSError: the file cannot be written."""
    path = _output(output_prefix, ".json")
    _check_size(vocab_size, 257, "256 bytes and the end of document")
    library = needed_package("byte-level BPE", "tokenizers", "tokenizers")
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
        with refusing("byte-level BPE cannot be trained"):
            tokenizer.train_from_iterator(iter(source), trainer=trainer)
    except ConfigError:
        source.require_any()  # what reading raised comes first
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
    # Models and token files may depend on it: they would read other text in the same ids.
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists; give another --output-prefix or move it away")


def _write(path: Path, content: bytes) -> Path:
    _refuse_existing(path)
    replace_durably(path, content)
    return path


def _reason(error: str) -> str:
    """What SentencePiece says of text and vocabulary that do not fit, as what to do."""
    most = re.search(r"set it to a value <= (\d+)", error)
    if most:
        return f"they give {most[1]} pieces at most; try --vocab-size {most[1]}, or more text"
    least = re.search(r"required_chars\. \d+ vs (\d+)", error)
    if least:
        return f"256 bytes, 3 control pieces and every common character are {least[1]}; try --vocab-size {least[1]} or more"
    # "INTERNAL: file.cc(638) [condition] " comes before what is meant for people.
    return re.sub(r"^.*\.cc\(\d+\) \[.*\]\s*", "", error, flags=re.DOTALL)[:200] + "; try another --vocab-size"


def _check_size(vocab_size: int, least: int, what: str) -> None:
    if not least <= vocab_size <= _MAX_VOCABULARY:
        raise ConfigError(f"vocab_size {vocab_size} is not from {least} ({what}) to {_MAX_VOCABULARY}; try 32000")
