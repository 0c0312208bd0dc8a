"""Files, folders and globs become inputs."""

import gzip
import json
import os
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.inputs.find import Input, find_inputs
from tests.data.inputs.reading import write

LINE = b'{"text": "a"}\n'


def names(folder: Path, *patterns: Path | str) -> list[str]:
    return [os.path.relpath(item.path, folder) for item in find_inputs([str(p) for p in patterns])]


def test_folders_globs_and_files_each_once_and_in_order(tmp_path: Path) -> None:
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
    # What a glob finds may be a folder, as when a shell expands it.
    assert names(tmp_path, tmp_path / "a*") == everything[:4]
    assert names(tmp_path, tmp_path / "b.jsonl", f"{tmp_path}/./b.jsonl", f"{tmp_path}/a/../b.jsonl") == [
        "b.jsonl"
    ]


def test_what_an_input_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.gz", LINE)
    text = write(tmp_path / "b.txt", b"abc")
    assert find_inputs([str(path), "-", str(text), "-"]) == [
        Input(str(path), "jsonl", "gz", path.stat().st_size),
        Input("-", "jsonl", None, None),
        Input(str(text), "text", None, 3),
    ]


def test_links_are_followed_once(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write(tmp_path / "real" / "a.jsonl", LINE)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "folder").symlink_to(tmp_path / "real")
    (tmp_path / "in" / "b.jsonl").symlink_to(tmp_path / "real" / "a.jsonl")
    for name in ("loop", "again"):  # two of them: 2^40 ways before the system calls it a loop
        (tmp_path / "real" / name).symlink_to(tmp_path / "in")
    assert names(tmp_path, tmp_path / "in") == ["in/b.jsonl"]


def test_json_is_taken_where_it_holds_lines(tmp_path: Path) -> None:
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


def test_a_search_leaves_out_what_is_no_input(tmp_path: Path) -> None:
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
        with pytest.raises(
            ConfigError, match=rf"{glob[-4:].replace('*', '.')} matches no file that ends in .*empty"
        ):
            find_inputs([str(tmp_path / glob)])
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match=r"folder is a folder without files .*empty ones do not count"):
        find_inputs([str(tmp_path / "folder")])


def test_what_is_no_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        "folder.jsonl": r"folder\.jsonl is a folder without files that end in \.jsonl",
        "pipe.jsonl": r"pipe\.jsonl cannot be read: it is a pipe, folder or device.*--input -",
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
    with pytest.raises(ConfigError, match=r"secret\.jsonl cannot be read: Permission denied; mend the file"):
        find_inputs([str(tmp_path / "secret.jsonl")])


def test_a_folder_that_must_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locked").mkdir()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"locked cannot be read: Permission denied"):
        find_inputs([str(tmp_path)])


def test_a_damaged_json_gz_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(LINE)[:-9])
    with pytest.raises(ConfigError, match=r"a\.json\.gz cannot be read: it ends in the middle"):
        find_inputs([str(tmp_path)])
