"""Fixtures of end-to-end tests: a small corpus, and the environment of a single process."""

from pathlib import Path

import pytest

from tests.e2e.corpus import build_corpus
from tests.e2e.programs import Corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Half a megabyte of text, with tokenizer and token files."""
    return build_corpus(tmp_path_factory.mktemp("corpus"), megabytes=0.5)


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prevent commands that run in this process from taking it for one of the ranks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"
