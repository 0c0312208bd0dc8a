"""`megalite inspect` while a run removes its older checkpoints: removed ones do not count as damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import megalite.checkpoint.folders as folders_module
import megalite.cli.inspect_tensors as tensors_module
from megalite.cli.inspect import OK
from tests.checkpoint.inspecting import Captured, Tensors, inspect, refused, said, save_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    for step in (1, 2):
        _save(folder, step)
    return folder


def _save(folder: Path, step: int) -> Path:
    tensors: Tensors = {("weight", "", "w"): torch.full((4,), float(step))}
    save_tensors(folder, tensors, step=step)
    return folder / f"step-000000{step}"


def _before(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, event: Callable[..., bool], then: Callable[[], Any]
) -> None:
    """Call `then` once, just before the function is called with arguments for which `event` holds."""
    original, pending = getattr(module, name), [then]

    def called(*args: Any, **kwargs: Any) -> Any:
        if pending and event(*args):
            pending.pop()()
        return original(*args, **kwargs)

    monkeypatch.setattr(module, name, called)


def _in(step: Path) -> Callable[..., bool]:
    return lambda path, *others: path.parent == step


@pytest.mark.parametrize("function", ["read_text", "length_fault"])
def test_older_checkpoint_removed(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    older = folder / "step-0000001"
    _before(monkeypatch, folders_module, function, _in(older), lambda: shutil.rmtree(older))
    assert inspect(folder) == OK
    table, rest = said(capsys).split("\n\n", 1)
    assert table.splitlines()[2].endswith("removed meanwhile") and rest.endswith("sha256 OK\n")


def test_newest_checkpoint_removed_in_hashing(folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = folder / "step-0000002"
    _before(monkeypatch, folders_module, "entry_fault", _in(newest), lambda: shutil.rmtree(newest))
    assert inspect(folder) == OK
    table, rest = said(capsys).split("\n\n", 1)
    assert table.splitlines()[1].endswith("removed meanwhile")
    assert rest.startswith(f"checkpoint   {folder / 'step-0000001'}")


def test_removed_during_diff(folder: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    other = _save(tmp_path / "other", 1)
    newest = folder / "step-0000002"
    _before(monkeypatch, tensors_module, "compare", lambda *_: True, lambda: shutil.rmtree(newest))
    assert f"{newest} was removed meanwhile" in refused(capsys, "--diff", other, folder, "--no-verify")
