import dataclasses
import errno
import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config.errors import ConfigError
from megalite.data import index_cache
from megalite.data.index_cache import Arrays, IndexCache, Recipe

COUNT = 1000


def recipe(built: list[int] | None = None, seed: int = 1, count: int = COUNT) -> Recipe:
    """Two arrays; `built` counts how often they are built."""

    def fill(arrays: Arrays) -> None:
        if built is not None:
            built.append(seed)
        arrays["a"][:] = np.arange(count) * seed
        arrays["b"][:] = seed

    return Recipe(
        name="web, train",
        identity=lambda: {"seed": seed},
        arrays={"a": (np.dtype(np.int32), (count,)), "b": (np.dtype(np.int64), (count, 2))},
        fill=fill,
    )


def cache(folder: Path, lines: list[str] | None = None, **settings: Any) -> IndexCache:
    log = pytest.fail if lines is None else lines.append
    return IndexCache(folder, settings.pop("chosen", False), log, settings.pop("small_bytes", 0))


def is_right(arrays: Arrays, seed: int = 1) -> bool:
    return np.array_equal(arrays["a"], np.arange(COUNT) * seed) and (arrays["b"] == seed).all()


def test_small_indices_are_not_written(tmp_path: Path) -> None:
    kept = cache(tmp_path / "c", small_bytes=COUNT * 20 + 1)
    kept.prepare(recipe())
    assert is_right(kept.get(recipe())) and not (tmp_path / "c").exists()


def test_index_is_built_once_and_mapped(tmp_path: Path) -> None:
    built: list[int] = []
    first = cache(tmp_path / "c")
    made, again = first.prepare(recipe(built)), first.prepare(recipe(built))
    assert made is not None and again is not None and (made.built, again.built) == (True, False)
    second = cache(tmp_path / "c")
    second.prepare(recipe(built))
    arrays = cache(tmp_path / "c").get(recipe(built))
    assert is_right(arrays) and built == [1]
    assert type(arrays["a"]) is np.ndarray and not arrays["a"].flags.writeable
    assert (arrays["a"].dtype, arrays["b"].shape) == (np.int32, (COUNT, 2))
    assert [(one.nbytes, one.built) for one in [*first.kept, *second.kept]] == [(COUNT * 20, True), (COUNT * 20, False)]
    # The entry contains its recipe, and other entries are in the same folder.
    assert json.loads((first.kept[0].folder / "entry.json").read_text())["about"]["seed"] == 1
    assert is_right(cache(tmp_path / "c").get(recipe(built, seed=2)), seed=2) and built == [1, 2]
    assert len(list((tmp_path / "c").iterdir())) == 2


def test_removed_entry_is_rebuilt_and_open_maps_stay_valid(tmp_path: Path) -> None:
    built: list[int] = []
    arrays = cache(tmp_path / "c").get(recipe(built))
    (entry,) = (tmp_path / "c").iterdir()
    for file in entry.iterdir():
        file.unlink()
    entry.rmdir()
    assert is_right(arrays)
    assert is_right(cache(tmp_path / "c").get(recipe(built))) and built == [1, 1]


