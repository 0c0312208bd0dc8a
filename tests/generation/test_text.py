"""Growing text: whole characters, stop strings, and no retractions."""

from collections.abc import Sequence

import pytest

from megalite.generation.continuation import GrowingText
from megalite.tokenizers.base import ByteLevelTokenizer

BYTES = ByteLevelTokenizer()
TEXT = "naïve café — 日本語 🙂 end"


def pieces(text: str, stops: Sequence[str] = ()) -> tuple[list[str], GrowingText]:
    """Text returned after each byte, and at the end."""
    growing = GrowingText(BYTES.decode, BYTES.encode("a prompt"), stops)
    given = []
    for token in BYTES.encode(text):
        growing.push(token)
        given.append(growing.take())
        if growing.stopped:
            break
    growing.finish()
    given.append(growing.take())
    return given, growing


def test_characters_are_returned_whole() -> None:
    given, growing = pieces(TEXT)
    assert "".join(given) == growing.text == TEXT
    assert not any("\ufffd" in piece for piece in given)
    assert len(given) == len(BYTES.encode(TEXT)) + 1


def test_incomplete_characters_are_returned_at_the_end() -> None:
    growing = GrowingText(BYTES.decode, [])
    for token in (ord("a"), 0xE6, 0x97):
        growing.push(token)
    assert growing.take() == "a"
    growing.finish()
    assert growing.take() == "\ufffd"
    growing.finish()
    assert growing.text == "a\ufffd"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (["café"], "naïve "),
        (["日本語"], "naïve café — "),
        (["end", "café", "x"], "naïve "),
        (["n", "na"], ""),
        (["nothing of it"], TEXT),
        (["end."], TEXT),
    ],
)
def test_stop_strings(stops: list[str], expected: str) -> None:
    given, growing = pieces(TEXT, stops)
    assert "".join(given) == growing.text == expected
    assert growing.stopped == (expected != TEXT)


def test_only_recent_tokens_are_decoded() -> None:
    """For text of any length."""
    lengths = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return BYTES.decode(ids)

    growing = GrowingText(decode, list(range(1000)))
    for token in BYTES.encode(TEXT * 20):
        growing.push(token)
    assert max(lengths) < 12


def test_leading_spaces_dropped_by_a_decoder() -> None:
    """SentencePiece omits the space before the first word that it decodes."""
    words = ["", "The", "▁quick", "▁brown", "er", "▁fox"]

    def decode(ids: Sequence[int]) -> str:
        return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")

    growing = GrowingText(decode, [1])
    given = []
    for token in (2, 3, 4, 5):
        growing.push(token)
        given.append(growing.take())
    assert given == [" quick", " brown", "er", " fox"]
