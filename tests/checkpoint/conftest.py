"""A real run's checkpoints, to look at or to spoil."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.inspecting import train


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a tiny run; nothing in them may be changed."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    train(folder)
    return folder


@pytest.fixture
def folder(real: Path, tmp_path: Path) -> Path:
    """A copy of them, for one test."""
    return Path(shutil.copytree(real, tmp_path / "checkpoints"))
