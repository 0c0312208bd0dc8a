"""Documents out of pieces, and names for what is none."""

import json
import pickle
import random
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import find_inputs
from megalite.data.inputs.pieces import Limits, cut
from megalite.data.inputs.read import KINDS, read_piece
from tests.data.inputs.reading import only, pieces_of, places, read, read_all, words, write

BAD_LINES = {
    b'{"text": "1"': ("invalid JSON", "Expecting ',' delimiter at character 12"),
    b'{"text": "1"} x': ("invalid JSON", "Extra data at character 14"),
    b'{"text": "a\tb"}': ("invalid JSON", "invalid JSON: Invalid control character at character 11"),
    b'{"text": "a': ("invalid JSON", "invalid JSON: Unterminated string starting at character 9"),
    b"[" * 100_000: ("invalid JSON", "nested too deep"),
    b'{"text": "1", "deep": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001: (
        "invalid JSON",
        "nested too deep",
    ),
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
def test_a_bad_line_is_named_and_loses_nothing(tmp_path: Path, bad: bytes) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "1"}\n\n' + bad + b'\n{"text": "2"}')
    limits = Limits(max_document_bytes=1_500_000, piece_bytes=4_000_000)
    found = only(path, limits=limits)
    assert (found.lines, found.texts, found.at) == (4, [["1", "2"]], [0, 3])
    kind, reason = BAD_LINES[bad]
    ((line, found_kind, found_reason),) = [(b.line, b.kind, b.reason) for b in found.bad]
    assert (line, found_kind) == (2, kind) and reason in found_reason and len(found_reason) < 300


def test_every_kind_is_shown() -> None:
    assert {kind for kind, _ in BAD_LINES.values()} == set(KINDS)


def test_lines_that_are_unusual_but_good(tmp_path: Path) -> None:
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


def test_several_keys_keep_in_step_and_dots_are_letters(tmp_path: Path) -> None:
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
    assert [(bad.line, bad.kind) for bad in found.bad] == [
        (1, "missing key"),
        (3, "empty text"),
        (4, "missing key"),
    ]


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


def test_text_files_that_are_no_documents(tmp_path: Path) -> None:
    assert [bad.kind for bad in only(write(tmp_path / "a.txt", b"a\xff")).bad] == ["invalid UTF-8"]
    assert [bad.kind for bad in only(write(tmp_path / "a.txt", b"\xef\xbb\xbf")).bad] == ["empty text"]
    assert [bad.kind for bad in only(write(tmp_path / "a.txt.gz", b"")).bad] == ["empty text"]
    limits = Limits(max_document_bytes=10)
    for name in ("b.txt", "b.txt.gz", "b.txt.zst"):
        assert read_all(write(tmp_path / name, b"1234567890"), limits=limits) == (["1234567890"], [])
        assert read_all(write(tmp_path / name, b"12345678901"), limits=limits) == (
            [],
            [(name, 1, "too long")],
        )


@pytest.mark.parametrize("form", ["line", "paragraph"])
def test_lines_of_text_are_numbered_past_what_is_too_long_or_bad(tmp_path: Path, form: str) -> None:
    generator = random.Random(5)
    limits = Limits(max_document_bytes=60, piece_bytes=30, text_documents=form)  # type: ignore[arg-type]
    end = b"\n" if form == "line" else b"\n\n"
    for trial in range(30):
        content, expected, bad, line = b"", [], [], 1
        for _ in range(30):
            lines = [
                words(generator, 4).encode()
                for _ in range(1 if form == "line" else generator.randrange(1, 9))
            ]
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


def test_pieces_travel_between_processes(tmp_path: Path) -> None:
    limits = Limits(piece_bytes=50)
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = write(tmp_path / name, b"".join(b'{"text": "%d"}\n' % n for n in range(20)))
        pieces = pickle.loads(pickle.dumps(pieces_of(path, limits=limits)))
        assert len(pieces) == 5 and sum(piece.num_bytes for piece in pieces) == 290
        assert read(pieces, limits)[0] == [str(n) for n in range(20)]
        assert pieces[-1].disk_bytes == path.stat().st_size
        assert places(pieces, limits)[-1].lines == 20
        assert bool(sum(piece.held_bytes for piece in pieces)) == (name != "a.jsonl")


def test_a_file_that_changes_under_the_reader(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n' * 100)
    limits = Limits(piece_bytes=500)
    pieces = pieces_of(path, limits=limits)
    path.write_bytes(b'{"text": "a"}\n' * 99)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl has changed .*it had 1400 bytes and now has 1386; start again"
    ):
        read_piece(pieces[0], ["text"], limits)
    path.write_bytes(b'{"text": "ab"}\n' * 93 + b"12345")
    with pytest.raises(ConfigError, match=r"a\.jsonl has changed .*byte 504 is not the beginning of a line"):
        read_piece(pieces[0], ["text"], limits)
    path.unlink()
    with pytest.raises(ConfigError, match=r"a\.jsonl cannot be read: No such file"):
        read_piece(pieces[0], ["text"], limits)


def test_keys_and_limits_that_do_not_fit(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", b"a")
    inputs = find_inputs([str(text)])
    for keys, limits, message in (
        ([], Limits(), "must name one or more different keys"),
        (["a", "a"], Limits(), "'a a' must name one or more different keys"),
        (["a", "b"], Limits(), r"a\.txt is plain text and has no keys"),
        (["a"], Limits(max_document_bytes=0), "max_document_bytes 0 .* must be at least 1"),
        (["a"], Limits(piece_bytes=0), "piece_bytes 0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            list(cut(inputs, keys=keys, limits=limits))
