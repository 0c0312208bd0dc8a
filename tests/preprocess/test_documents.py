"""Documents from pieces, errors of bad ones, and hundreds of damaged .jsonl files compared with a simple reader."""

import gzip
import json
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalite.preprocess.pieces import Limits
from tests.preprocess.reading import Found, only, read_all, words, write
from tests.support.patience import within

BAD_LINES = {
    b'{"text": "1"': ("invalid JSON", "Expecting ',' delimiter at character 12"),
    b'{"text": "1"} x': ("invalid JSON", "Extra data at character 14"),
    b'{"text": "a\tb"}': ("invalid JSON", "invalid JSON: Invalid control character at character 11"),
    b'{"text": "a': ("invalid JSON", "invalid JSON: Unterminated string starting at character 9"),
    b"[" * 100_000: ("invalid JSON", "nested too deep"),
    b'{"text": "1", "deep": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001: ("invalid JSON", "nested too deep"),
    b'{"text": "1", "n": ' + b"9" * 1_000_000 + b"}": (
        "invalid JSON",
        "invalid JSON: a number has more than 4300 digits",
    ),
    b"\x00": ("invalid JSON", "at character 0"),
    b'["text"]': ("no object", "expected a JSON object, got an array"),
    b'"text"': ("no object", "got a string"),
    b"NaN": ("no object", "got a number"),
    b"true": ("no object", "got a boolean"),
    b"{}": ("missing key", "no key 'text' (there are none)"),
    b'{"messages": []}': ("missing key", "no key 'text' (there are 'messages'); examples to fine-tune on need --sft"),
    b'{"Text": "1"}': ("missing key", "no key 'text' (there are 'Text'); did you mean 'Text'?"),
    b'{"a":1,"b":1,"c":1,"d":1,"e":1,"f":1}': ("missing key", "(there are 'a', 'b', 'c', 'd', 'e', ...)"),
    json.dumps({"k" * 10_000: 1}).encode(): ("missing key", f"(there are '{'k' * 40}...')"),
    b'{"text": 5}': ("wrong type", "expected a string under 'text', got a number"),
    b'{"text": null}': ("wrong type", "got null"),
    b'{"text": ["a"]}': ("wrong type", "got an array"),
    b'{"text": ""}': ("empty text", "empty text under 'text'"),
    b'{"text": "\xff"}': ("invalid UTF-8", "invalid UTF-8 at byte 10"),
    b'{"text": "\xed\xa0\x80"}': ("invalid UTF-8", "at byte 10"),
    b'{"text": "\\ud800"}': ("lone surrogate", "half of a surrogate pair under 'text' at character 0"),
    b'{"text": "ab\\uDFFF"}': ("lone surrogate", "at character 2"),
    b'{"text": "' + b"a" * 2_000_000 + b'"}': ("too long", "longer than 1,500,000 bytes"),
    b" " * 1_500_001: ("too long", "--max-document-mb"),
}


@pytest.mark.parametrize("bad", BAD_LINES, ids=lambda line: f"{len(line)}-{line[:20]!r}")
def test_bad_line_is_named_and_loses_no_other(tmp_path: Path, bad: bytes) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "1"}\n\n' + bad + b'\n{"text": "2"}')
    limits = Limits(max_document_bytes=1_500_000, piece_bytes=4_000_000)
    found = only(path, limits=limits)
    assert (found.lines, found.texts, found.at) == (4, [["1", "2"]], [0, 3])
    kind, reason = BAD_LINES[bad]
    ((line, found_kind, found_reason),) = [(b.line, b.kind, b.reason) for b in found.bad]
    assert (line, found_kind) == (2, kind) and reason in found_reason and len(found_reason) < 300


def test_unusual_valid_lines(tmp_path: Path) -> None:
    lines = {
        b'\xef\xbb\xbf{"text": "mark"}\r': "mark",
        b'  {"text": "blanks"} \t\r': "blanks",
        b'{"text": "first", "text": "last"}': "last",
        b'{"text": "n", "x": NaN, "y": -Infinity, "z": 1e999}': "n",
        b'{"text": "\\u0000"}': "\0",
        b'{"text": "\\ud83d\\ude42"}': "🙂",
        '{"text": "한\\ud55c\u2028\x85"}'.encode(): "한한\u2028\x85",
        b'{"text": "\\\\ud800 \xc3\xa9"}': "\\ud800 é",
        b'{"text": " "}': " ",
    }
    found = only(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert found.texts == [list(lines.values())] and not found.bad


def test_several_keys_stay_aligned_and_may_have_dots(tmp_path: Path) -> None:
    lines = [
        {"q": "1", "a.b": "2"},
        {"q": "4"},
        {"a.b": "5", "q": "6"},
        {"q": "7", "a.b": ""},
        {"q": "8", "a": {"b": "9"}},
    ]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)).encode())
    found = only(path, ["q", "a.b"])
    assert found.texts == [["1", "6"], ["2", "5"]] and found.at == [0, 2]
    assert [(bad.line, bad.kind) for bad in found.bad] == [(1, "missing key"), (3, "empty text"), (4, "missing key")]


