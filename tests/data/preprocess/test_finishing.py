"""Runs that were stopped while they gave their finished files their names."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from megalite.config.errors import ConfigError
from megalite.data.preprocess.run import preprocess
from tests.data.preprocess.jobs import (
    Stop,
    documents,
    number_job,
    output_bytes,
    run_numbers,
    write_numbers,
)


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Puts a file in the place of standard input."""
    with ExitStack() as files:
        yield lambda path: monkeypatch.setattr(sys, "stdin", files.enter_context(path.open()))
        monkeypatch.undo()


def stop_before(patch: pytest.MonkeyPatch, file: str) -> None:
    """End the run when it is about to give this file its name."""
    replace = Path.replace

    def check(self: Path, target: str) -> Path:
        if self.name == file:
            raise Stop
        return replace(self, target)

    patch.setattr(Path, "replace", check)


def leave_finished(folder: Path, file: str, *inputs: Path | str, restart: bool = False) -> None:
    """A run that did everything but give this file and the later ones their names."""
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, file)
        with pytest.raises(Stop) as stopped:
            run_numbers(folder, *inputs, restart=restart)
    assert "documents are kept in" in stopped.value.__notes__[0]


@pytest.mark.parametrize("file", ["0.bin", "0.idx", "0.json"])
def test_the_next_run_only_renames(tmp_path: Path, file: str) -> None:
    path = write_numbers(tmp_path / "a.jsonl", 30)
    run_numbers(tmp_path, path)
    expected = output_bytes(tmp_path)
    leave_finished(tmp_path, file, path, restart=True)
    # Stopped a second time there, it says once more what is kept.
    leave_finished(tmp_path, file, path)
    result = run_numbers(tmp_path, path)
    assert "only had to rename" in result.notice and result.kept_documents == result.documents == 30
    assert output_bytes(tmp_path) == expected and not (tmp_path / "out.unfinished").exists()


@pytest.mark.parametrize("renamed", [False, True])
def test_files_that_changed_meanwhile(tmp_path: Path, renamed: bool) -> None:
    path = write_numbers(tmp_path / "a.jsonl", 30)
    leave_finished(tmp_path, "0.idx" if renamed else "0.bin", path)
    file = tmp_path / ("out_text_document.bin" if renamed else "out.unfinished/0.bin")
    file.write_bytes(file.read_bytes()[::-1])
    if renamed:
        with pytest.raises(ConfigError, match=r"document\.bin has changed; add --restart"):
            run_numbers(tmp_path, path)
    result = run_numbers(tmp_path, path, restart=renamed)
    assert (result.documents, result.kept_documents) == (30, 0)
    assert documents(tmp_path)[7] == [0, 7, 14]


@pytest.mark.parametrize("renamed", [False, True])
def test_one_more_input_is_read_or_refused(tmp_path: Path, renamed: bool) -> None:
    paths = [write_numbers(tmp_path / f"{name}.jsonl", 20, 20 * i) for i, name in enumerate("ab")]
    leave_finished(tmp_path, "0.idx" if renamed else "0.bin", paths[0])
    if renamed:
        with pytest.raises(
            ConfigError, match=r"names, and input .*b\.jsonl is not one that it read; add --res"
        ):
            run_numbers(tmp_path, *paths)
        assert (tmp_path / "out_text_document.bin").exists() and (tmp_path / "out.unfinished").exists()
    result = run_numbers(tmp_path, *paths, restart=renamed)
    assert (result.documents, result.kept_documents) == (40, 0 if renamed else 20)
    assert len(documents(tmp_path)) == 40


@pytest.mark.parametrize("file", ["0.bin", "0.idx"])
def test_one_input_fewer_is_refused(tmp_path: Path, file: str) -> None:
    paths = [write_numbers(tmp_path / f"{name}.jsonl", 20, 20 * i) for i, name in enumerate("ab")]
    leave_finished(tmp_path, file, *paths)
    with pytest.raises(ConfigError, match=r"now input 2 is missing; add --restart"):
        run_numbers(tmp_path, paths[0])
    assert run_numbers(tmp_path, paths[0], restart=True).documents == 20


@pytest.mark.parametrize("renamed", [False, True])
def test_standard_input_is_read_again_or_refused(
    tmp_path: Path, renamed: bool, feed: Callable[[Path], None]
) -> None:
    first, other = (write_numbers(tmp_path / f"{i}.jsonl", 20, i) for i in (0, 500))

    feed(first)
    leave_finished(tmp_path, "0.idx" if renamed else "0.bin", "-")
    for path in (other, first):
        feed(path)
        if renamed:
            with pytest.raises(
                ConfigError, match="read standard input, which cannot be compared; add --restart"
            ):
                run_numbers(tmp_path, "-")
        elif path is other:
            with pytest.raises(ConfigError, match="input - has changed"):
                run_numbers(tmp_path, "-")
    feed(first)
    assert run_numbers(tmp_path, "-", restart=renamed).documents == 20
    assert documents(tmp_path)[7] == [0, 7, 14]


def test_standard_input_before_another_cannot_be_compared(
    tmp_path: Path, feed: Callable[[Path], None]
) -> None:
    first, other = (write_numbers(tmp_path / f"{i}.jsonl", 20, i) for i in (0, 500))
    feed(first)
    leave_finished(tmp_path, "0.bin", "-", other)
    feed(other)
    with pytest.raises(
        ConfigError, match="has read all of standard input, which cannot be compared; add --res"
    ):
        run_numbers(tmp_path, "-", other)


def test_paths_may_be_spelled_in_another_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_numbers(tmp_path / "a.jsonl", 30)
    leave_finished(tmp_path, "0.idx", path)
    monkeypatch.chdir(tmp_path)
    assert "only had" in preprocess(number_job(tmp_path, f".{os.sep}a.jsonl")).notice
