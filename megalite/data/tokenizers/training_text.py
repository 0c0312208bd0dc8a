"""Text to train a tokenizer on: a share of the inputs that is spread evenly over them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import Input
from megalite.data.inputs.pieces import cut
from megalite.data.inputs.places import Limits
from megalite.data.inputs.read import PieceTexts, read_piece

_HELD_OUT_EVERY, _HELD_OUT_FIRST = 50, 10


@dataclass
class TrainingText:
    """At most max_bytes of the inputs' text, document by document; iterating counts what was read.

    Of inputs that hold more, pieces are taken so that at any place the text taken is to max_bytes what the bytes on
    disk passed are to all of them: the end of a corpus counts as much as its beginning. Standard input, whose length
    nobody knows, is taken from its start. Every 50th document, from the 11th on, is held out, to measure the
    tokenizer on.

    Args:
        inputs: what find_inputs found.
        keys: keys of the text in a document.
        max_bytes: of UTF-8 text; the last document is cut there.
        advance: called with the bytes of text just read.
    """

    inputs: Sequence[Input]
    keys: Sequence[str]
    max_bytes: int
    advance: Callable[[int], None] = lambda count: None
    num_bytes: int = 0
    """Bytes of text read so far, those held out among them."""
    documents: int = 0
    """Documents read so far (texts, where there are several keys)."""
    bad: int = 0
    """Lines that are no documents."""
    first_bad: str = ""
    """The first of them and what is wrong with it; no line number is known of what comes after a part left out."""
    is_share: bool = False
    """There was more text than max_bytes."""
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
        passed = 0  # bytes on disk of the inputs before this one
        sizes = [item.size for item in self.inputs]
        total = None if None in sizes else sum(size or 0 for size in sizes)
        pieces = cut(self.inputs, keys=self.keys, limits=limits)
        source = lines = 0
        for piece in pieces:
            if self.num_bytes >= self.max_bytes:
                self.is_share = True
                pieces.close()
                return
            while source < piece.source:
                passed, source, lines = passed + (sizes[source] or 0), source + 1, 0
            if total is not None and self.num_bytes * total > self.max_bytes * (passed + piece.disk_bytes):
                self.is_share = True
                continue
            found = read_piece(piece, self.keys, limits)
            if found.bad and not self.bad:
                first = found.bad[0]
                place = piece.path if self.is_share else f"{piece.path}:{lines + first.line + 1}"
                self.first_bad = f"{place}: {first.reason}"
            self.bad += len(found.bad)
            lines += found.lines
            yield from self._take(found)

    def _take(self, found: PieceTexts) -> Iterator[str]:
        for texts in zip(*found.texts, strict=True):
            for text in texts:
                content = text.encode("utf-8")
                left = self.max_bytes - self.num_bytes
                if len(content) > left:
                    self.is_share = True
                    text = content[:left].decode("utf-8", errors="ignore")
                self.num_bytes += min(len(content), left)
                self.advance(min(len(content), left))
                if text:
                    yield text


class CountedTexts:
    """Passes texts on, counts their characters and keeps the exception that reading them raised.

    SentencePiece takes an exception of its iterator for the end of the text and would train on the part before it.
    """

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
