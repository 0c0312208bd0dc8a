"""Checkpoints of a real run, to read or to damage."""

import shutil
from pathlib import Path

import pytest

from tests.checkpoint.inspecting import train


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of a tiny run, shared by all tests: do not change them."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    train(folder)
    return folder


@pytest.fixture
def folder(real: Path, tmp_path: Path) -> Path:
    """A copy of them that the test may change."""
    return Path(shutil.copytree(real, tmp_path / "checkpoints"))
