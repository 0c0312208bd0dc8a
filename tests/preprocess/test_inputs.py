"""Files, folders and globs as inputs; a damaged one is one error that names the file."""

import gzip
import json
import os
import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from megalite.config.errors import ConfigError
from megalite.preprocess.inputs import find_inputs
from tests.preprocess.reading import read_all, write
from tests.support.patience import within

LINE = b'{"text": "a"}\n'


def names(folder: Path, *patterns: Path | str) -> list[str]:
    return [os.path.relpath(item.path, folder) for item in find_inputs([str(p) for p in patterns])]


def test_folders_globs_and_files_are_listed_once_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/c.jsonl.gz", "a/b/d.txt", "a/e.parquet", "f.jsonl.zst", "a.jsonl", "g.txt.gz"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, LINE)
    for name in ("ignored.csv", ".hidden.jsonl", "a/.cache.txt", "a/x.parquet.gz"):
        (tmp_path / name).write_bytes(LINE)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_bytes(LINE)
    everything = ["a/b/d.txt", "a/c.jsonl.gz", "a/e.parquet", "a.jsonl", "b.jsonl", "f.jsonl.zst", "g.txt.gz"]
    assert names(tmp_path, tmp_path) == everything
    assert names(tmp_path, tmp_path / "*.jsonl", tmp_path) == ["a.jsonl", "b.jsonl"] + [
        name for name in everything if name not in ("a.jsonl", "b.jsonl")
    ]
    assert names(tmp_path, tmp_path / "**" / "*.txt") == ["a/b/d.txt"]
    # A glob may match a folder, as when a shell expands it.
    assert names(tmp_path, tmp_path / "a*") == everything[:4]
    assert names(tmp_path, tmp_path / "b.jsonl", f"{tmp_path}/./b.jsonl", f"{tmp_path}/a/../b.jsonl") == ["b.jsonl"]


def test_each_link_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "a.jsonl", LINE)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "real" / "a.jsonl")
    for name in ("loop", "again"):  # two links: 2^40 paths before the system reports a loop
        (tmp_path / "real" / name).symlink_to(tmp_path / "in")
    assert names(tmp_path, tmp_path / "in") == ["in/b.jsonl"]


def test_json_with_lines_is_an_input(tmp_path: Path) -> None:
    lines = b'{"text": "a"}\n{"text": "b"}\n'
    (tmp_path / "a.json").write_bytes(b"\xef\xbb\xbf\n" + lines)
    write(tmp_path / "c4.json.gz", lines)
    (tmp_path / "long.json").write_bytes(b'{"text": "' + b"a" * (3 << 20) + b'"}\n')
    others = {
        "array.json": json.dumps([{"text": "a"}]).encode(),
        "pretty.json": json.dumps({"text": "a"}, indent=1).encode(),
        "half.json": b'{"text": ',
        "number.json": b"1\n2\n",
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name} is not one JSON object a line: .*jq -c"):
            find_inputs([str(tmp_path / name)])
    assert names(tmp_path, tmp_path) == ["a.json", "c4.json.gz", "long.json"]


def test_search_ignores_other_files(tmp_path: Path) -> None:
    """Empty shards, the output of an earlier run and the folder of an unfinished one."""
    for name in ("a.jsonl", "B.JSONL", "c.ndjson", "d.Txt.GZ"):
        write(tmp_path / name, gzip.compress(LINE) if name.endswith("GZ") else LINE)
    for name in ("part-1.jsonl", "part-2.parquet", "part-3.json"):
        (tmp_path / name).touch()
    for name in ("out_text_document.bin", "out_text_document.idx", "notes.md", "_SUCCESS"):
        (tmp_path / name).write_bytes(LINE)
    (tmp_path / "out_text_document.json").write_text(json.dumps({"format": 1}, indent=2))
    (tmp_path / "out.unfinished").mkdir()
    write(tmp_path / "out.unfinished" / "0.json", LINE)
    wanted = ["B.JSONL", "a.jsonl", "c.ndjson", "d.Txt.GZ"]
    for pattern in (tmp_path, tmp_path / "*", tmp_path / "**"):
        assert names(tmp_path, pattern) == wanted, pattern
    assert [item.kind for item in find_inputs([str(tmp_path)])] == ["jsonl", "jsonl", "jsonl", "text"]
    for glob in ("part-*", "*.bin"):
        with pytest.raises(ConfigError, match=rf"{glob[-4:].replace('*', '.')} matches no file ending in .*empty"):
            find_inputs([str(tmp_path / glob)])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=r"folder is a folder without files .*empty ones do not count"):
        find_inputs([str(tmp_path / "folder")])