def test_text_files(tmp_path: Path) -> None:
    content = "\ufeffone\ntwo\r\n\r\n\n three\n \nfour\n\n\nfive".encode()
    as_file = content.decode("utf-8-sig")
    for name in ("a.txt", "a.txt.gz", "a.txt.zst"):
        path = write(tmp_path / name, content)
        assert read_all(path) == ([as_file], [])
        for piece_bytes in (1, 5, 100):
            limits = Limits(piece_bytes=piece_bytes, text_documents="line")
            assert read_all(path, limits=limits) == (["one", "two", " three", "four", "five"], [])
            limits = Limits(piece_bytes=piece_bytes, text_documents="paragraph")
            assert read_all(path, limits=limits) == (["one\ntwo", " three\n \nfour", "five"], [])


def test_text_files_that_are_not_documents(tmp_path: Path) -> None:
    assert [bad.kind for bad in only(write(tmp_path / "a.txt", b"a\xff")).bad] == ["invalid UTF-8"]
    assert [bad.kind for bad in only(write(tmp_path / "a.txt", b"\xef\xbb\xbf")).bad] == ["empty text"]
    assert [bad.kind for bad in only(write(tmp_path / "a.txt.gz", b"")).bad] == ["empty text"]
    limits = Limits(max_document_bytes=10)
    for name in ("b.txt", "b.txt.gz", "b.txt.zst"):
        assert read_all(write(tmp_path / name, b"1234567890"), limits=limits) == (["1234567890"], [])
        assert read_all(write(tmp_path / name, b"12345678901"), limits=limits) == ([], [(name, 1, "too long")])


@pytest.mark.parametrize("form", ["line", "paragraph"])
def test_line_numbers_include_bad_and_long_lines(tmp_path: Path, form: str) -> None:
    generator = random.Random(5)
    limits = Limits(max_document_bytes=60, piece_bytes=30, text_documents=form)  # type: ignore[arg-type]
    end = b"\n" if form == "line" else b"\n\n"
    for trial in range(30):
        content, expected, bad, line = b"", [], [], 1
        for _ in range(30):
            lines = [words(generator, 4).encode() for _ in range(1 if form == "line" else generator.randrange(1, 9))]
            lines[0] += b"\xff" if generator.random() < 0.1 else b""
            document = b"\n".join(lines)
            if len(document) > 60:
                bad.append(("a.txt", line, "too long"))
            elif b"\xff" in document:
                bad.append(("a.txt", line, "invalid UTF-8"))
            else:
                expected.append(document.decode())
            blanks = generator.randrange(3)
            content += document + end + b"\n" * blanks
            line += len(lines) + len(end) - 1 + blanks
        for name in ("a.txt", "a.txt.gz"):
            texts, faults = read_all(write(tmp_path / name, content), limits=limits)
            assert (texts, faults) == (expected, [(name, *rest) for _, *rest in bad]), trial


LONGEST = 200
MARK = b"\xef\xbb\xbf"
ODD = [b"\n", b"\n\n", b"\r\n", b"\r", b" ", b"\0", b"\x0b", b'"', b"\\", b"{", b"}", b"[" * 100, b"null", b"NaN"]
ODD += [b"\\ud83d", b"\\ude42", b"\xed\xa0\x80", b"\xff\xfe", MARK, b"\x1f\x8b", b"\xe2\x80\xa8", b"9" * 5000]
ODD += [b'{"text": 1}', b'{"text": ""}', b'{"Text": "a"}', b'"text"', b"x" * LONGEST]

good_lines = st.builds(
    lambda text, more, ascii: json.dumps({**more, "text": text}, ensure_ascii=ascii).encode(),
    st.text(min_size=1, max_size=12),
    st.sampled_from([{}, {"id": 7}, {"text ": None}, {"x": {"text": ["a", 1.5e9]}}]),
    st.booleans(),
)

long_lines = st.integers(LONGEST - 1, LONGEST + 1).map(lambda size: b'{"text": "' + b"y" * (size - 12) + b'"}')
lines = good_lines | good_lines | long_lines | st.sampled_from(ODD)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Draw mostly good lines, with some bytes lost, changed, repeated or inserted."""
    mark = draw(st.sampled_from([b"", b"", MARK]))
    content = mark + b"\n".join(draw(st.lists(lines, min_size=1, max_size=6)))
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(content)))
        stop = min(start + draw(st.sampled_from([0, 0, 1, 2, 30])), len(content))
        new = draw(st.sampled_from(ODD) | st.binary(max_size=4) | st.just(2 * content[start:stop]))
        content = content[:start] + new + content[stop:]
    return content or b"\n"  # an empty file is refused


def slowly(line: bytes) -> tuple[str | None, str]:
    """(text, "") or (None, fault) as documented in docs/data.md; ("", "") for a blank line."""
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


untimed = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(untimed, max_examples=150)
@given(content=damaged(), piece_bytes=st.sampled_from([1, 50, 1 << 18]), packed=st.booleans())
def test_each_line_is_kept_or_named(tmp_path: Path, content: bytes, piece_bytes: int, packed: bool) -> None:
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    limits = Limits(max_document_bytes=LONGEST, piece_bytes=piece_bytes)
    with within(content):
        found = read_all(path, limits=limits)
    assert found == expected(path, content)