@pytest.mark.parametrize("name", ["a.npy", "b.npy", "entry.json"])
@pytest.mark.parametrize("how", ["flip", "cut", "grow", "empty", "gone"])
def test_damaged_entry_is_rebuilt(tmp_path: Path, name: str, how: str) -> None:
    built: list[int] = []
    first = cache(tmp_path / "c")
    first.prepare(recipe(built))
    file = first.kept[0].folder / name
    content = bytearray(file.read_bytes())
    if how == "flip":
        content[len(content) // 2] ^= 16
    changed = {"flip": content, "cut": content[:-1], "grow": content + b"0"}.get(how, bytearray())
    file.write_bytes(changed)
    if how == "gone":
        file.unlink()
    lines: list[str] = []
    assert is_right(cache(tmp_path / "c", lines).get(recipe(built))) and built == [1, 1]
    assert len(lines) == 1 and "is damaged: the index of web, train has been built again" in lines[0]
    assert is_right(cache(tmp_path / "c").get(recipe(built))) and built == [1, 1]
    assert len(list((tmp_path / "c").iterdir())) == 1


def test_entry_of_another_index_is_rebuilt(tmp_path: Path) -> None:
    """A valid entry under the wrong name."""
    first, built = cache(tmp_path / "c"), []  # type: tuple[IndexCache, list[int]]
    first.prepare(recipe(seed=2))
    first.kept[0].folder.rename(tmp_path / "c" / recipe(seed=1).key)
    assert is_right(cache(tmp_path / "c", []).get(recipe(built))) and built == [1]


def test_folder_emptied_while_an_index_is_built(tmp_path: Path) -> None:
    """By another rank's check, or a user: the index is restarted, built once and kept."""
    built: list[int] = []
    whole = recipe(built)

    def fill(arrays: Arrays) -> None:
        whole.fill(arrays)
        shutil.rmtree(tmp_path / "c")

    kept = cache(tmp_path / "c").prepare(dataclasses.replace(whole, fill=fill))
    assert kept is not None and kept.built and kept.folder.is_dir()
    assert is_right(cache(tmp_path / "c").get(recipe(built))) and built == [1]
    shutil.rmtree(tmp_path / "c")
    assert is_right(cache(tmp_path / "c").get(dataclasses.replace(whole, fill=fill))) and built == [1, 1]


def test_indices_are_built_in_memory_if_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file, no folder")
    built: list[int] = []
    lines: list[str] = []
    kept = cache(tmp_path / "c", lines)
    kept.prepare(recipe(built))
    assert not built and not kept.kept  # nothing is built and discarded
    assert is_right(kept.get(recipe(built))) and is_right(kept.get(recipe(built, seed=2)), seed=2)
    assert len(lines) == 1
    assert f"cannot write to {tmp_path / 'c'} (File exists): the index of web, train (0 MB)" in lines[0]
    with pytest.raises(ConfigError, match=r"data_cache_path .*c: File exists: cannot store the index of web"):
        cache(tmp_path / "c", chosen=True).prepare(recipe())
    with pytest.raises(ConfigError, match="data_cache_path"):
        cache(tmp_path / "c", chosen=True).get(recipe())


def test_disk_full_during_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("megalite.data.index_cache.os.fsync", full)
    built: list[int] = []
    lines: list[str] = []
    assert is_right(cache(tmp_path / "c", lines).get(recipe(built))) and built == [1]
    assert "No space left" in lines[0] and not list((tmp_path / "c").iterdir())
    with pytest.raises(ConfigError, match="No space left"):
        cache(tmp_path / "c", chosen=True).get(recipe())
    assert not list((tmp_path / "c").iterdir())


def test_index_larger_than_the_free_space_is_not_started(tmp_path: Path) -> None:
    lines: list[str] = []
    huge = recipe(count=1 << 56)
    cache(tmp_path / "c", lines).prepare(huge)
    assert "no room for" in lines[0] and not list((tmp_path / "c").iterdir())


def test_leftovers_of_a_killed_build_are_removed_after_a_day(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    for name, age in ((".tmp-old", 90000), (".tmp-new", 10)):
        (folder / name).mkdir(parents=True)
        (folder / name / "a.npy").write_bytes(b"part")
        os.utime(folder / name, (time.time() - age,) * 2)
    cache(folder).prepare(recipe())
    assert {path.name for path in folder.iterdir()} == {".tmp-new", recipe().key}


def test_entry_is_checked_once_per_process_unless_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache(tmp_path / "c").prepare(recipe())
    read: list[str] = []

    def checked(path: Path) -> dict[str, int]:
        read.append(path.name)
        return whole(path)

    whole = index_cache._file_facts
    monkeypatch.setattr(index_cache, "_file_facts", checked)
    lines: list[str] = []
    mine = cache(tmp_path / "c", lines)
    mine.prepare(recipe())
    assert is_right(mine.get(recipe())) and is_right(mine.get(recipe()))
    assert read == ["a.npy", "b.npy"] and not lines
    file = tmp_path / "c" / recipe().key / "a.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"1")
    os.utime(file, (1, 1))
    assert is_right(mine.get(recipe())) and len(lines) == 1


@pytest.mark.parametrize("damaged", [True, False])
def test_concurrent_builders_agree(tmp_path: Path, damaged: bool) -> None:
    """All have found the entry damaged or missing before the first of them publishes; no other file is left."""
    if damaged:
        cache(tmp_path / "c").prepare(recipe())
        (tmp_path / "c" / recipe().key / "a.npy").write_bytes(b"damaged")
    barrier = threading.Barrier(4)

    def fill(arrays: Arrays) -> None:
        recipe().fill(arrays)
        barrier.wait()

    slow = Recipe(recipe().name, recipe().identity, recipe().arrays, fill)

    def build(_: int) -> bool:
        return is_right(cache(tmp_path / "c", [], chosen=True).get(slow))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(build, range(4)))
    assert [path.name for path in (tmp_path / "c").iterdir()] == [recipe().key]


def test_space_for_all_indices_is_checked_before_the_first(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    # Each needs half of the free space.
    halves = [recipe(seed=seed, count=free // 40) for seed in range(3)]
    lines: list[str] = []
    cache(tmp_path / "c" / "d", lines).need_room(halves[:1])
    assert lines == []
    cache(tmp_path / "c" / "d", lines).need_room(halves)
    assert len(lines) == 1 and "in 3 indices" in lines[0]
    with pytest.raises(ConfigError, match="in 3 indices"):
        cache(tmp_path / "c", chosen=True).need_room(halves)
    cache(tmp_path / "c", small_bytes=1 << 62).need_room(halves)