def test_paths_that_are_not_inputs_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"")
    (tmp_path / "data.csv").write_bytes(b"1")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "nowhere.jsonl").symlink_to(tmp_path / "gone")
    faults = {
        "no.jsonl": r"no\.jsonl does not exist; give files, folders or globs of \.jsonl",
        "no*.zst": r"no\*\.zst does not exist",
        "empty.jsonl": r"empty\.jsonl cannot be read: it is empty",
        "data.csv": r"data\.csv is of an unknown kind; rename it",
        "folder.jsonl": r"folder\.jsonl is a folder without files ending in \.jsonl",
        "pipe.jsonl": r"pipe\.jsonl cannot be read: it is a pipe or device.*--input -",
        "nowhere.jsonl": r"nowhere\.jsonl cannot be read: No such file",
    }
    for name, message in faults.items():
        with pytest.raises(ConfigError, match=message):
            find_inputs([str(tmp_path / name)])
    with pytest.raises(ConfigError, match="no input files; give --input"):
        find_inputs([])

    def refuse(path: str, *arguments: object) -> int:
        raise PermissionError(13, "Permission denied", path)

    write(tmp_path / "secret.jsonl", LINE)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"secret\.jsonl cannot be read: Permission denied; fix the file"):
        find_inputs([str(tmp_path / "secret.jsonl")])


LINES = b"".join(b'{"text": "%d"}\n' % n for n in range(200))
TEXTS = [str(n) for n in range(200)]


def test_archive_with_several_members(tmp_path: Path) -> None:
    parts = [LINES[:501], b"", LINES[501:502], LINES[502:]]
    pack = zstandard.ZstdCompressor(write_content_size=False).compress
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    contents = {
        "a.jsonl.gz": b"".join(map(gzip.compress, parts)),
        "padded.jsonl.gz": b"".join(map(gzip.compress, parts)) + bytes(1000),
        "a.jsonl.zst": b"".join(map(pack, parts)),
        "skip.jsonl.zst": skippable + pack(parts[0]) + skippable + b"".join(map(pack, parts[1:])) + skippable,
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert read_all(tmp_path / name) == (TEXTS, []), name


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_every_truncation_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.jsonl.{suffix}"
    pack = gzip.compress if suffix == "gz" else zstandard.ZstdCompressor().compress
    first, second = pack(LINES[:1490]), pack(LINES[1490:])
    whole = first + second
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        if length == len(first):  # a missing second member cannot be detected
            assert len(read_all(path)[0]) == 100, length
            continue
        with pytest.raises(ConfigError, match=rf"a\.jsonl\.{suffix} cannot be read: .*; fix the file or leave it out"):
            read_all(path)


def test_damaged_content_is_an_error(tmp_path: Path) -> None:
    packed = gzip.compress(LINES)
    checked = zstandard.ZstdCompressor(write_checksum=True).compress(LINES)
    contents = {
        "text.jsonl.gz": (LINES, "as gzip it is damaged"),
        "text.jsonl.zst": (LINES, "as zstd it is damaged"),
        "zeros.jsonl.gz": (bytes(100), "as gzip it is damaged"),
        "crc.jsonl.gz": (packed[:-8] + b"\0\0\0\0" + packed[-4:], "as gzip it is damaged .CRC check failed"),
        "sum.jsonl.zst": (checked[:-4] + b"\0\0\0\0", "as zstd it is damaged .*checksum"),
        "tail.jsonl.gz": (packed + b"tail", "as gzip it is damaged"),
        "tail.jsonl.zst": (checked + b"tail", "as zstd it is damaged"),
        "text.parquet": (LINES, "as parquet it is damaged"),
    }
    for name, (content, message) in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigError, match=rf"{name} .*{message}"):
            read_all(tmp_path / name)


