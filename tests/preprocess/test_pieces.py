"""Inputs divided into pieces: complete, without duplicates, bounded, and resumable at any piece."""

import gzip
import hashlib
import json
import os
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megalite.config.errors import ConfigError
from megalite.preprocess.documents import read_piece
from megalite.preprocess.inputs import AHEAD_ITEMS, find_inputs, read_ahead
from megalite.preprocess.pieces import Limits, Piece, Place, cut
from tests.preprocess.reading import pieces_of, places, read, read_all, words, write
from tests.preprocess.test_documents import LONGEST, expected
from tests.support.patience import wait_until


def corpus(generator: random.Random) -> bytes:
    """Lines of all kinds: good, blank, bad, too long, with and without CR, BOM and final newline."""
    lines = []
    for _ in range(generator.randrange(1, 40)):
        good = json.dumps({"text": words(generator, 6)}, ensure_ascii=generator.random() < 0.5).encode()
        line = generator.choices(
            [good, b"", b"  ", b"{bad", b"[" * 30, good[:-4] + b"y" * 400 + b'"}'], [8, 1, 1, 1, 1, 1]
        )[0]
        lines.append(line + generator.choice([b"", b"", b"\r"]))
    mark, end = generator.choice([b"", b"\xef\xbb\xbf"]), generator.choice([b"", b"\n", b"\n\n\n"])
    return mark + b"\n".join(lines) + end


@pytest.mark.parametrize("piece_bytes", [1, 13, 100, 1 << 18])
def test_pieces_have_every_document_once(tmp_path: Path, piece_bytes: int) -> None:
    generator = random.Random(piece_bytes)
    limits = Limits(piece_bytes=piece_bytes, max_document_bytes=LONGEST)
    for trial in range(25):
        content = corpus(generator) or b"\n"
        paths = [write(tmp_path / f"a.jsonl{suffix}", content) for suffix in ("", ".gz", ".zst")]
        bounds = set()
        for path in paths:
            pieces = pieces_of(path, limits=limits)
            assert read(pieces, limits) == expected(path, content), (trial, path.name)
            bounds.add(tuple((piece.start, piece.stop, piece.content) for piece in pieces))
            assert pieces[-1].disk_bytes == path.stat().st_size
            assert sum(piece.num_bytes for piece in pieces) == len(content)
        assert len(bounds) == 1, "compressed content is split at the same places"


