"""Hundreds of damaged .jsonl files: what is kept, and what is said of each line that is not, is what a slow reader says."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.config.data import DataConfig
from megalite.config.errors import ConfigError
from megalite.data.inputs.pieces import FOREIGN_HEADS
from megalite.data.inputs.places import Limits
from megalite.data.preprocess.job import PreprocessJob
from megalite.data.preprocess.run import preprocess
from tests.data.inputs.reading import Found, read_all
from tests.data.preprocess.jobs import documents
from tests.support.patience import within

LONGEST = 200
MARK = b"\xef\xbb\xbf"
ODD = (
    *(
        b"\n",
        b"\n\n",
        b"\r\n",
        b"\r",
        b" ",
        b"\0",
        b"\x0b",
        b'"',
        b"\\",
        b"{",
        b"}",
        b"[" * 100,
        b"null",
        b"NaN",
    ),
    *(b"\\ud83d", b"\\ude42", b"\xed\xa0\x80", b"\xff\xfe", MARK, b"\x1f\x8b", b"\xe2\x80\xa8", b"9" * 5000),
    *(b'{"text": 1}', b'{"text": ""}', b'{"Text": "a"}', b'"text"', b"x" * LONGEST),
)

good_lines = st.builds(
    lambda text, more, ascii: json.dumps({**more, "text": text}, ensure_ascii=ascii).encode(),
    st.text(min_size=1, max_size=12),
    st.sampled_from([{}, {"id": 7}, {"text ": None}, {"x": {"text": ["a", 1.5e9]}}]),
    st.booleans(),
)

long_lines = st.integers(LONGEST - 1, LONGEST + 1).map(
    lambda size: b'{"text": "' + b"y" * (size - 12) + b'"}'
)
lines = good_lines | good_lines | long_lines | st.sampled_from(ODD)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Lines, most of them good, some of whose bytes are lost, changed, repeated or put in between."""
    mark = draw(st.sampled_from([b"", b"", MARK]))
    content = mark + b"\n".join(draw(st.lists(lines, min_size=1, max_size=6)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        stop = min(start + draw(st.sampled_from([0, 0, 1, 2, 30])), len(content))
        new = draw(st.sampled_from(ODD) | st.binary(max_size=4) | st.just(2 * content[start:stop]))
        content = content[:start] + new + content[stop:]
    return content or b"\n"  # an empty file is refused as one


def slowly(line: bytes) -> tuple[str | None, str]:
    """(text, "") or (None, what is wrong), by the words of docs/data.md; ("", "") of a blank line."""
    if len(line) > LONGEST:
        return None, "too long"
    if not line.strip():
        return "", ""
    try:
        document = json.loads(line.decode("utf-8", errors="strict"))
    except UnicodeDecodeError:
        return None, "invalid UTF-8"
    except (ValueError, RecursionError):
        return None, "invalid JSON"
    if not isinstance(document, dict):
        return None, "no object"
    if "text" not in document:
        return None, "missing key"
    text = document["text"]
    if not isinstance(text, str):
        return None, "wrong type"
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        return None, "lone surrogate"
    return (text, "") if text else (None, "empty text")


def expected(path: Path, content: bytes) -> Found:
    texts: list[str] = []
    bad: list[tuple[str, int, str]] = []
    for number, line in enumerate(content.removeprefix(MARK).split(b"\n"), 1):
        text, fault = slowly(line)
        if fault:
            bad.append((path.name, number, fault))
        elif text:
            texts.append(text)
    return texts, bad


def is_foreign(content: bytes) -> bool:
    return content.startswith(tuple(mark for mark, _, _ in FOREIGN_HEADS))


untimed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(untimed, max_examples=600)
@given(content=damaged(), piece_bytes=st.sampled_from([1, 50, 1 << 18]), packed=st.booleans())
def test_every_line_is_kept_or_named(tmp_path: Path, content: bytes, piece_bytes: int, packed: bool) -> None:
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    limits = Limits(max_document_bytes=LONGEST, piece_bytes=piece_bytes)
    if is_foreign(content):
        with pytest.raises(ConfigError) as refused:
            read_all(path, limits=limits)
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    else:
        with within(content):
            found = read_all(path, limits=limits)
        assert found == expected(path, content)


@settings(untimed, max_examples=150)
@given(content=damaged(), strict=st.booleans())
def test_what_is_made_of_them(tmp_path: Path, content: bytes, strict: bool) -> None:
    """By the whole of preprocessing: the tokens of the good lines, a count of the others; or one error with the file."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    job = PreprocessJob(
        inputs=(str(path),),
        output_prefix=str(tmp_path / "out"),
        tokenizer=DataConfig(tokenizer_type="ByteLevelTokenizer"),
        max_document_bytes=LONGEST,
        strict=strict,
        restart=True,
    )
    texts, bad = expected(path, content)
    if is_foreign(content) or not texts or (strict and bad):
        with pytest.raises(ConfigError) as refused:
            preprocess(job)
        message = str(refused.value)
        assert "\n" not in message and str(path) in message
        if strict and bad and not is_foreign(content):
            assert message.startswith(f"{path}:{bad[0][1]}: ")
        return
    with within(content):
        result = preprocess(job)
    assert documents(tmp_path) == [list(text.encode()) for text in texts]
    assert [fault.split(": ")[0] for fault in result.faults] == [f"{path}:{line}" for _, line, _ in bad]
    assert result.bad_lines == len(bad)