def test_changed_byte_in_a_parquet_page_with_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table({"text": TEXTS}), path, compression="none", use_dictionary=False, write_page_checksum=True
    )
    assert read_all(path) == (TEXTS, [])
    content = bytearray(path.read_bytes())
    content[content.index(b"123")] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a\.parquet .*as parquet it is damaged .*CRC"):
        read_all(path)


def test_zstd_window_with_too_much_memory_is_an_error(tmp_path: Path) -> None:
    def packed(window_log: int) -> bytes:
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log, hash_log=6, chain_log=6, strategy=1)
        packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # of unknown size
        return packer.compress(LINES) + packer.flush()

    (tmp_path / "a.jsonl.zst").write_bytes(packed(27))
    assert read_all(tmp_path / "a.jsonl.zst") == (TEXTS, [])
    (tmp_path / "a.jsonl.zst").write_bytes(packed(28))
    with pytest.raises(
        ConfigError, match=r"a\.jsonl\.zst .*a window above 128 MiB; compress it again with zstd --long=27"
    ):
        read_all(tmp_path / "a.jsonl.zst")


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.jsonl.zst", LINES)
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        message = rf"{name} needs the package {package}, which is not installed: pip install 'megalite\[data\]'"
        with pytest.raises(ConfigError, match=message):
            read_all(tmp_path / name)


def mutated(generator: random.Random, content: bytes) -> bytes:
    """One to three faults: bytes changed, removed, inserted or repeated, or the rest lost."""
    data = bytearray(content)
    for _ in range(generator.randrange(1, 4)):
        at = generator.randrange(len(data) + 1)
        size = generator.choice([1, 1, 2, 8, 100])
        kind = generator.randrange(6)
        if kind == 0:
            data[at : at + size] = generator.randbytes(len(data[at : at + size]))
        elif kind == 1:
            del data[at : at + size]
        elif kind == 2:
            data[at:at] = generator.randbytes(size)
        elif kind == 3:
            data[at:at] = data[at : at + size]
        elif kind == 4:
            data[at:at] = generator.choice([b"\n", b"\r", b"\0", b'"', b"\\", b"\\ud800", b"[" * 2000, b"9" * 5000])
        else:
            del data[at:]
    return bytes(data) or b"\n"


def originals(folder: Path) -> dict[str, bytes]:
    generator = random.Random(2)
    documents = [{"text": f"{n} é\n" * generator.randrange(1, 9), "id": n} for n in range(40)]
    lines = "".join(
        json.dumps(document, ensure_ascii=n % 2 > 0) + "\n" for n, document in enumerate(documents)
    ).encode()
    table = pyarrow.table({"text": [document["text"] for document in documents], "id": range(40)})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=15, compression="zstd")
    return {
        "a.jsonl": lines,
        "a.txt": lines,
        "a.jsonl.gz": gzip.compress(lines) * 2,
        "a.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(lines) * 2,
        "a.parquet": (folder / "a.parquet").read_bytes(),
    }


def is_repeated(texts: list[str], once: list[str]) -> bool:
    return texts == once * (len(texts) // len(once))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(2))
def test_damage_is_at_most_one_clear_error(tmp_path: Path, seed: int) -> None:
    """300 mutated files per seed: only bad lines, or a ConfigError with the file's name."""
    generator = random.Random(seed)
    outcomes = set()
    for name, content in originals(tmp_path).items():
        path = tmp_path / name
        good = None
        for case in range(60):
            path.write_bytes(content)
            good = good or read_all(path)[0]
            changed = mutated(generator, content)
            path.write_bytes(changed)
            try:
                with within(f"case {case} of {name}, seed {seed}"):
                    texts, bad = read_all(path)
            except ConfigError as error:
                assert str(path) in str(error) and "\n" not in str(error)
                outcomes.add("error")
                continue
            outcomes.add("bad" if bad else "good")
            if name in ("a.jsonl.gz", "a.jsonl.zst"):
                # Both formats have checksums: the content read is one or more complete members.
                assert not bad and is_repeated(texts, good[: len(good) // 2]), (case, name, seed)
            if name == "a.jsonl":
                # Lines that are complete in the damaged file must be read.
                whole = set(changed.split(b"\n")) & set(content.split(b"\n")) - {b""}
                assert {json.loads(line)["text"] for line in whole} <= set(texts)
    assert outcomes == {"error", "bad", "good"}