@pytest.mark.parametrize("form", ["line", "paragraph"])
def test_blocks_may_end_at_any_byte(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All kinds of line ends give the same in pieces of all sizes, however the file is read."""
    generator = random.Random(7)
    for trial in range(40):
        content = bytes(generator.choices(b"\n\ra ", [3, 2, 4, 1], k=generator.randrange(1, 120)))
        if trial % 5 == 0:
            ends = [b"\n", b"\r\n", b"\n\n", b"\r\n\r\n"]
            content = b"".join(words(generator, 9).encode() + generator.choice(ends) for _ in range(60))
        path, longest = write(tmp_path / "a.txt", content), generator.randrange(1, 60)
        found = set()
        for piece_bytes in (1, 2, 3, 4, 5, 17, 1000):
            limits = Limits(longest, piece_bytes, form)  # type: ignore[arg-type]
            pieces = pieces_of(path, limits=limits)
            texts, bad = read(pieces, limits)
            found.add((tuple(texts), tuple(bad)))
            with monkeypatch.context() as patch:
                patch.setattr("megalite.preprocess.inputs._READ_BYTES", 1 + trial % 7)
                assert pieces_of(path, limits=limits) == pieces
            for piece in pieces:
                assert content[piece.start : piece.stop].startswith(piece.content)
        assert len(found) == 1, (content, longest)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt", "a.parquet"])
def test_file_that_is_still_being_written(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), path)
    else:
        write(path, b'{"text": "a"}\n')
    inputs = find_inputs([str(path)])
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match=r"has changed since it was found: it had .* start again when"):
        next(cut(inputs, keys=["text"], limits=Limits()))


@pytest.mark.parametrize("form", ["file", "line", "paragraph"])
def test_work_can_resume_after_every_piece(tmp_path: Path, form: str) -> None:
    generator = random.Random(3)
    limits = Limits(piece_bytes=1, max_document_bytes=LONGEST, text_documents=form)  # type: ignore[arg-type]
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt", "e.txt.zst"):
        write(tmp_path / name, corpus(generator) + b"\n1\n\n2")
    texts = [words(generator, 6) if generator.random() < 0.8 else None for _ in range(20)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "f.parquet", row_group_size=7)
    pieces = pieces_of(tmp_path, limits=limits)
    all_texts, all_bad = read(pieces, limits)
    assert len(pieces) > 60
    done: list[Piece] = []
    for piece, place in zip(pieces, places(pieces, limits), strict=True):
        done.append(piece)
        texts_before, bad_before = read(done, limits)
        rest = read_all(tmp_path, limits=limits, after=place)
        assert (texts_before + rest[0], bad_before + rest[1]) == (all_texts, all_bad), place


def test_resume_in_a_changed_file_is_an_error(tmp_path: Path) -> None:
    content = b'{"text": "a"}\n{"text": "b"}\n'
    for name in ("a.jsonl", "a.jsonl.gz"):
        path = write(tmp_path / name, content)
        for offset, message in (
            (5, "byte 5 is no longer the start of a line"),
            (99, r"has changed .*it ends \d+ bytes before the place"),
        ):
            with pytest.raises(ConfigError, match=message) as error:
                pieces_of(path, after=Place(0, offset))
            assert str(path) in str(error.value)
        assert pieces_of(path, after=Place(0, len(content))) == []


def test_huge_line_needs_little_memory(tmp_path: Path) -> None:
    giant = 150 << 20
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n{"text": "')
        file.seek(giant, os.SEEK_CUR)  # a sparse file: it occupies no disk space
        file.write(b'"}\n{"text": "b"}\n')
    packer = zstandard.ZstdCompressor(1).compressobj()
    packed = [packer.compress(b'{"text": "a"}\n{"text": "')]
    packed += [packer.compress(bytes(1 << 20)) for _ in range(giant >> 20)]
    packed += [packer.compress(b'"}\n{"text": "b"}\n'), packer.flush()]
    (tmp_path / "b.jsonl.zst").write_bytes(b"".join(packed))
    (tmp_path / "c.txt.zst").write_bytes(b"".join(packed))
    limits = Limits(max_document_bytes=1 << 20)
    tracemalloc.start()
    try:
        for name, most in (("a.jsonl", 8), ("b.jsonl.zst", 80), ("c.txt.zst", 80)):
            tracemalloc.reset_peak()
            texts, bad = read_all(tmp_path / name, limits=limits)
            assert tracemalloc.get_traced_memory()[1] < most << 20, name
            if name == "c.txt.zst":
                assert (texts, bad) == ([], [(name, 1, "too long")])
            else:
                assert (texts, bad) == (["a", "b"], [(name, 2, "too long")])
    finally:
        tracemalloc.stop()


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("input reader")]


def test_thread_reads_ahead_and_ends_with_its_reader() -> None:
    made, ended = list[int](), list[bool]()

    def numbers(stop: threading.Event) -> Iterator[int]:
        for number in range(1, 1000):
            made.append(number)
            if number == 1 + AHEAD_ITEMS:  # as if no more input arrived
                ended.append(stop.wait(30))
            yield number

    ahead = read_ahead(numbers)
    assert next(ahead) == 1
    wait_until(lambda: len(made) >= 1 + AHEAD_ITEMS, seconds=10)
    time.sleep(0.05)
    assert len(made) == 1 + AHEAD_ITEMS  # one piece is consumed
    ahead.close()
    assert not readers() and ended == [True]


def test_error_is_raised_after_the_pieces_before_it(tmp_path: Path) -> None:
    good = write(tmp_path / "a.jsonl.gz", b'{"text": "a"}\n' * 10)
    damaged = tmp_path / "b.jsonl.gz"
    damaged.write_bytes(gzip.compress(b'{"text": "b"}\n' * 1000)[:-12])
    pieces = cut(find_inputs([str(good), str(damaged)]), keys=["text"], limits=Limits(piece_bytes=100))
    found = []
    with pytest.raises(ConfigError, match=r"b\.jsonl\.gz cannot be read"):
        for piece in pieces:
            found += read_piece(piece, ["text"], Limits()).texts[0]
    assert found[:10] == ["a"] * 10
    assert not readers()


class TestStandardInput:
    CONTENT = b"".join(b'{"text": "%d"}\n' % n for n in range(3000))
    LIMITS = Limits(piece_bytes=1000)

    @contextmanager
    def piped(self, monkeypatch: pytest.MonkeyPatch, content: bytes, *, end: bool = True) -> Iterator[None]:
        """Make standard input a pipe with this content; without `end` it stays open."""
        out, into = os.pipe()
        # The writer's side must not block forever if the reader is gone.
        writer = threading.Thread(target=self.feed, args=(into, content, end), daemon=True)
        writer.start()
        with os.fdopen(out) as file:
            monkeypatch.setattr("sys.stdin", file)
            yield
        writer.join()
        if not end:
            os.close(into)

    @staticmethod
    def feed(into: int, content: bytes, end: bool) -> None:
        with suppress(BrokenPipeError):
            os.write(into, content)
        if end:
            os.close(into)

    def pieces(self, after: Place | None = None) -> list[Piece]:
        return list(cut(find_inputs(["-"]), keys=["text"], limits=self.LIMITS, after=after))

    def test_standard_input_is_recognized_by_its_content(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.piped(monkeypatch, self.CONTENT):
            pieces = self.pieces()
        assert len(pieces) > 20 and all(piece.path == "-" for piece in pieces)
        assert read(pieces, self.LIMITS) == ([str(n) for n in range(3000)], [])
        found = places(pieces, self.LIMITS)
        place = found[7]
        with self.piped(monkeypatch, self.CONTENT):
            assert self.pieces(after=place) == pieces[8:]
        with (
            self.piped(monkeypatch, self.CONTENT.replace(b"12", b"21", 1)),
            pytest.raises(ConfigError, match=f"input - has changed .*its first {place.offset} bytes"),
        ):
            self.pieces(after=place)
        with (
            self.piped(monkeypatch, self.CONTENT[:500]),
            pytest.raises(ConfigError, match=r"input - has changed .*it ends .* bytes before the place"),
        ):
            self.pieces(after=place)

    def test_digest_includes_lines_that_are_too_long(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("megalite.preprocess.inputs._READ_BYTES", 50)
        content = b'{"text": "a"}\n' + b"x" * 5000 + b'\n{"text": "b"}\n' * 9
        limits = Limits(piece_bytes=20, max_document_bytes=100)
        with self.piped(monkeypatch, content):
            pieces = list(cut(find_inputs(["-"]), keys=["text"], limits=limits))
        assert any(len(piece.content) < piece.stop - piece.start for piece in pieces)
        for piece in pieces:
            assert piece.digest == hashlib.sha256(content[: piece.stop]).hexdigest()

    def test_early_close_does_not_wait_for_input(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.piped(monkeypatch, self.CONTENT, end=False):
            pieces = cut(find_inputs(["-"]), keys=["text"], limits=self.LIMITS)
            next(pieces)
            pieces.close()
            assert not readers()

    def test_terminal_as_standard_input_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main, other = os.openpty()
        with os.fdopen(other) as file:
            monkeypatch.setattr("sys.stdin", file)
            with pytest.raises(ConfigError, match="input -: standard input is a terminal"):
                self.pieces()
        os.close(main)
        monkeypatch.setattr("sys.stdin", None)
        with pytest.raises(ConfigError, match="input -: there is no standard input"):
            self.pieces()
